"""Measures how fast images are read, and what limits a run; prints Markdown tables: what BENCHMARKS.md holds.

python scripts/benchmarks/loader.py limits -cfg FILE [...]   the loader alone, the step alone, both together, and which limits
python scripts/benchmarks/loader.py timm                     ours against timm's create_loader, from JPEG and the cache, also with RandAugment
python scripts/benchmarks/loader.py pixels                   how far our pixels are from Pillow's
python scripts/benchmarks/loader.py memory                   private memory of readers over epochs of 200,000 listed files
python scripts/benchmarks/loader.py run -timm FOLDER         a whole run against timm's train.py, whose source is in FOLDER

Without -photos a folder of JPEGs is made, of about 500 x 375 pixels and 100 kB (photos.py). What is compared takes turns.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from scripts.benchmarks.parts.common import ROOT, Refused, StepWorker, Table, machine, spread
from scripts.benchmarks.parts.timm_loader import timm_batches
from scripts.benchmarks.parts.turns import Turns, take_turns
from scripts.benchmarks.parts.whole_run import BATCH_SIZE, Setup, add_run_flags, compare_runs
from scripts.benchmarks.photos import make_photos
from scripts.command_line import Parser, at_least
from utils.program import exit_code

WARM_UP = 6  # batches: more than any of the loaders reads ahead with two workers
FEWEST = 2 * BATCH_SIZE  # training images: with less than two batches there is nothing to time
RAND_AUGMENT = "rand-m9-mstd0.5-inc1"
TIMM = "timm create_loader"
CACHED = {
    "JPEG": [],
    "cache, decoded, short side 256": ["DATA.CACHE=disk", "DATA.CACHE_SIDE=256"],
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("limits", add_help=False)  # all other flags are those of main_single_gpu.py: -cfg -dataset ...
    memory = commands.add_parser("memory")
    memory.add_argument("-count", type=at_least(10), default=200_000, help="listed files")
    memory.add_argument("-epochs", type=at_least(1), default=5)
    for name in ("timm", "pixels", "run"):
        command = commands.add_parser(name)
        command.add_argument(
            "-photos", type=photos_in, help="a folder with train/ and val/, as photos.py makes [made anew]"
        )
        command.add_argument("-rounds", type=at_least(1), default=5)
        count = None if name == "run" else 1216
        command.add_argument(
            "-count", type=at_least(FEWEST), default=count, help="training images that are made [38 batches]"
        )
        if name == "run":
            add_run_flags(command)
    arguments, arguments.flags = parser.parse_known_args(argv)
    if arguments.flags and arguments.command != "limits":
        parser.error(f"unrecognized arguments: {' '.join(arguments.flags)}")
    print(machine() + "\n", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        if "photos" in arguments and not arguments.photos:
            arguments.photos = Path(scratch) / "photos"
            count = arguments.count or 38 * Setup.of(arguments).batch_size
            make_photos(arguments.photos, count, count // 4, num_drawn=1220)
        commands = {"limits": tell_limits, "timm": compare_loaders, "pixels": compare_pixels, "memory": watch_memory}
        commands["run"] = compare_runs
        commands[arguments.command](arguments, Path(scratch))
    return 0


def photos_in(text: str) -> Path:
    """The type of -photos: a folder with enough of them."""
    folder = Path(text)
    for part, fewest in (("train", FEWEST), ("val", 1)):
        count = sum(1 for _ in (folder / part).rglob("*.jpg"))
        if count < fewest:
            raise argparse.ArgumentTypeError(f"{folder / part} holds {count} .jpg files, and {fewest} are needed")
    return folder


# --- the loader alone ---


def our_batches(flags: list, options: list[str], scratch: Path) -> Iterator[int]:
    """Endless training batches of a run with these flags, as floats ready for the model; yields how many images."""
    import torch

    from configs.load import load
    from datasets import CacheProgress, Normalize, build_train_data, cache_image_sets, load_image_sets
    from utils.distributed import Process

    # A folder each: of one data set a folder keeps the newest cache alone.
    # It reads ahead, as where a GPU computes.
    options = [*options, f"DATA.CACHE_PATH={scratch / ' '.join(options)}"]
    config = load([*map(str, flags), "-opts", *options]).with_default_batch_size().config
    train_set, _ = cache_image_sets(config, load_image_sets(config), CacheProgress(note, note))
    data = build_train_data(config, train_set, Process(torch.device("cpu")))
    normalize = Normalize(config.DATA)
    for window in data.windows(0, sys.maxsize):
        for batch in window.batches:
            yield len(normalize(batch.images))


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rates(batches: Iterator[int], num_batches: int) -> tuple[float, float]:
    """Images per second, and per second of the processor, once what was read ahead is used up."""
    for _ in itertools.islice(batches, WARM_UP):
        pass
    start, used = time.perf_counter(), cpu_seconds()
    count = sum(itertools.islice(batches, num_batches))
    return count / (time.perf_counter() - start), count / (cpu_seconds() - used)


def cpu_seconds() -> float:
    """Of this process and its workers, which other programs on the machine slow down less than the clock."""
    stats = (Path(f"/proc/{each.pid}/stat").read_text() for each in multiprocessing.active_children())
    ticks = sum(int(number) for stat in stats for number in stat.rsplit(")", 1)[1].split()[11:13])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def compare_loaders(arguments: argparse.Namespace, scratch: Path) -> None:
    """For one worker and two, without a policy and with RandAugment on both sides."""
    rows = []
    for num_workers, policy in itertools.product((1, 2), (None, RAND_AUGMENT)):
        flags = ["-cfg", ROOT / "configs/vit_tiny_patch16_224.yaml", "-dataset", "imagefolder"]
        flags += ["-data_path", arguments.photos, "-batch_size", BATCH_SIZE, "-num_workers", num_workers]
        flags += ["-opts", f"TRAIN.AUTO_AUGMENT={policy}"] if policy else []
        sides: dict[str, Callable[[], Iterator[int]]] = {
            TIMM: functools.partial(timm_batches, arguments.photos, BATCH_SIZE, num_workers, policy)
        }
        for name, options in CACHED.items():
            sides[f"halfstep, {name}"] = functools.partial(our_batches, flags, options, scratch)
        found = rates_in_turn(sides, arguments.rounds, arguments.count // BATCH_SIZE)
        for name, ours in found.items():
            row = [name, policy or "", str(num_workers)]
            for mine, timms in zip(zip(*ours, strict=True), zip(*found[TIMM], strict=True), strict=True):
                ratios = [one / other for one, other in zip(mine, timms, strict=True)]
                row += [spread(mine, 0), "1" if name == TIMM else spread(ratios, 2)]
            rows.append(row)
    columns = ["loader", "policy", "workers", "images/s", "against timm", "images per CPU second", "against timm"]
    print(Table("", columns, rows).markdown())


def rates_in_turn(
    sides: dict[str, Callable[[], Iterator[int]]], rounds: int, num_batches: int
) -> dict[str, list[tuple[float, float]]]:
    """The rates of each side in each round. A loader is open in its turn only: none reads ahead."""
    found = {name: [] for name in sides}
    for _, (name, make) in itertools.product(range(rounds), sides.items()):
        batches = make()
        found[name].append(rates(batches, num_batches))
        batches.close()
    return found


def compare_pixels(arguments: argparse.Namespace, scratch: Path) -> None:
    """Of random crops of all photos against Pillow's decoding, cropping and resizing of the same."""
    import random

    import numpy as np
    import torch
    from PIL import Image

    from configs.schema import Data
    from datasets.transforms.crop import TrainTransform, crop_box
    from datasets.transforms.decode import PixelRules, decode

    transform = TrainTransform(data := Data(HFLIP=0.0))
    out = torch.empty(224, 224, 3, dtype=torch.uint8).permute(2, 0, 1)
    means, biases = [], []
    for seed, path in enumerate(sorted(arguments.photos.rglob("*.jpg"))):
        transform(decode(path.read_bytes(), PixelRules(3)), random.Random(seed), out)
        with Image.open(path) as image:
            left, top, width, height = crop_box(*image.size, data.CROP_SCALE, data.CROP_RATIO, random.Random(seed))
            crop = image.convert("RGB").crop((left, top, left + width, top + height))
        wanted = np.array(crop.resize((224, 224), Image.Resampling.BICUBIC)).astype(np.float32)
        difference = out.permute(1, 2, 0).numpy() - wanted
        means.append(float(np.abs(difference).mean()))
        biases.append(float(difference.mean()))
    print(
        f"{len(means)} images: mean absolute difference {statistics.mean(means):.4f} of 255 (worst image {max(means):.4f}),"
    )
    print(f"bias {statistics.mean(biases):+.4f} (worst image {max(biases, key=abs):+.4f})")


def watch_memory(arguments: argparse.Namespace, scratch: Path) -> None:
    """After each epoch: of the loader's processes, or of the one whose threads read."""
    import numpy as np
    from PIL import Image

    names = [f"a folder with a long name/image number {number:06d}.jpg" for number in range(arguments.count)]
    (scratch / "a folder with a long name").mkdir()
    for number, name in enumerate(names):  # a file may have some 65,000 names
        if number % 10_000 == 0:
            Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(scratch / name)
        else:
            (scratch / name).hardlink_to(scratch / names[number // 10_000 * 10_000])
    for part in ("train", "val"):
        listed = names if part == "train" else names[:10]
        (scratch / f"{part}_list.txt").write_text("".join(f"{name} {n % 10}\n" for n, name in enumerate(listed)))
    for kind in ("threads", "processes"):
        command = [sys.executable, "-c", MEMORY, ROOT, scratch, kind, arguments.epochs]
        lines = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout.split()
        growth = 100 * (float(lines[-1]) / float(lines[0]) - 1)
        print(f"{kind}: private MB after each epoch {' '.join(lines)}: {growth:+.1f}% from the first to the last")


MEMORY = """
import multiprocessing, os, re, sys
from pathlib import Path
root, folder, kind, epochs = sys.argv[1:]
sys.path.insert(0, root)
import torch
from configs.load import load
from datasets import build_train_data, load_image_sets
from utils.distributed import Process
config = load(["-cfg", f"{root}/configs/vit_tiny_patch16_224.yaml", "-dataset", "imagenet2012", "-data_path", folder, "-batch_size", "250", "-num_workers", "2",
               "-image_size", "16", "-opts", f"DATA.WORKERS={kind}"]).config
data = build_train_data(config, load_image_sets(config)[0], Process(torch.device("cpu")))
for step, window in enumerate(data.windows(0, int(epochs) * data.steps_per_epoch), 1):
    for batch in window.batches:
        pass
    if step % data.steps_per_epoch == 0:
        readers = [child.pid for child in multiprocessing.active_children()] or [os.getpid()]
        texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in readers]
        print(round(sum(int(kb) for text in texts for kb in re.findall("Private_.*?: *([0-9]+) kB", text)) / 1024, 1))
"""


# --- the loader and the model ---


def tell_limits(arguments: argparse.Namespace, scratch: Path) -> None:
    """The loader alone, the step alone and both together, in turn, each on this run's device and with its settings."""
    from configs.load import load

    flags = arguments.flags
    where = flags.index("-opts") if "-opts" in flags else len(flags)
    # A cache of its own: of one data set a folder keeps the newest alone.
    flags, options = flags[:where], [*flags[where + 1 :], f"DATA.CACHE_PATH={scratch / 'cache'}", "DATA.DROP_LAST=true"]
    config = load([*flags, "-opts", *options]).with_default_batch_size().config
    classes, size = config.MODEL.NUM_CLASSES or 1000, 20 * config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER
    synthetic = [*options, f"MODEL.NUM_CLASSES={classes}", f"DATA.SYNTHETIC_SIZE={size}"]
    sides = {
        "loader alone": StepWorker([*flags, "-opts", *options], role="loader"),
        "step alone, synthetic data": StepWorker([*flags, "-dataset", "synthetic", "-opts", *synthetic]),
        "both": StepWorker([*flags, "-opts", *options]),
    }
    with contextlib.suppress(Refused):  # it will be told below
        next(iter(sides.values())).hello()  # a cache is built once, and not by two at a time
    turns = Turns(rounds=3, steps=3, min_seconds=3.0)
    measured, reasons = take_turns(sides, turns)
    if reasons:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in reasons.items()))
    rows = [[name, spread(each.images_per_second)] for name, each in measured.items()]
    print(Table(f"batch {config.DATA.BATCH_SIZE}, {turns}", ["", "images/s, median (spread)"], rows).markdown())
    print(name_limit(*(statistics.median(each.images_per_second) for each in measured.values())))


def name_limit(loader: float, step: float, both: float) -> str:
    """What to change first, from images/s of the loader alone, of the step alone and of both together."""
    if both < 0.9 * min(loader, step):
        return (
            f"each slows the other: together they reach {both / min(loader, step):.2f} of the slower one. They share the "
            "processor's cores; a cache (DATA.CACHE) leaves more of them to the step"
        )
    if loader < 1.1 * step:
        return f"the loader limits: alone it gives {loader / step:.2f} of what the step takes; more -num_workers, or DATA.CACHE"
    return f"the step limits: the loader gives {loader / step:.1f} times what it takes"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
