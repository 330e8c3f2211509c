"""Kills runs with kill -9 at random moments, starts them again, and compares what they end with to a run left alone.

    python tests/kill/kill_runs.py -quick

A small ViT on the digits (-amp with bfloat16, drop path, label smoothing, mixup, EMA, accumulation) is trained once
unbroken. Then it is killed at moments drawn evenly from the time that the unbroken run took, start-up and saving
included, and started again with -resume auto until it is done; and so on with new runs until the kills are used up. One
kill in five is aimed: from its moment on it waits for the next save, and hits as soon as the temporary file of last.pth
is there. Of two processes either is killed: half of the kills under main_multi_gpu.py's own launcher, which ends the run,
half under torchrun --max-restarts, which starts it again by itself. Prints a Markdown table. Exit code 1 if a run was
lost, ended with another hash, or left a process behind. Needs Linux.
"""

import argparse
import itertools
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # our folders, wherever this is started from

from scripts.benchmarks.common import Table, machine, spread
from tests.kill.kill_harness import PLACES, SAVE, WAYS, Found, Shot, Tormented, Way, find_processes, kill
from utils.errors import ConfigError
from utils.program import exit_code

SETTINGS = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.7, 1], BATCH_SIZE: 16, NUM_WORKERS: 1}
MODEL: {TYPE: vit, NAME: vit_tortured, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2, DROPPATH: 0.2, DROPOUT: 0.1}
TRAIN:
  {NUM_EPOCHS: EPOCHS, WARMUP_EPOCHS: 1, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0, ACCUM_ITER: 2, SMOOTHING: 0.1,
   MIXUP_ALPHA: 0.8, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
AMP: true
PRECISION: {DTYPE: bfloat16}
DEVICE: cpu
TENSORBOARD: false
SAVE_STEPS: 5
SAVE_FREQ: 1
"""
KILLS, EPOCHS = {1: 100, 2: 50}, 8  # kills by the number of processes
QUICK_KILLS, QUICK_EPOCHS = {1: 3, 2: 2}, 2
AIMED = 5  # one kill in so many is aimed at a save


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    rows, went_wrong = [], False
    all_kills, epochs = (QUICK_KILLS, QUICK_EPOCHS) if arguments.quick else (KILLS, EPOCHS)
    with tempfile.TemporaryDirectory(prefix="torture-") as name, ThreadPoolExecutor() as pool:
        folder, enough = Path(name), threading.Event()
        (folder / "settings.yaml").write_text(SETTINGS.replace("EPOCHS: EPOCHS", f"EPOCHS: {epochs}"))

        def run(number: int) -> list[tuple[Way, str, list[Found]]]:
            return list(torture(number, arguments.kills or all_kills[number], arguments.seed, folder, enough))

        numbers = [arguments.processes] if arguments.processes else list(all_kills)
        try:
            # At the same time where it is to be over soon; else each alone, for the seconds in the table.
            for way, expected, found in itertools.chain.from_iterable(
                (pool.map if arguments.quick else map)(run, numbers)
            ):
                row, is_wrong = judge(way, expected, found)
                rows.append(row)
                went_wrong |= is_wrong
        except BaseException:  # Ctrl-C above all
            enough.set()
            kill(find_processes(folder))
            raise
    title = f"`python tests/kill/kill_runs.py {' '.join(argv)}`. {machine()}."
    text = Table(title, COLUMNS, rows).markdown()
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text)
    return int(went_wrong)


def parse(argv: list[str]) -> argparse.Namespace:
    from scripts.benchmarks.amp import Parser, positive

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-quick",
        "--quick",
        action="store_true",
        help="3 kills on one process and 2 on two, of shorter runs: a minute or two",
    )
    parser.add_argument(
        "-kills", type=positive, metavar="N", help="on each number of processes [100 on one, 50 on two]"
    )
    parser.add_argument("-processes", type=int, choices=(1, 2), help="only so many [both]")
    parser.add_argument("-seed", type=int, default=0, metavar="N", help="of the moments and the processes killed [0]")
    parser.add_argument("-output", type=Path, metavar="FILE.md", help="write the table there too")
    arguments = parser.parse_args(argv)
    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError(f"-output: there is no folder {arguments.output.parent}; make it first")
    return arguments


def torture(
    num_processes: int, kills: int, seed: int, folder: Path, enough: threading.Event
) -> Iterator[tuple[Way, str, list[Found]]]:
    """For each way to start so many processes: the hash of an unbroken run, and what became of those that were killed."""
    ways = [way for way in WAYS if way.num_processes == num_processes]
    expected, whole = run_unbroken(ways[0], folder)
    generator, done = random.Random(seed), 0

    def draw(number: int) -> Shot:
        """The next, after so many of this run."""
        is_aimed = (done + number) % AIMED == 1
        seconds, rank = generator.uniform(0, whole), generator.randrange(num_processes)
        return Shot(seconds, 0 if is_aimed else rank, is_aimed)  # process 0 is the one that saves

    for number, way in enumerate(ways):
        last = done + kills // len(ways) + (number < kills % len(ways))
        found = []
        while done < last and not enough.is_set():
            output = folder / f"{num_processes}-{number}-{len(found)}"
            found.append(Tormented(way, folder / "settings.yaml", output).torment(draw, last - done))
            done += len(found[-1].places)
            if found[-1].lost and not found[-1].places:  # it never ran
                break
            places = ", ".join(found[-1].places) or "no place, as it was over sooner"
            print(f"{way.name}: killed in {places}; {last - done} left", file=sys.stderr, flush=True)
        done = last
        yield way, expected, found


def run_unbroken(way: Way, folder: Path) -> tuple[str, float]:
    """Its hash, and for how many seconds its processes were there."""
    run = Tormented(way, folder / "settings.yaml", folder / f"{way.num_processes}-unbroken")
    found = run.torment(None, 0)
    if found.lost:
        raise ConfigError(f"-processes: a run that nothing stopped does not end here: {found.lost}")
    return hash_of(found), run.seconds


def hash_of(found: Found) -> str:
    from tests.support.run_hash import run_hash

    return run_hash(found.folder)


COLUMNS = ["", "kills", *(f"in {place}" for place in PLACES), "aimed at a save", "of these in a save"]
COLUMNS += ["runs", "lost", "other hash", "processes left", "seconds until it trained again, median (spread)"]


def judge(way: Way, expected: str, found: list[Found]) -> tuple[list[str], bool]:
    """The row of the table, and whether something is wrong."""
    places, aimed = (
        [place for each in found for place in each.places],
        [place for each in found for place in each.aimed],
    )
    lost = [each for each in found if each.lost]
    differ = [each.folder for each in found if not each.lost and hash_of(each) != expected]
    orphans, seconds = sum(each.orphans for each in found), [each for run in found for each in run.seconds]
    for each in lost:
        print(f"{way.name}: LOST: {each.lost}", file=sys.stderr)
    for folder in differ:
        print(f"{way.name}: ANOTHER HASH: {folder}", file=sys.stderr)
    numbers = [len(places), *map(places.count, PLACES), len(aimed), aimed.count(SAVE)]
    numbers += [len(found), len(lost), len(differ), orphans]
    return [way.name, *map(str, numbers), spread(seconds) if seconds else "-"], bool(lost or differ or orphans)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
