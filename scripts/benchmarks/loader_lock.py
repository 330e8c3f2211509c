"""Measures for how much of its time a thread that reads images holds Python's lock; prints a Markdown table.

    python scripts/benchmarks/loader_lock.py -photos photos

Threads that read can only take turns at the lock: with a fraction of 0.2, more than five are no faster. It needs py-spy
(`pip install py-spy`), which must be allowed to look at this process (root, or ptrace_scope 0). The photos are made by
photos.py.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

import torch

from configs.load import load
from datasets import CacheProgress, build_order, cache_image_sets, load_image_sets
from datasets.loading.readers import TrainReader
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError
from utils.program import exit_code

SAMPLES_PER_SECOND = 200
CACHE = ["DATA.CACHE=disk", "DATA.CACHE_SIDE=256"]
CASES = {
    "JPEG": [],
    "JPEG, rand-m9-mstd0.5-inc1": ["TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1"],
    "JPEG, augmix": ["TRAIN.AUTO_AUGMENT=augmix"],
    "JPEG, COLOR_JITTER 0.4": ["TRAIN.COLOR_JITTER=0.4"],
    "JPEG, 3a and COLOR_JITTER 0.3": ["TRAIN.AUTO_AUGMENT=3a", "TRAIN.COLOR_JITTER=0.3"],
    "cache, decoded, short side 256": CACHE,
    "digits at 32, in memory": ["DATA.DATASET=digits", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=1"],
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-photos", type=Path, required=True, help="a folder with train/ and val/, as photos.py makes")
    parser.add_argument("-seconds", type=at_least(1), default=8, help="for each case")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # as in a loader thread
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in CASES.items():
            milliseconds, fraction = measure(arguments, options, Path(scratch))
            rows.append([name, f"{milliseconds:.3f}", f"{fraction:.2f}", f"{milliseconds * fraction:.3f}"])
    columns = ["images", "CPU ms an image", "fraction with the lock", "ms an image with the lock"]
    print(machine() + "\n\n" + Table("", columns, rows).markdown())
    return 0


def measure(arguments, options: list[str], scratch: Path) -> tuple[float, float]:
    """Milliseconds of this thread for an image, and the fraction of the time in which it held the lock."""
    flags = ["-cfg", ROOT / "configs/vit_small_patch16_224.yaml", "-dataset", "imagefolder"]
    flags += ["-data_path", arguments.photos, "-batch_size", "128", "-opts", f"DATA.CACHE_PATH={scratch}", *options]
    config = load([str(each) for each in flags]).config
    image_set, _ = cache_image_sets(config, load_image_sets(config), CacheProgress(print, print))
    reader, order = TrainReader(image_set, config), build_order(config, image_set, 1)
    pieces = [piece for step in range(order.steps_per_epoch) for piece in order.pieces(step, 0)]
    reader[pieces[0]]  # imports what the augmentation needs
    command = ["py-spy", "record", "--gil", "--format", "raw", "--rate", SAMPLES_PER_SECOND]
    command += ["--duration", arguments.seconds, "--output", scratch / "held.txt", "--pid", os.getpid()]
    try:
        sampler = subprocess.Popen([str(each) for each in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise ConfigError("py-spy: not found; pip install py-spy") from error
    start, count = time.thread_time(), 0
    while not count or sampler.poll() is None:
        count += len(reader[pieces[count // 128 % len(pieces)]].images)
    seconds = time.thread_time() - start
    if sampler.returncode:
        raise ConfigError(f"py-spy: {sampler.stderr.read().decode().strip()}")
    held = sum(int(line.rsplit(" ", 1)[1]) for line in (scratch / "held.txt").read_text().splitlines())
    return 1e3 * seconds / count, held / (SAMPLES_PER_SECOND * arguments.seconds)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
