"""Measures scripts/embed.py: its accuracy with a few examples, compared with linear probes, and its peak memory.

    python scripts/benchmarks/embeddings.py examples -seeds 3
    python scripts/benchmarks/embeddings.py memory -images 10000 100000

`examples` draws photos of 13 shapes, 32 x 32 pixels. For each seed it trains a small ResNet on 5 of the shapes, and another
one on the other 8. Then photos of these 8 classes are classified with 1, 5 and 20 examples of each class: by
`embed.py -examples`, and by logistic regressions on the same features of the same examples. The best of the regressions
is chosen on the test photos, so its figure is an upper bound. `memory` draws tiny photos and writes their features.
"""

import contextlib
import csv
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
from PIL import Image, ImageDraw

from scripts.benchmarks.common import ROOT, machine, table
from scripts.command_line import Parser, at_least
from scripts.embed import main as embed_main
from utils.errors import ConfigError, needing
from utils.text import counted

CLASSES = ("circle", "square", "triangle", "cross", "ring", "bars", "diamond", "dots")
OTHERS = ("moon", "arrow", "letter", "hook", "steps")
NUM_TRAIN, NUM_VAL, NUM_POOL, NUM_TEST = 200, 20, 50, 100  # photos of each class
COUNTS, NUM_DRAWS = (1, 5, 20), 3  # examples of each class, and random choices of the examples
PENALTIES = (0.01, 0.1, 1, 10)  # C of the logistic regressions
SIDE, DRAWN = 32, 128  # pixels of a photo, and of a shape before it is resized
SETTINGS = """
DATA: {DATASET: imagefolder, IMAGE_SIZE: 32, BATCH_SIZE: 32, NUM_WORKERS: 0, CROP_SCALE: [0.7, 1], CROP_PCT: 1}
MODEL: {TYPE: timm, NAME: test_resnet}
TRAIN: {NUM_EPOCHS: 8, WARMUP_EPOCHS: 1, BASE_LR: 1e-2}
TRACK: []
REPORT: false
"""
Box = tuple[int, int, int, int]


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="examples | memory")
    examples, memory = (commands.add_parser(name, description=__doc__) for name in ("examples", "memory"))
    examples.add_argument("-seeds", type=at_least(1), default=3, metavar="N", help="number of seeds [3]")
    memory.add_argument("-images", type=at_least(1), nargs="+", default=[10_000, 100_000], metavar="N")
    memory.add_argument("-rounds", type=at_least(1), default=3, metavar="N", help="measurements of each number [3]")
    memory.add_argument("-model", default=str(ROOT / "weights/vit_fractals.safetensors"), help="model to measure")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.command == "examples":
            print(measure_examples(Path(folder), arguments.seeds))
        else:
            print(measure_memory(Path(folder), arguments.model, arguments.images, arguments.rounds))
    print(machine())
    return 0


# --- a few examples


def measure_examples(folder: Path, num_seeds: int) -> str:
    """Return a table with the accuracy of both methods on both models, one figure per seed."""
    with needing("scikit-learn", "examples"):
        import sklearn  # noqa: F401
    rows = []
    for title, kinds in (("5 other classes", OTHERS), ("the same 8 classes", CLASSES)):
        found: dict[int, list[tuple[float, float]]] = {count: [] for count in COUNTS}
        for seed in range(num_seeds):
            by_count = measure_seed(folder / f"{kinds[0]}-{seed}", kinds, seed)
            for count in COUNTS:
                found[count].append(by_count[count])
        for count, figures in found.items():
            ours, probes = (" ".join(f"{100 * each:.1f}" for each in column) for column in zip(*figures, strict=True))
            difference = 100 * statistics.mean(our - probe for our, probe in figures)
            rows.append([title, str(count), ours, probes, f"{difference:+.1f}"])
    columns = ["model trained on", "examples", "`-examples`, %", "best linear probe, %", "difference"]
    return table(f"{counted(num_seeds, 'seed')}, mean of {NUM_DRAWS} choices of the examples each", columns, rows)


def measure_seed(folder: Path, kinds: Sequence[str], seed: int) -> dict[int, tuple[float, float]]:
    """Return {number of examples: (accuracy of -examples, of the best probe)} for one model."""
    rng = np.random.default_rng(seed)
    for part, names, count in (
        ("data/train", kinds, NUM_TRAIN),
        ("data/val", kinds, NUM_VAL),
        ("pool", CLASSES, NUM_POOL),
        ("test", CLASSES, NUM_TEST),
    ):
        write_photos(folder / part, names, count, rng)
    (folder / "settings.yaml").write_text(SETTINGS)
    words = ["-cfg", folder / "settings.yaml", "-data_path", folder / "data", "-output", folder, "-name", "run"]
    run("main_single_gpu.py", *words, "-seed", seed)
    features = {name: features_of(folder, name) for name in ("pool", "test")}
    accuracies: dict[int, list[tuple[float, list[float]]]] = {count: [] for count in COUNTS}
    for draw in range(NUM_DRAWS):
        order = np.random.default_rng((seed, draw)).permutation(NUM_POOL)
        for count in COUNTS:
            chosen = {f"{name}/{number}.png" for name in CLASSES for number in order[:count]}
            accuracies[count].append((accuracy_of_ours(folder, chosen), accuracies_of_probes(features, chosen)))
    means = {
        count: (statistics.mean(ours for ours, _ in found), float(np.mean([each for _, each in found], axis=0).max()))
        for count, found in accuracies.items()
    }
    print(f"seed {seed}, {len(kinds)} classes: {means}", file=sys.stderr, flush=True)
    return means


def run(script: str, *words: object) -> None:
    done = subprocess.run([sys.executable, ROOT / script, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{script} ended with exit code {done.returncode}: {done.stderr.strip()}")


def embed(*words: object) -> None:
    """Run scripts/embed.py in this process, because importing torch for each call would take minutes in total."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
        code = embed_main([str(word) for word in words])
    if code:
        raise ConfigError(f"scripts/embed.py ended with exit code {code}: {printed.getvalue()}")


def features_of(folder: Path, part: str) -> tuple[list[str], np.ndarray]:
    """Return the paths and the features of a folder of photos."""
    embed(folder / "run", folder / part, "-output", folder / f"{part}.npz")
    with np.load(folder / f"{part}.npz", allow_pickle=False) as found:
        return found["paths"].tolist(), found["features"]


def accuracy_of_ours(folder: Path, chosen: set[str]) -> float:
    shutil.rmtree(folder / "examples", ignore_errors=True)
    for path in chosen:
        (folder / "examples" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "pool" / path, folder / "examples" / path)
    words = (folder / "run", folder / "test", "-examples", folder / "examples", "-csv", folder / "found.csv")
    words += ("-output", folder / "features.parquet")  # read after the first call
    embed(*words)
    with open(folder / "found.csv", encoding="utf-8-sig", newline="") as file:
        return statistics.mean(Path(row["image_path"]).parent.name == row["class"] for row in csv.DictReader(file))


def accuracies_of_probes(features: dict[str, tuple[list[str], np.ndarray]], chosen: set[str]) -> list[float]:
    """Return the accuracy of each logistic regression: with each penalty, on normalized or standardized features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import Normalizer, StandardScaler

    paths, vectors = features["pool"]
    rows = [row for row, path in enumerate(paths) if path in chosen]
    labels, (test_paths, test_vectors) = [paths[row].split("/")[0] for row in rows], features["test"]
    test_labels, found = np.array([path.split("/")[0] for path in test_paths]), []
    for scaler in (Normalizer(), StandardScaler()):
        scaled, test_scaled = scaler.fit_transform(vectors[rows]), scaler.transform(test_vectors)
        for penalty in PENALTIES:
            probe = LogisticRegression(C=penalty, max_iter=5000).fit(scaled, labels)
            found.append(float(np.mean(probe.predict(test_scaled) == test_labels)))
    return found


# --- drawn photos


def write_photos(folder: Path, kinds: Sequence[str], count: int, rng: np.random.Generator) -> None:
    for kind in kinds:
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            draw_photo(kind, rng).save(folder / kind / f"{number}.png")


def draw_photo(kind: str, rng: np.random.Generator) -> Image.Image:
    """Draw a shape in a random colour, size, place and rotation, with noise and sometimes a patch over it."""
    shape = Image.new("L", (DRAWN, DRAWN))
    draw_shape(ImageDraw.Draw(shape), kind)
    size = int(rng.uniform(22, SIDE))
    shape = shape.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR).resize(
        (size, size), Image.Resampling.BILINEAR
    )
    mask, (left, top) = np.zeros((SIDE, SIDE, 1)), rng.integers(0, SIDE + 1 - size, 2)
    mask[top : top + size, left : left + size, 0] = np.asarray(shape) / 255
    back, front = rng.uniform(0, 255, (2, 3))
    front = back + (front - back) * max(1, 60 / np.abs(front - back).max())
    pixels = back * (1 - mask) + front * mask
    if rng.random() < 0.25:
        left, top = rng.integers(4, 20, 2)
        pixels[top : top + 9, left : left + 9] = rng.uniform(0, 255, 3)
    pixels += rng.normal(0, rng.uniform(5, 30), pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def draw_shape(draw: ImageDraw.ImageDraw, kind: str) -> None:
    """Draw a white shape of about 80 pixels in the centre."""
    low, middle, high = 24, 64, 104
    whole: Box = (low, low, high, high)
    bars = [(low, top, high, top + 12) for top in (low, 58, 92)]
    dots = [(x - 13, y - 13, x + 13, y + 13) for x in (40, 88) for y in (40, 88)]
    ellipses: dict[str, list[Box]] = {"circle": [whole], "moon": [whole], "dots": dots}
    rectangles: dict[str, list[Box]] = {
        "square": [whole],
        "bars": bars,
        "cross": [(low, 52, high, 76), (52, low, 76, high)],
        "arrow": [(low, 56, 69, 72)],
        "hook": [(low, low, 44, high), (low, 84, high, high)],
        "steps": [(low, 76, high, high), (50, 50, high, 76), (76, low, high, 50)],
    }
    polygons = {
        "triangle": [(middle, 18), (high, 87), (low, 87)],
        "diamond": [(middle, 16), (88, middle), (middle, 112), (40, middle)],
        "arrow": [(middle, 38), (high, middle), (middle, 90)],
    }
    for box in ellipses.get(kind, ()):
        draw.ellipse(box, fill=255)
    for box in rectangles.get(kind, ()):
        draw.rectangle(box, fill=255)
    if kind in polygons:
        draw.polygon(polygons[kind], fill=255)
    if kind == "ring":
        draw.ellipse(whole, outline=255, width=14)
    if kind == "moon":
        draw.ellipse((54, low, 134, high), fill=0)
    if kind == "letter":
        draw.line([(low, high), (low, low), (high, high), (high, low)], fill=255, width=14)


# --- memory


def measure_memory(folder: Path, model: str, numbers: Sequence[int], num_rounds: int) -> str:
    """Return a table with the peak memory for each number of photos."""
    for number in numbers:
        write_tiny(folder / f"photos-{number}", number)
    peaks: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(num_rounds):
        for number in numbers:
            shutil.rmtree(folder / "features.parquet", ignore_errors=True)
            words = (model, folder / f"photos-{number}", "-output", folder / "features.parquet")
            peaks[number].append(peak_of("scripts/embed.py", *words))
            print(f"{number}: {peaks[number][-1]:.0f} MiB", file=sys.stderr, flush=True)
    base = statistics.median(peaks[numbers[0]])
    rows = [
        [
            f"{number:,}",
            " ".join(f"{each:.0f}" for each in found),
            f"{100 * statistics.median(found) / base - 100:+.1f}%",
        ]
        for number, found in peaks.items()
    ]
    return table(f"peak memory of {Path(model).name}", ["photos", "peak, MiB", "median against the first"], rows)


def peak_of(script: str, *words: object) -> float:
    """Return the peak resident memory of a command in MiB."""
    process = subprocess.Popen([sys.executable, ROOT / script, *map(str, words)], stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ConfigError(f"{script} ended with exit code {process.returncode}")
    return usage.ru_maxrss / 1024


def write_tiny(folder: Path, number: int) -> None:
    """Write photos of 16 x 12 pixels, at most 10,000 in a folder."""
    rng = np.random.default_rng(0)
    for index in range(number):
        path = folder / f"{index // 10_000}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(12, 16, 3), dtype=np.uint8)).save(path, compress_level=1)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
