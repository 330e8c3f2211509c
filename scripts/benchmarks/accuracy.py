"""Fine-tunes on real photos, and compares the accuracy of weights and of other programs on the same files.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/accuracy.py real -output runs
    python scripts/benchmarks/accuracy.py real -output runs -sets stamps emoji20 -epochs 3 10 -seeds 0 1 2
    python scripts/benchmarks/accuracy.py real -output runs -weights real/lite0.safetensors tf_efficientnet_lite0
    python scripts/benchmarks/accuracy.py real -output runs -peers fastai timm -python PYTHON -train_py train.py

SETS lists the sets. A number in a name is that of the training images of each class, which are drawn for each seed.
All programs start from weights of tf_efficientnet_lite0 and train at 128 pixels. `linear` is the classifier that a run
measures before training, and the next column is the top-1 after its last epoch, as the mean over the seeds. Our runs
keep no moving average, because -eval would choose the better of it and the weights by the validation images.

With several -weights, the others are compared with the first, paired by images. The figures of other programs are
stored in accuracy_peers.json, with their versions and settings; `against` is the mean difference over the seeds that
both have, with its 95% interval. -peers runs these programs: fastai with the interpreter of -python, timm with its
train.py. It also writes peers.json, which replaces accuracy_peers.json. Runs that exist are not repeated.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np

from engine.evaluation.student import student
from scripts.benchmarks.common import ROOT
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.text import markdown_table

STORED_PEERS = Path(__file__).with_name("accuracy_peers.json")
PREDICTIONS = "predictions.csv"
WEIGHTS = "lite0.safetensors"
MODEL, SIDE = "tf_efficientnet_lite0", 128


class SetRow(NamedTuple):
    """A row of SETS: real photos, with all or some of the training images."""

    folder: str  # in the folder of real_sets.py
    images_per_class: int | None = None  # training images; None: all


SETS = {
    "stamps": SetRow("stamps"),
    "stamps20": SetRow("stamps", 20),
    "stamps5": SetRow("stamps", 5),
    "emoji": SetRow("emoji"),
    "emoji20": SetRow("emoji", 20),
    "emoji5": SetRow("emoji", 5),
    "solar": SetRow("solar"),
    "solar60": SetRow("solar", 60),
}
USUAL_SETS = ("stamps", "stamps20", "stamps5", "emoji20", "emoji5")


class Key(NamedTuple):
    """What the runs of all weights and programs share."""

    set: str
    epochs: int
    seed: int

    def __str__(self) -> str:
        return f"{self.set}-{self.epochs}-{self.seed}"


class Top1(NamedTuple):
    """The top-1 of a run in percent."""

    linear: float  # accuracy of the linear classifier, before training
    last: float  # after the last epoch


def main(argv: list[str]) -> int:
    if argv[:1] == ["fastai"]:  # this file, started by the interpreter of -python
        data, weights, table, epochs, seed = argv[1:]
        fine_tune_with_fastai(Path(data), Path(weights), Path(table), int(epochs), int(seed))
        return 0
    arguments = parse(argv)
    keys = [
        Key(name, epochs, seed) for seed in arguments.seeds for name in arguments.sets for epochs in arguments.epochs
    ]
    weights = arguments.weights or [str(arguments.real / WEIGHTS)]
    scores = {source: {key: top1_of(arguments, source, key) for key in keys} for source in weights}
    first, *others = weights
    for source in others:
        print(f"{source} against {first}: {pooled(differences(arguments, source, first, keys))}")
    stored = json.loads(STORED_PEERS.read_text())
    if arguments.peers:
        stored["runs"] = run_peers(arguments, first, keys)
        (arguments.output / "peers.json").write_text(json.dumps(stored, indent=1) + "\n")
    print("\n" + table_of(scores, stored["runs"]) + "\n\n" + "\n".join(stored["about"]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("real", type=Path, metavar="FOLDER", help="the folder of real_sets.py")
    parser.add_output("FOLDER", "folder for the runs")
    parser.add_argument("-sets", nargs="+", default=USUAL_SETS, choices=SETS, help=f"[{' '.join(USUAL_SETS)}]")
    parser.add_argument(
        "-epochs", type=at_least(1), nargs="+", default=[10], metavar="N", help="numbers of epochs [10]"
    )
    parser.add_argument("-seeds", type=at_least(0), nargs="+", default=[0, 1, 2], metavar="N", help="seeds [0 1 2]")
    parser.add_argument("-weights", nargs="+", help=f"files or names of weights [{WEIGHTS} in FOLDER]")
    parser.add_argument("-peers", nargs="+", default=[], choices=("fastai", "timm"), help="run these programs too")
    parser.add_argument("-python", default=sys.executable, metavar="FILE", help="an interpreter that has fastai")
    parser.add_argument("-train_py", type=Path, metavar="FILE", help="timm's train.py")
    return parser.parse_args(argv)


# --- the images ---


def draw(real: Path, output: Path, name: str, seed: int) -> Path:
    """Return the folder of a set. If a set has only some of the training images, the folder has links."""
    row = SETS[name]
    if row.images_per_class is None:
        return real / row.folder
    folder, random = output / "images" / f"{name}-{seed}", np.random.default_rng(seed)
    for train in sorted((real / row.folder / "train").iterdir()):
        files = sorted(train.iterdir())
        chosen = [files[number] for number in random.permutation(len(files))[: row.images_per_class]]
        link_all(chosen, folder / "train" / train.name)
        link_all(sorted((real / row.folder / "val" / train.name).iterdir()), folder / "val" / train.name)
    return folder


def link_all(files: Sequence[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())


# --- our runs ---


def top1_of(arguments: argparse.Namespace, source: str, key: Key) -> Top1:
    """Return the top-1 of a run from these weights, which runs now or has run before."""
    folder = folder_of(arguments, source, key)
    if not list(folder.glob("*/results.json")):
        data = draw(arguments.real, arguments.output, key.set, key.seed)
        words = ["-pretrained", source, "-data_path", data, "-epochs", key.epochs, "-image_size", SIDE]
        words += ["-output", folder, "-resume", "auto", "-opts", f"MODEL.NAME={MODEL}", f"SEED={key.seed}"]
        words += ["TRAIN.MODEL_EMA=false", f"VALIDATE_FREQ={key.epochs}", "REPORT=false"]
        start([sys.executable, ROOT / "main_single_gpu.py", *words])
    (metrics,) = folder.glob("*/metrics.jsonl")
    first, *_, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    top1 = Top1(first["eval_top1"], last["eval_top1"])
    print(f"{source}: {key.set}, {key.epochs} epochs, seed {key.seed}: {top1.last:.1f}%", flush=True)
    return top1


def folder_of(arguments: argparse.Namespace, source: str, key: Key) -> Path:
    return arguments.output / Path(source).stem / str(key)


def differences(arguments: argparse.Namespace, source: str, first: str, keys: Sequence[Key]) -> dict[Key, np.ndarray]:
    """Return for each key and image by how much more often the weights are right than the first ones: -1, 0 or 1."""
    values = {}
    for key in keys:
        data = draw(arguments.real, arguments.output, key.set, key.seed)
        tables = [evaluated(folder_of(arguments, weights, key), data) for weights in (source, first)]
        values[key] = right_in(tables[0]) - right_in(tables[1])
    return values


def evaluated(folder: Path, data: Path) -> Path:
    """Return the table of predictions of the last weights in the folder of a run. `data`: the folder of the images."""
    if not list(folder.glob(f"eval-*/{PREDICTIONS}")):
        (weights,) = [*folder.glob("*/last.pth"), *folder.glob("*/last.pth.tar")]
        words = ["-eval", "-pretrained", weights, "-data_path", data, "-output", folder, "-opts", "REPORT=false"]
        start([sys.executable, ROOT / "main_single_gpu.py", *words])
    return next(folder.glob(f"eval-*/{PREDICTIONS}"))


def right_in(table: Path) -> np.ndarray:
    """Return 1 or 0 for each image, in the order of names: whether its prediction is right."""
    with open(table, encoding="utf-8-sig", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["image"].removeprefix("val/"))
    return np.array([row["label"] == row["prediction"] for row in rows], float)


def start(words: Sequence[object]) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{words[1]}: {done.stderr.strip()[-500:]}")


# --- other programs ---


def run_peers(arguments: argparse.Namespace, weights: str, keys: Sequence[Key]) -> list[dict]:
    """Run the other programs, print their mean differences from our runs, and return the facts of each run."""
    runs = []
    for peer in arguments.peers:
        gains = {}
        for key in keys:
            data = draw(arguments.real, arguments.output, key.set, key.seed)
            right = right_in(run_peer(arguments, peer, weights, key, data))
            gains[key] = right_in(evaluated(folder_of(arguments, weights, key), data)) - right
            runs.append({"peer": peer, **key._asdict(), "top1": round(100 * float(right.mean()), 2)})
        print(f"halfstep against {peer}: {pooled(gains)}")
    return runs


def run_peer(arguments: argparse.Namespace, peer: str, weights: str, key: Key, data: Path) -> Path:
    """Return the table of predictions of another program, which runs now or has run before."""
    folder = arguments.output / peer / str(key)
    if peer == "timm":
        if not list(folder.glob("*/last.pth.tar")):
            start(timm_command(arguments.train_py, data, Path(weights), key, folder.absolute()))
        return evaluated(folder, data)
    table = folder / PREDICTIONS
    if not table.exists():
        folder.mkdir(parents=True, exist_ok=True)
        start([arguments.python, __file__, "fastai", data, weights, table, key.epochs, key.seed])
    return table


def timm_command(train_py: Path, data: Path, weights: Path, key: Key, output: Path) -> list[object]:
    """Return the command of timm's train.py. Its documentation has no flags for fine-tuning; its author uses these."""
    classes = sum(path.is_dir() for path in (data / "train").iterdir())
    flags = f"--model {MODEL} --num-classes {classes} --img-size {SIDE} --epochs {key.epochs} --warmup-epochs 1 -b 32"
    flags += " --opt adamw --lr 1e-3 --weight-decay 0.01 --clip-grad 1 --sched cosine --sched-on-updates"
    flags += f" --head-init-scale 0.001 --seed {key.seed} --workers 2 --device cpu --train-split train --val-split val"
    words = ["--pretrained", "--pretrained-path", weights.absolute(), "--output", output, "--experiment", "timm"]
    return [sys.executable, train_py, data, *flags.split(), *words]


def fine_tune_with_fastai(data: Path, weights: Path, table: Path, epochs: int, seed: int) -> None:
    """Fine-tune with fastai's vision_learner and its defaults, and write the table of predictions."""
    import timm
    from fastai.vision.all import ImageDataLoaders, Resize, accuracy, aug_transforms, set_seed, vision_learner

    create = timm.create_model

    def create_from_file(name: str, pretrained: bool = False, **options):
        overlay = {"file": str(weights)} if pretrained else None  # instead of a download
        return create(name, pretrained=pretrained, pretrained_cfg_overlay=overlay, **options)

    timm.create_model = create_from_file
    set_seed(seed, reproducible=True)
    count = sum(1 for _ in (data / "train").glob("*/*"))
    options = {"item_tfms": Resize(192), "batch_tfms": aug_transforms(size=SIDE), "bs": min(64, count)}
    loaders = ImageDataLoaders.from_folder(data, train="train", valid="val", seed=seed, num_workers=0, **options)
    learner = vision_learner(loaders, MODEL, metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(epochs)
        numbers = learner.get_preds(dl=loaders.valid)[0].argmax(1).tolist()
    names = [Path(path).relative_to(data / "val").as_posix() for path in loaders.valid.items]
    rows = [(name, name.partition("/")[0], loaders.vocab[number]) for name, number in zip(names, numbers, strict=True)]
    with open(table, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "label", "prediction"), *sorted(rows)])


# --- the results ---


def pooled(values: dict[Key, np.ndarray]) -> str:
    """Return the mean difference over the sets with its 95% interval, which has the noise of images and of seeds."""
    sets = sorted({(key.set, key.epochs) for key in values})
    means, variances = [], []
    for name in sets:
        rows = np.stack([row for key, row in values.items() if (key.set, key.epochs) == name])  # [seeds, images]
        of_images = rows.mean(0).var(ddof=1) / rows.shape[1]
        of_seeds = rows.mean(1).var(ddof=1) / len(rows) if len(rows) > 1 else 0.0
        means.append(rows.mean())
        variances.append(of_images + of_seeds)
    half = 1.96 * sum(variances) ** 0.5 / len(sets)
    return f"{100 * np.mean(means):+.1f} +- {100 * half:.1f} points over {len(sets)} sets"


def table_of(scores: dict[str, dict[Key, Top1]], runs: Sequence[dict]) -> str:
    """Return a table with a row for each set and number of epochs: the means of our runs and of the stored ones."""
    first, peers = next(iter(scores.values())), list(dict.fromkeys(run["peer"] for run in runs))
    rows = []
    for name, epochs in dict.fromkeys((key.set, key.epochs) for key in first):
        keys = [key for key in first if (key.set, key.epochs) == (name, epochs)]
        row = [name, str(epochs)]
        for of_weights in scores.values():
            linear, last = (statistics.mean(column) for column in zip(*(of_weights[key] for key in keys), strict=True))
            row += [f"{linear:.1f}", f"{last:.1f}"]
        for peer in peers:
            tops = {Key(run["set"], run["epochs"], run["seed"]): run["top1"] for run in runs if run["peer"] == peer}
            of_set = [top1 for key, top1 in tops.items() if (key.set, key.epochs) == (name, epochs)]
            row += [f"{statistics.mean(of_set):.1f}" if of_set else "-"]
            row += [with_interval([first[key].last - tops[key] for key in keys if key in tops])]
        rows.append(row)
    titles = [title for source in scores for title in ("linear", Path(source).stem)]
    return markdown_table(["set", "epochs", *titles, *(title for peer in peers for title in (peer, "against"))], rows)


def with_interval(values: Sequence[float]) -> str:
    """Return the mean of paired differences, with its 95% interval if there are at least two."""
    if not values:
        return "-"
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:+.1f}"
    half = student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:+.1f} +- {half:.1f}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
