"""Measures how often images choose the best weights: fine-tunes every candidate, and compares the choice with the best.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/choice.py real -output choice-runs
    python scripts/benchmarks/choice.py real -output choice-runs -sets stamps20 digits20 -epochs 10 -seeds 0 1 2

A set is one of real.py, digits, or numbers (the probability of a defect of solar cells). A number is that of training images,
which are drawn for each seed: of each class, or for numbers of all. The candidates are EfficientNet-Lite0 and Lite2 from
ImageNet and weights/vit_fractals.safetensors; @PIXELS is an image size. A score is that after the last epoch of a
fine-tuning, as the mean over the seeds. The regret is the score of the best candidate minus that of the choice, always the
largest (the slowest) or always the smallest; its 95% interval is paired over images and seeds. Runs that exist are not repeated.
"""

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
import timm
from PIL import Image

from engine.tasks.number_figures import PREDICTED
from scripts.benchmarks.common import ROOT
from scripts.benchmarks.real import evaluated, few, pooled, start
from scripts.command_line import Parser, at_least
from utils.text import markdown_table

SETS = ("stamps", "stamps20", "emoji20", "solar60", "numbers120", "digits20")
CANDIDATES = ("lite0@128", "lite2@128", "lite0@224", "vit_fractals")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("real", type=Path, metavar="FOLDER", help="the folder of real_sets.py")
    parser.add_output("FOLDER", "folder for the runs")
    parser.add_argument("-sets", nargs="+", default=SETS, help=f"image sets [{' '.join(SETS)}]")
    parser.add_argument("-candidates", nargs="+", default=CANDIDATES, help=f"candidates [{' '.join(CANDIDATES)}]")
    parser.add_argument("-epochs", type=at_least(1), default=10, metavar="N", help="epochs [10]")
    parser.add_argument("-seeds", type=at_least(0), nargs="+", default=[0, 1, 2], metavar="N", help="seeds [0 1 2]")
    given = parser.parse_args(argv)
    words = [word_of(name, given.real, given.output) for name in given.candidates]
    rows, regrets = [], {}
    for name in given.sets:
        chosen, tuned = [], []
        for seed in given.seeds:
            data, start_of_names = data_of(name, given, seed), f"{name}-{given.epochs}-{seed}"
            chosen.append(choice(given.output / f"{start_of_names}-{'+'.join(given.candidates)}.json", words, data))
            folders = [given.output / f"{start_of_names}-{each}" for each in given.candidates]
            tuned.append([errors_of(folder, word, data) for folder, word in zip(folders, words, strict=True)])
        cells, differences = row_of(name, words, chosen, np.array(tuned))
        rows.append(cells)
        if not name.startswith("numbers"):
            regrets |= {(name, given.epochs, seed): row for seed, row in zip(given.seeds, differences, strict=True)}
        print(" | ".join(rows[-1]), flush=True)
    columns = ["set", *(title for each in given.candidates for title in (each, "head")), "chosen", "rank correlation"]
    print("\n" + markdown_table([*columns, "regret", "of the largest", "of the smallest"], rows))
    if regrets:
        print(f"\nmean regret of the choice among classes: {pooled(regrets)}")
    return 0


def word_of(name: str, real: Path, output: Path) -> str:
    """Return the word of a candidate. Weights of real_sets.py, which name no model, get a folder with a config.json."""
    model, _, size = name.partition("@")
    if model == "vit_fractals":
        return str(ROOT / f"weights/{model}.safetensors") + f"@{size}" * bool(size)
    folder, architecture = output / "weights" / model, f"tf_efficientnet_{model}"
    folder.mkdir(parents=True, exist_ok=True)
    known = timm.get_pretrained_cfg(architecture).to_dict()
    facts = {key: known[key] for key in ("input_size", "mean", "std", "crop_pct", "interpolation")}
    (folder / "config.json").write_text(json.dumps({"architecture": architecture, "pretrained_cfg": facts}))
    link = folder / "model.safetensors"
    if not link.exists():
        link.symlink_to((real / f"{model}.safetensors").resolve())
    return str(folder) + f"@{size}" * bool(size)


class Data(NamedTuple):
    """The flags of a set."""

    where: list[str]
    options: list[str]  # for -opts
    of_runs: list[str]  # more of them, for fine-tuning


def data_of(name: str, given, seed: int) -> Data:
    base, options = name.rstrip("0123456789"), []
    if base == "numbers":
        folder, options = some_numbers(given, name, seed), ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,defect]"]
    else:
        real = with_digits(given.output) if base == "digits" else given.real
        folder = few(real, given.output, name, seed)
    of_runs = [f"SEED={seed}", f"TRAIN.NUM_EPOCHS={given.epochs}", f"VALIDATE_FREQ={given.epochs}", "REPORT=false"]
    of_runs += ["DATA.HFLIP=0"] if base == "digits" else []
    where = ["-dataset", "csv" if base == "numbers" else "imagefolder", "-data_path", str(folder)]
    return Data(where, options, of_runs)


def some_numbers(given, name: str, seed: int) -> Path:
    """Return a folder with as many of the solar cells as the name says, and all of those for validation."""
    source, folder = given.real / "solar", given.output / "images" / f"{name}-{seed}"
    if name == "numbers":
        return source
    for part in ("train", "val"):
        with open(source / f"{part}.csv", encoding="utf-8", newline="") as file:
            columns, *rows = csv.reader(file)
        if part == "train":
            chosen = np.random.default_rng(seed).permutation(len(rows))[: int(name.removeprefix("numbers"))]
            rows = [rows[number] for number in sorted(chosen)]
        for path in (row[columns.index("path")] for row in rows):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / path).exists():
                shutil.copyfile(source / path, folder / path)
        with open(folder / f"{part}.csv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    return folder


def with_digits(output: Path) -> Path:
    """Return a folder that has the folder digits: halfstep's digits as images, every second one for validation."""
    with np.load(ROOT / "datasets/sources/digits.npz", allow_pickle=False) as file:
        images, digits = np.uint8(np.round(file["images"] * (255 / 16))), file["targets"]
    for row, (pixels, digit) in enumerate(zip(images, digits, strict=True)):
        folder = output / "digits" / ("train", "val")[row % 2] / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{row}.png")
    return output


def choice(path: Path, words: list[str], data: Data) -> dict:
    """Return the record of a choice, made before or now."""
    if not path.exists():
        files = ["-output", path.parent / "choice", "-json", path]
        flags = [*data.where, "-opts", *data.options, *data.of_runs]
        start([sys.executable, ROOT / "scripts/models.py", *words, *files, *flags])
    return json.loads(path.read_text())


def errors_of(folder: Path, word: str, data: Data) -> np.ndarray:
    """Fine-tune a candidate, unless it was done before. Return the error of each validation image: 0 or 1, or its size."""
    if not (folder / "run/results.json").exists():
        # With choose, all candidates have the same settings; else weights of halfstep would have those of their run.
        words = ["-pretrained", f"choose:{word}", "-output", folder, "-name", "run", "-resume", "auto", *data.where]
        options = [*data.options, *data.of_runs, "KEEP_CHECKPOINTS=0", "TRACK=[]"]
        start([sys.executable, ROOT / "main_single_gpu.py", *words, "-opts", *options])
    table = evaluated(folder, [*data.where, *(["-opts", *data.options] if data.options else [])])
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if "label" in rows[0]:
        return np.array([row["label"] != row["prediction"] for row in rows], float)
    name = next(key for key in rows[0] if key.endswith(PREDICTED))
    return np.array([abs(float(row[name]) - float(row[name.removesuffix(PREDICTED)])) for row in rows])


def column(record: dict, words: list[str], fact: str) -> list[float]:
    """Return a fact of each candidate, in the order of the words."""
    rows = {row["word"]: row for row in record["candidates"]}
    return [rows[word][fact] for word in words]


def row_of(name: str, words: list[str], chosen: list[dict], tuned: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the row of a set and the regret of its choice [seeds, images]. `tuned`: errors [seeds, candidates, images]."""
    scale = 100 if set(np.unique(tuned)) <= {0.0, 1.0} else 1
    heads = np.array([column(each, words, "score") for each in chosen])
    seconds = np.mean([column(each, words, "seconds") for each in chosen], axis=0)
    errors, picks = tuned.mean(2), [words.index(each["best"]) for each in chosen]
    gains = heads if scale == 100 else -heads
    ranks = [
        np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(-b)))[0, 1]
        for a, b in zip(gains, errors, strict=True)
    ]
    best = int(errors.mean(0).argmin())
    cells = [name]
    for number in range(len(words)):
        score = errors[:, number].mean()
        cells += [f"{100 - 100 * score:.1f}%" if scale == 100 else f"{score:.3f}", f"{heads[:, number].mean():.3g}"]
    cells += [", ".join(Path(words[pick]).name for pick in dict.fromkeys(picks)), f"{np.mean(ranks):.2f}"]
    fixed = ([int(seconds.argmax())] * len(picks), [int(seconds.argmin())] * len(picks))
    regrets = [tuned[range(len(tuned)), taken] - tuned[:, best] for taken in (picks, *fixed)]
    for differences in regrets:
        low, high = interval(differences)
        cells.append(f"{scale * differences.mean():.3g} ({scale * low:.3g} to {scale * high:.3g})")
    return cells, regrets[0]


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return a 95% interval of the mean of differences [seeds, images]. The seeds of an image are not independent."""
    of_images = differences.mean(0)
    half = 1.96 * of_images.std(ddof=1) / len(of_images) ** 0.5
    return of_images.mean() - half, of_images.mean() + half


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
