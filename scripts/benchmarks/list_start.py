"""Measures what lists, CSV files and class folders of any size cost one process at its start; prints a Markdown table.

    python scripts/benchmarks/list_start.py -output /fast/lists -images 14000000 -kinds list csv

The sets are made in the folder and stay there. Lists need only the few files that are looked for at the start, folders an
empty file for each image. `-against FOLDER` measures another checkout too, in turn.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

CLASSES, WIDTH = 21_841, 8  # ImageNet-21k's; digits of a file's number
CHUNK = 1 << 17
KINDS = ("list", "csv", "folder")

# Run in a process of its own, with the code of any checkout: says the seconds, and the private memory beyond that after
# the imports, at its peak (looked at every 20 ms) and at the end.
PROGRAM = """
import json, re, sys, threading, time
sys.path.insert(0, sys.argv[1])
from configs.load import load
from datasets import load_image_sets

def private():
    text = open("/proc/self/smaps_rollup").read()
    return sum(int(kb) for kb in re.findall("Private_Dirty: *([0-9]+) kB", text)) * 1024 / 1e6

config = load(sys.argv[2:], needs_file=False).config
before, peak, done = private(), 0.0, threading.Event()

def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, private())

watcher = threading.Thread(target=watch)
watcher.start()
began = time.perf_counter(), time.thread_time()
sets = load_image_sets(config)
seconds, cpu = time.perf_counter() - began[0], time.thread_time() - began[1]
done.set(); watcher.join()
held = private()
sizes = [len(each) for each in sets]
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": max(peak, held) - before, "held": held - before, "images": sizes}))
"""


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "where the sets are made")
    parser.add_argument("-images", type=at_least(100), default=1_280_000, help="training images [1280000]")
    parser.add_argument("-kinds", nargs="+", choices=KINDS, default=KINDS, help="what to measure [all]")
    parser.add_argument("-against", type=Path, help="another checkout of halfstep, to compare")
    parser.add_argument("-rounds", type=at_least(1), default=3, help="runs of each [3]")
    arguments = parser.parse_args(argv)
    rows = []
    for kind in arguments.kinds:
        folder = arguments.output / f"{kind}-{arguments.images}"
        make(kind, folder, arguments.images)
        found: dict[str, list[dict]] = {}
        for _ in range(arguments.rounds):
            if arguments.against:
                found.setdefault("the other checkout", []).append(measure(arguments.against, kind, folder))
            remove_indexes(folder)
            for case in ("without an index", "with its index"):
                found.setdefault(case, []).append(measure(ROOT, kind, folder))
        size = sum(path.stat().st_size for path in folder.glob("*.index"))
        for case, runs in found.items():
            cpu, peak, held = (statistics.median(run[each] for run in runs) for each in ("cpu", "peak", "held"))
            cells = [f"{cpu:.2f}", f"{peak:.0f}", f"{held:.0f}", f"{size / sum(runs[0]['images']):.0f}"]
            rows.append([f"{kind}, {case}", *cells])
    columns = [
        f"{arguments.images:,} images",
        "CPU s",
        "MB private at the peak",
        "MB private then",
        "bytes of index an image",
    ]
    print(machine() + "\n\n" + Table("", columns, rows).markdown())
    return 0


def make(kind: str, folder: Path, num_images: int) -> None:
    """A training set of so many images, sorted by class as most are; files only where they are looked for."""
    if (folder / "made").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    num_classes = min(CLASSES, max(2, num_images // 1000))
    if kind == "folder":
        for number in range(num_images):
            path = folder / _path(number, num_images, num_classes)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    else:
        names = {"list": {"train_list.txt": num_images, "val_list.txt": 50_000}, "csv": {"train.csv": num_images}}[kind]
        for part, (name, count) in enumerate(names.items()):
            _write_list(folder / name, count, num_classes, f"p{part}", "," if kind == "csv" else " ")
    for path in [*folder.glob("*.txt"), *folder.glob("*.csv"), *folder.glob("n*")]:
        os.utime(path, (0, 0))  # as if nothing had been changed just now
    (folder / "made").touch()


def _path(number: int, num_images: int, num_classes: int) -> str:
    label = number * num_classes // num_images
    return f"n{label:0{WIDTH}d}/n{label:0{WIDTH}d}_{number}.JPEG"


def _write_list(file: Path, count: int, num_classes: int, prefix: str, separator: str) -> None:
    with open(file, "w") as out:
        out.write("image_path,target\n" if separator == "," else "")
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            out.writelines(
                f"{prefix}/{_path(n, count, num_classes)}{separator}{n * num_classes // count}\n" for n in numbers
            )
    for number in range(10):
        path = file.parent / prefix / _path(number, count, num_classes)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def measure(code: Path, kind: str, folder: Path, *options: str) -> dict:
    """What `load_image_sets` of this checkout costs one process."""
    dataset = {"list": "imagenet2012", "csv": "csv", "folder": "imagefolder"}[kind]
    flags = ["-dataset", dataset, "-data_path", folder, *(["-opts", *options] if options else [])]
    command = [sys.executable, "-c", PROGRAM, code, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=code)
    if done.returncode:
        raise SystemExit(re.sub(r"(?s).*\n(?=\S*Error)", "", done.stderr))
    return json.loads(done.stdout)


def remove_indexes(folder: Path) -> None:
    for path in folder.glob("*.index"):
        path.unlink()


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
