"""Measures how much learning from unlabelled drawn photos helps, with 5 and 20 labels for each of 8 classes.

    python scripts/benchmarks/unlabelled.py -output output/unlabelled -seeds 3

For each seed it draws photos, trains a teacher on labelled photos, lets a smaller student learn the teacher's features
from photos without labels, and fine-tunes the student. The same model is trained from random weights with the same labels
and the same number of updates. Prints the top-1 accuracy on other photos. Complete runs are not repeated.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
from PIL import Image, ImageDraw

from scripts.command_line import Parser, at_least
from utils.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
SIDE, SCALE = 48, 4  # pixels of a photo; it is drawn larger by this factor
SHAPES = ("circle", "cross", "diamond", "hexagon", "ring", "square", "star", "triangle")
LABELS = (5, 20)
NUM_TEACHER, NUM_UNLABELLED, NUM_TEST = 300, 300, 100  # photos of each class
COMMON = """
DATA: {IMAGE_SIZE: 32, BATCH_SIZE: 64, NUM_WORKERS: 0, CROP_SCALE: [0.5, 1.0]}
TRAIN: {NUM_EPOCHS: %(epochs)d, WARMUP_EPOCHS: %(warmup)d, BASE_LR: %(rate)g, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}
TRACK: []
REPORT: false
KEEP_CHECKPOINTS: 0
VALIDATE_FREQ: 10
"""
MODEL = """MODEL: {TYPE: vit, NAME: vit_student, PATCH_SIZE: 4, EMBED_DIM: 64, DEPTH: 3, NUM_HEADS: 4}
"""
TEACHER_WEIGHTS = ROOT / "weights/vit_fractals.safetensors"  # the teacher is a larger model that starts from these
TEACHER = {"epochs": 20, "warmup": 1, "rate": 1e-3}
STUDENT = {"epochs": 40, "warmup": 4, "rate": 2e-3}
TUNED = {"epochs": 40, "warmup": 4, "rate": 1e-3}
RATES = (3e-4, 1e-3, 3e-3)  # the runs from random weights try all of these, and the best one counts


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder of photos and runs")
    parser.add_argument("-seeds", type=at_least(1), default=3, metavar="N", help="number of seeds [3]")
    arguments = parser.parse_args(argv)
    found = [measure(arguments.output / f"seed {seed}", seed) for seed in range(arguments.seeds)]
    print("| labels of each class | run | top-1 of each seed, % | mean | standard deviation |")
    print("| --- | --- | --- | --- | --- |")
    for labels, name in found[0]:
        scores = [each[labels, name] for each in found]
        spread = f"{stdev(scores):.2f}" if len(scores) > 1 else "-"
        print(f"| {labels} | {name} | {' '.join(f'{each:.2f}' for each in scores)} | {mean(scores):.2f} | {spread} |")
    return 0


def measure(folder: Path, seed: int) -> dict[tuple[int, str], float]:
    """Return {(labels of each class, run): top-1 accuracy} for one seed."""
    draw_sets(folder, seed)
    data = ("-dataset", "imagefolder", "-data_path")
    teacher = train(folder, "teacher", TEACHER, seed, *data, folder / "teacher photos", "-pretrained", TEACHER_WEIGHTS)
    learned = ("-dataset", "images", "-data_path", folder / "unlabelled")
    options = ("TRAIN.OBJECTIVE=features", f"TRAIN.TEACHER_MODEL={teacher / 'best.pth'}")
    student = train(folder, "student", STUDENT, seed, *learned, options=options)
    scores = {(NUM_TEACHER, "teacher"): top1(teacher)}
    for labels in LABELS:
        few = (*data, folder / f"{labels} labels", "-batch_size", "20")
        tuned = train(folder, f"tuned with {labels}", TUNED, seed, *few, "-pretrained", student / "best.pth")
        scores[labels, "features of the teacher, then fine-tuned"] = top1(tuned)
        runs = [train(folder, f"scratch with {labels}, {rate:g}", TUNED | {"rate": rate}, seed, *few) for rate in RATES]
        scores[labels, "from random weights, best of three learning rates"] = max(map(top1, runs))
    return scores


def train(folder: Path, name: str, recipe: dict, seed: int, *flags: object, options: tuple = ()) -> Path:
    """Train unless the run is complete already, and return the folder of the run."""
    run, settings = folder / "runs" / name, folder / f"{name}.yaml"
    if (run / "status.json").exists() and json.loads((run / "status.json").read_text())["state"] == "done":
        return run
    settings.write_text(COMMON % recipe + ("" if name == "teacher" else MODEL))
    words = [
        sys.executable,
        ROOT / "main_single_gpu.py",
        "-cfg",
        settings,
        "-output",
        folder / "runs",
        "-name",
        name,
        *flags,
    ]
    words += ["-resume", "auto", "-opts", f"SEED={seed}", *options]
    ended = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if ended.returncode:
        raise ConfigError(f"the run {name} failed: {ended.stderr.strip() or ended.stdout[-1000:]}")
    print(f"seed {seed}, {name}: {best_of(run)}", flush=True)
    return run


def best_of(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())["best"]


def top1(run: Path) -> float:
    """Return the accuracy of the last weights. The best epoch would be chosen on the test photos."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(rows[-1])["eval_top1"]


def draw_sets(folder: Path, seed: int) -> None:
    """Draw all photos of a seed, unless they exist. Test photos are the validation part of each labelled set."""
    drawn = folder / "drawn"
    if drawn.exists():
        return
    rng = np.random.default_rng(seed)
    for name, count in (("teacher photos/train", NUM_TEACHER), ("test", NUM_TEST), ("20 labels/train", max(LABELS))):
        for path, target in places(folder / name, count):
            save(draw(rng, target), path)
    for path, target in places(folder / "unlabelled", NUM_UNLABELLED):
        save(draw(rng, target), path.parent.with_name("all") / f"{target}-{path.name}")
    for path, _ in places(folder / "5 labels/train", min(LABELS)):
        link(path, folder / "20 labels/train" / path.parent.name / path.name)
    for part in ("teacher photos", "5 labels", "20 labels"):
        for path, _ in places(folder / part / "val", NUM_TEST):
            link(path, folder / "test" / path.parent.name / path.name)
    drawn.touch()


def places(folder: Path, count: int) -> Iterator[tuple[Path, int]]:
    for target, name in enumerate(SHAPES):
        for number in range(count):
            yield folder / name / f"{number:04d}.png", target


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.hardlink_to(target)


def draw(rng: np.random.Generator, target: int) -> Image.Image:
    """Draw a bright shape of random size and position, slightly rotated, on a busy background with noise."""
    side = SIDE * SCALE
    coarse = rng.uniform(0, 180, (6, 6, 3)).astype(np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(2):  # bright lines
        ends = [tuple(rng.uniform(0, side, 2)) for _ in range(2)]
        pen.line(ends, fill=colour(rng), width=int(rng.integers(2, 2 * SCALE)))
    radius, turn = rng.uniform(0.28, 0.4) * side, rng.uniform(-0.4, 0.4)
    centre = rng.uniform(radius, side - radius, 2)
    mask = Image.new("L", (side, side))
    outline(ImageDraw.Draw(mask), SHAPES[target], centre, radius, turn)
    image.paste(colour(rng), mask=mask)
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
    return Image.fromarray((small + rng.normal(0, 8, small.shape)).clip(0, 255).astype(np.uint8))


def colour(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(100, 256, 3).tolist())


def outline(pen: ImageDraw.ImageDraw, shape: str, centre: np.ndarray, radius: float, turn: float) -> None:
    """Fill the shape with white."""

    def points(angles: np.ndarray, radii: np.ndarray | float = 1.0) -> list[tuple[float, float]]:
        around = np.stack([np.cos(angles + turn), np.sin(angles + turn)], 1) * np.reshape(radii, (-1, 1)) * radius
        return [tuple(each) for each in centre + around]

    corners = {"triangle": 3, "square": 4, "hexagon": 6}
    box = [*(centre - radius), *(centre + radius)]
    if shape in ("circle", "ring"):
        pen.ellipse(box, fill=255)
        if shape == "ring":
            inner = 0.55 * radius
            pen.ellipse([*(centre - inner), *(centre + inner)], fill=0)
    elif shape in corners:
        pen.polygon(points(np.arange(corners[shape]) * 2 * math.pi / corners[shape]), fill=255)
    elif shape == "star":
        pen.polygon(points(np.arange(10) * math.pi / 5, np.tile([1.0, 0.4], 5)), fill=255)
    elif shape == "diamond":
        pen.polygon(points(np.arange(4) * math.pi / 2, np.tile([1.0, 0.45], 2)), fill=255)
    else:
        for angle in (0.0, math.pi / 2):
            ends = points(np.array([angle, angle + math.pi]))
            pen.line(ends, fill=255, width=int(0.5 * radius))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
