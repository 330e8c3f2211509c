"""Fine-tunes on real photos from real weights, and compares the accuracy with that of other programs on the same files.

    python tests/support/real_sets.py -output real
    python scripts/benchmarks/real.py real -output real-runs
    python scripts/benchmarks/real.py real -output real-runs -sets stamps emoji20 -epochs 3 10 -seeds 0 1 2

A set is stamps, emoji or solar, or one of these with a number: emoji20 has 20 training images of each class, drawn for each
seed. All programs start from tf_efficientnet_lite0 and train at 128 pixels. A cell is the top-1 after the last epoch, as
the mean over the seeds. The figures of the other programs are stored in real_peers.json, with their versions and settings;
`against` is the mean difference over the seeds that both have, with its 95% interval. Runs that exist are not repeated.
"""

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
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.text import markdown_table

PEERS = Path(__file__).with_name("real_peers.json")
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
    arguments = parser.parse_args(argv)
    keys = [(name, epochs, seed) for seed in arguments.seeds for name in arguments.sets for epochs in arguments.epochs]
    ours = {}
    for key in keys:
        ours[key] = top1_of(arguments.real, arguments.output, key)
        print(f"{key[0]}, {key[1]} epochs, seed {key[2]}: {ours[key][-1]:.1f}%", flush=True)
    stored = json.loads(PEERS.read_text())
    print("\n" + table(ours, stored["runs"]) + "\n\n" + "\n".join(stored["about"]))
    return 0


def top1_of(real: Path, output: Path, key: Key) -> tuple[float, float]:
    """Return the top-1 of a linear classifier before training, and that after the last epoch of a run."""
    name, epochs, seed = key
    folder = output / f"{name}-{epochs}-{seed}"
    if not list(folder.glob("*/results.json")):
        data = few(real, output, name, seed)
        words = ["-pretrained", real / WEIGHTS, "-data_path", data, "-epochs", epochs]
        words += ["-output", folder, "-resume", "auto"]
        opts = ["-opts", *MODEL, f"SEED={seed}", f"VALIDATE_FREQ={epochs}", "REPORT=false"]
        command = [sys.executable, ROOT / "main_single_gpu.py", *words, *opts]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"{name}, seed {seed}: {done.stderr.strip()[-500:]}")
    (metrics,) = folder.glob("*/metrics.jsonl")
    first, *_, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    return first["eval_top1"], last["eval_top1"]


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
