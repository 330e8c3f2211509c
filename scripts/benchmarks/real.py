"""Fine-tunes on real photos from real weights, and compares the accuracy with that of other programs on the same files.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/real.py real -output real-runs
    python scripts/benchmarks/real.py real -output real-runs -sets stamps emoji20 -epochs 3 10 -seeds 0 1 2
    python scripts/benchmarks/real.py real -output real-runs -peers fastai timm -python PYTHON -train_py train.py

A set is stamps, emoji or solar, or one of these with a number: emoji20 has 20 training images of each class, drawn for each
seed. All programs start from tf_efficientnet_lite0 and train at 128 pixels. A cell is the top-1 after the last epoch, as
the mean over the seeds. Our runs keep no moving average, because -eval would choose the better of it and the weights by the
validation images. The figures of the other programs are stored in real_peers.json, with their versions and settings; `against`
is the mean difference over the seeds that both have, with its 95% interval. -peers runs them (peers.py): fastai with the
interpreter of -python, timm with its train.py. It also writes peers.json, which replaces real_peers.json, and prints the mean
difference over all sets, paired by images. Runs that exist are not repeated.
"""

import csv
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np

from scripts.benchmarks.common import ROOT
from scripts.benchmarks.peers import timm_command
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.text import markdown_table

PEERS, PEER = (Path(__file__).with_name(name) for name in ("real_peers.json", "peers.py"))
PREDICTIONS = "predictions.csv"
WEIGHTS = "lite0.safetensors"
SETS = ("stamps", "stamps20", "stamps5", "emoji20", "emoji5")
MODEL = ("MODEL.NAME=tf_efficientnet_lite0", "DATA.IMAGE_SIZE=128")
# Student's t for 95%, by the number of differences less one.
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
Key = tuple[str, int, int]  # set, epochs, seed


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("real", type=Path, metavar="FOLDER", help="the folder of real_sets.py")
    parser.add_output("FOLDER", "folder for the runs")
    parser.add_argument("-sets", nargs="+", default=SETS, help=f"image sets [{' '.join(SETS)}]")
    parser.add_argument(
        "-epochs", type=at_least(1), nargs="+", default=[10], metavar="N", help="numbers of epochs [10]"
    )
    parser.add_argument("-seeds", type=at_least(0), nargs="+", default=[0, 1, 2], metavar="N", help="seeds [0 1 2]")
    parser.add_argument("-peers", nargs="+", default=[], choices=("fastai", "timm"), help="run these programs too")
    parser.add_argument("-python", default=sys.executable, metavar="FILE", help="an interpreter that has fastai")
    parser.add_argument("-train_py", type=Path, metavar="FILE", help="timm's train.py")
    arguments = parser.parse_args(argv)
    keys = [(name, epochs, seed) for seed in arguments.seeds for name in arguments.sets for epochs in arguments.epochs]
    ours = {}
    for key in keys:
        ours[key] = top1_of(arguments.real, arguments.output, key)
        print(f"{key[0]}, {key[1]} epochs, seed {key[2]}: {ours[key][-1]:.1f}%", flush=True)
    stored = json.loads(PEERS.read_text())
    if arguments.peers:
        theirs = {(peer, *key): peer_run(arguments, peer, key) for key in keys for peer in arguments.peers}
        real, output = arguments.real, arguments.output
        data = {key: ["-data_path", few(real, output, key[0], key[2])] for key in keys}
        own = {key: right_in(evaluated(ours_in(output, key), data[key])) for key in keys}
        stored["runs"] = [
            {"peer": peer, "set": key[0], "epochs": key[1], "seed": key[2], "top1": round(100 * right.mean(), 2)}
            for (peer, *key), right in theirs.items()
        ]
        (arguments.output / "peers.json").write_text(json.dumps(stored, indent=1) + "\n")
        for peer in arguments.peers:
            print(f"halfstep against {peer}: {pooled({key: own[key] - theirs[peer, *key] for key in keys})}")
    print("\n" + table(ours, stored["runs"]) + "\n\n" + "\n".join(stored["about"]))
    return 0


def top1_of(real: Path, output: Path, key: Key) -> tuple[float, float]:
    """Return the top-1 of a linear classifier before training, and that of a run after its last epoch."""
    name, epochs, seed = key
    folder = ours_in(output, key)
    if not list(folder.glob("*/results.json")):
        data = few(real, output, name, seed)
        words = ["-pretrained", real / WEIGHTS, "-data_path", data, "-epochs", epochs]
        words += ["-output", folder, "-resume", "auto"]
        opts = ["-opts", *MODEL, "TRAIN.MODEL_EMA=false", f"SEED={seed}", f"VALIDATE_FREQ={epochs}", "REPORT=false"]
        start([sys.executable, ROOT / "main_single_gpu.py", *words, *opts])
    (metrics,) = folder.glob("*/metrics.jsonl")
    first, *_, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    return first["eval_top1"], last["eval_top1"]


def ours_in(output: Path, key: Key) -> Path:
    return output / "-".join(map(str, key))


def peer_run(given, peer: str, key: Key) -> np.ndarray:
    """Return whether another program is right about each validation image, after a run now or before."""
    name, epochs, seed = key
    folder, data = given.output / f"{peer}-{name}-{epochs}-{seed}", few(given.real, given.output, name, seed)
    if peer == "timm":
        if not list(folder.glob("*/last.pth.tar")):
            weights = given.real.absolute() / WEIGHTS
            start(timm_command(given.train_py, data, weights, epochs, seed, folder.absolute()))
        return right_in(evaluated(folder, ["-data_path", data]))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / PREDICTIONS).exists():
        start([given.python, PEER, data, given.real / WEIGHTS, folder / PREDICTIONS, epochs, seed])
    return right_in(folder / PREDICTIONS)


def evaluated(folder: Path, data: Sequence[object]) -> Path:
    """Return the table of predictions of the last weights in the folder of a run. `data`: the flags of the images."""
    if not list(folder.glob(f"eval-*/{PREDICTIONS}")):
        (weights,) = [*folder.glob("*/last.pth"), *folder.glob("*/last.pth.tar")]
        words = ["-eval", "-pretrained", weights, *data, "-output", folder, "-opts", "REPORT=false"]
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


def pooled(differences: dict[Key, np.ndarray]) -> str:
    """Return the mean difference over the sets with its 95% interval, which has the noise of images and of seeds."""
    sets, parts, errors = {key[:2] for key in differences}, [], []
    for name in sorted(sets):
        each = np.stack([values for key, values in differences.items() if key[:2] == name])  # [seeds, images]
        parts.append(each.mean())
        of_seeds = each.mean(1).var(ddof=1) / len(each) if len(each) > 1 else 0.0
        errors.append(each.mean(0).var(ddof=1) / each.shape[1] + of_seeds)
    half = 1.96 * sum(errors) ** 0.5 / len(sets)
    return f"{100 * np.mean(parts):+.1f} +- {100 * half:.1f} points over {len(sets)} sets"


def few(real: Path, output: Path, name: str, seed: int) -> Path:
    """Return the folder of a set. A number in its name limits the training images of each class; the folder then has links."""
    base, count = re.fullmatch(r"([a-z]+)(\d*)", name).groups()
    if not count:
        return real / base
    folder, draw = output / "images" / f"{name}-{seed}", np.random.default_rng(seed)
    for train in sorted((real / base / "train").iterdir()):
        files = sorted(train.iterdir())
        chosen = [files[number] for number in draw.permutation(len(files))[: int(count)]]
        for part, members in (("train", chosen), ("val", sorted((real / base / "val" / train.name).iterdir()))):
            (folder / part / train.name).mkdir(parents=True, exist_ok=True)
            for file in members:
                link = folder / part / train.name / file.name
                if not link.exists():
                    link.symlink_to(file.resolve())
    return folder


def table(ours: dict[Key, tuple[float, float]], peers: list[dict]) -> str:
    """Return a table with a row for each set and number of epochs: the means of our runs and of each peer's."""
    names = list(dict.fromkeys(run["peer"] for run in peers))
    rows = []
    for name, epochs in dict.fromkeys(key[:2] for key in ours):
        mine = {key[2]: each for key, each in ours.items() if key[:2] == (name, epochs)}
        means = (statistics.mean(column) for column in zip(*mine.values(), strict=True))
        row = [name, str(epochs), *(f"{mean:.1f}" for mean in means)]
        for peer in names:
            runs = [run for run in peers if (run["peer"], run["set"], run["epochs"]) == (peer, name, epochs)]
            theirs = {run["seed"]: run["top1"] for run in runs}
            both = [mine[seed][1] - theirs[seed] for seed in mine.keys() & theirs.keys()]
            row += [f"{statistics.mean(theirs.values()):.1f}" if theirs else "-", with_interval(both)]
        rows.append(row)
    columns = ["set", "epochs", "linear", "halfstep", *(title for peer in names for title in (peer, "against"))]
    return markdown_table(columns, rows)


def with_interval(differences: Sequence[float]) -> str:
    """Return the mean of paired differences with its 95% interval, if there are at least two."""
    if not differences:
        return "-"
    mean = statistics.mean(differences)
    if len(differences) - 1 not in T:
        return f"{mean:+.1f}"
    half = T[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.1f} +- {half:.1f}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
