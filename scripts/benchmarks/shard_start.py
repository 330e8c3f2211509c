"""Measures what a large set of shards costs: time to the first update, private memory, and waits for the order of an epoch.

    python scripts/benchmarks/shard_start.py -output /fast/shard-start -tars 1400 -samples 10000 -processes 8

The set is made in the folder, of hard links to one tar of tiny images, and stays there. Each run trains a tiny model on
the CPU until its first update, on the large set and on one of two tars, in turn.
"""

import contextlib
import gc
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

import numpy as np
from PIL import Image

from configs.load import load
from datasets import build_order, load_image_sets
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

SETTINGS = """
DATA: {IMAGE_SIZE: 16, BATCH_SIZE: 16, NUM_WORKERS: 1, HFLIP: 0}
MODEL: {TYPE: vit, NAME: vit_scale, PATCH_SIZE: 8, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05}
DEVICE: cpu
TENSORBOARD: false
REPORT_FREQ: 1
"""
SECONDS_BETWEEN_LOOKS = 0.2  # at the memory of the processes
MB = 1e6


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "where the shards are made")
    parser.add_argument("-tars", type=at_least(2), default=1400, help="training tars [1400]")
    parser.add_argument("-samples", type=at_least(100), default=10_000, help="samples of each [10000]")
    parser.add_argument("-processes", type=at_least(1), default=8, help="training processes [8]")
    parser.add_argument("-rounds", type=at_least(1), default=3, help="runs of each kind with the index of the set [3]")
    arguments = parser.parse_args(argv)
    large, small = arguments.output / "large", arguments.output / "small"
    make_shards(large, arguments.tars, arguments.samples)
    make_shards(small, 2, 1000)
    print(machine() + "\n\n" + measure_starts(arguments, large, small).markdown())
    print(measure_order(large).markdown())
    return 0


def make_shards(folder: Path, num_tars: int, num_samples: int) -> None:
    """Training tars, all of them links to one, and a validation tar."""
    if (folder / f"train-{num_tars - 1:06d}.tar").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_tar(folder / "train-000000.tar", num_samples)
    write_tar(folder / "val-000000.tar", 100)
    for number in range(1, num_tars):
        os.link(folder / "train-000000.tar", folder / f"train-{number:06d}.tar")


def write_tar(path: Path, num_samples: int) -> None:
    rng, images = np.random.default_rng(0), []
    for _ in range(64):
        file = io.BytesIO()
        Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(file, "JPEG")
        images.append(file.getvalue())
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(num_samples):
            sample = {"jpg": images[number % len(images)], "cls": str(number % 1000).encode()}
            for ending, content in sample.items():
                member = tarfile.TarInfo(f"{number:08d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def measure_starts(arguments, large: Path, small: Path) -> Table:
    """Runs until their first update, in turn with a small set: without an index, with one of each tar, with that of the set."""
    cases = {"no index": ("*.idx.npz", "*.index"), "an index of each tar": ("*.index",), "the index of the set": ()}
    rows, num_images = [], arguments.tars * arguments.samples
    for name, removed in cases.items():
        found = []
        for _ in range(arguments.rounds if not removed else 1):
            for folder in (small, large):
                for file in (file for pattern in removed for file in folder.glob(pattern)):
                    file.unlink()
                found.append(start(arguments, folder))
        for title, runs in (("2,000", found[::2]), (f"{num_images:,}", found[1::2])):
            rows.append([name, title, *(f"{statistics.median(each):.1f}" for each in zip(*runs, strict=True))])
    columns = ["at the start there is", "samples", "s to the first update", "CPU s of all processes"]
    return Table("", [*columns, "private MB of the largest process, at its peak"], rows)


def start(arguments, folder: Path) -> tuple[float, float, float]:
    """Seconds to the first update of a run, CPU seconds of its processes, and the most private MB of any of them."""
    settings = arguments.output / "settings.yaml"
    settings.write_text(SETTINGS)
    command = [sys.executable, ROOT / "main_multi_gpu.py", "-cfg", settings, "-dataset", "shards", "-data_path", folder]
    command += ["-ngpus", str(arguments.processes), "-output", arguments.output / "runs"]
    began, peak = time.perf_counter(), 0.0
    run = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    os.set_blocking(run.stdout.fileno(), False)
    said = b""
    try:
        while b"Step[0000" not in said:
            if run.poll() is not None:
                raise SystemExit(f"the run has ended: {said.decode()}")
            peak = max(peak, *map(private_mb, processes_of(run.pid)), 0.0)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            said += run.stdout.read() or b""
        seconds, processes = time.perf_counter() - began, processes_of(run.pid)
        return seconds, sum(map(cpu_seconds, processes)), max(peak, *map(private_mb, processes))
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()


def processes_of(launcher: int) -> list[int]:
    """The training processes, which the launcher starts, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = children.get(launcher, [])
    for process in found:
        found += children.get(process, [])
    return found


def private_mb(pid: int) -> float:
    """The memory of a process that it shares with no other."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(kb) for kb in re.findall("Private_(?:Clean|Dirty): *([0-9]+) kB", text)) * 1024 / MB
    return 0.0


def cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def measure_order(folder: Path) -> Table:
    """The longest wait for the images of an update of 1,024, every 5 ms, past the ends of blocks and of an epoch."""
    rows = []
    gc.disable()  # a collection takes longer than what is measured
    for buffer in (8192, 2**31):
        flags = ["-dataset", "shards", "-data_path", str(folder), "-opts", f"DATA.SHUFFLE_BUFFER={buffer}"]
        config = load([*flags, "DATA.BATCH_SIZE=1024"], needs_file=False).config
        order = build_order(config, load_image_sets(config)[0], world_size=1)
        times, end = [], order.steps_per_epoch
        for step in (*range(2000), *range(end - 1000, end + 1000)):
            began = time.perf_counter(), time.thread_time()
            order.window(step)
            times.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
            time.sleep(0.005)
        started, others = [times[0], times[2000]], times[1:2000] + times[2001:]
        rows.append(
            [f"{buffer:,}", *(f"{1e3 * max(each)[0]:.0f} ({1e3 * max(each)[1]:.0f})" for each in (started, others))]
        )
    return Table(
        "", ["DATA.SHUFFLE_BUFFER", "ms (CPU ms) for the first update of a run", "at most for any other"], rows
    )


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
