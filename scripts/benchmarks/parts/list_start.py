"""Lists and class folders of any size with hardly a file in them, and what one process pays to read them at its start."""

import json
import re
import subprocess
import sys
from pathlib import Path

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
