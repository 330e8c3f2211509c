"""Kill runs with kill -9 at random moments, start them again, and compare their results with an uninterrupted run.

    python tests/kill/kill_runs.py -quick

A small ViT on the digits (-amp with bfloat16, drop path, label smoothing, mixup, EMA, accumulation) is trained once
without interruption. Then it is killed at moments drawn uniformly from the duration of that run, start-up and saving
included, and started again with -resume auto until it finishes; then the next run, until all kills are used up. One kill
in five waits, from its random moment on, until the temporary file of last.pth exists. With two processes the killed one
is drawn at random; half of the kills happen under main_multi_gpu.py's own launcher, which ends the run, and half under
torchrun --max-restarts, which restarts it. Prints a Markdown table. The exit code is 1 if a run was lost, ended with
another hash, or left a process behind. Needs Linux.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # our packages, wherever this is started from

from scripts.benchmarks.parts.common import Table, machine, spread
from scripts.command_line import Parser, at_least
from tests.kill.kill_harness import (
    PHASES,
    SAVE,
    START_METHODS,
    KilledRun,
    Outcome,
    PlannedKill,
    StartMethod,
    find_processes,
    kill,
)
from utils.errors import ConfigError
from utils.program import exit_code

SETTINGS = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.7, 1], BATCH_SIZE: 16, NUM_WORKERS: 1}
MODEL: {TYPE: vit, NAME: vit_kill_runs, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2, DROPPATH: 0.2, DROPOUT: 0.1}
TRAIN:
  {NUM_EPOCHS: EPOCHS, WARMUP_EPOCHS: 1, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0, ACCUM_ITER: 2, SMOOTHING: 0.1,
   MIXUP_ALPHA: 0.8, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
AMP: true
PRECISION: {DTYPE: bfloat16}
DEVICE: cpu
TENSORBOARD: false
REPORT: false
SAVE_STEPS: 5
SAVE_FREQ: 1
"""
KILLS, EPOCHS = {1: 100, 2: 50}, 8  # kills, by number of processes
QUICK_KILLS, QUICK_EPOCHS = {1: 3, 2: 2}, 2
SAVE_KILL_INTERVAL = 5  # one kill in this many waits for a save


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    rows, failed = [], False
    all_kills, epochs = (QUICK_KILLS, QUICK_EPOCHS) if arguments.quick else (KILLS, EPOCHS)
    with tempfile.TemporaryDirectory(prefix="kill-runs-") as name, ThreadPoolExecutor() as pool:
        folder, cancelled = Path(name), threading.Event()
        (folder / "settings.yaml").write_text(SETTINGS.replace("EPOCHS: EPOCHS", f"EPOCHS: {epochs}"))

        def run(number: int) -> list[tuple[StartMethod, str, list[Outcome]]]:
            return list(kill_runs(number, arguments.kills or all_kills[number], arguments.seed, folder, cancelled))

        numbers = [arguments.processes] if arguments.processes else list(all_kills)
        try:
            # -quick runs both at once; otherwise one after the other, so that the seconds in the table are true.
            for method, expected, outcomes in itertools.chain.from_iterable(
                (pool.map if arguments.quick else map)(run, numbers)
            ):
                row, is_wrong = judge(method, expected, outcomes)
                rows.append(row)
                failed |= is_wrong
        except BaseException:  # Ctrl-C above all
            cancelled.set()
            kill(find_processes(folder))
            raise
    title = f"`python tests/kill/kill_runs.py {' '.join(argv)}`. {machine()}."
    text = Table(title, COLUMNS, rows).markdown()
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text)
    return int(failed)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "-quick",
        "--quick",
        action="store_true",
        help="3 kills with one process and 2 with two, in shorter runs: a minute or two",
    )
    parser.add_argument(
        "-kills", type=at_least(1), metavar="N", help="kills for each number of processes [100 with one, 50 with two]"
    )
    parser.add_argument("-processes", type=int, choices=(1, 2), help="only this number of processes [both]")
    parser.add_argument(
        "-seed", type=int, default=0, metavar="N", help="seed of the moments and the processes killed [0]"
    )
    parser.add_argument("-output", type=Path, metavar="FILE.md", help="also write the table to this file")
    arguments = parser.parse_args(argv)
    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError(f"-output: there is no folder {arguments.output.parent}; make it first")
    return arguments


def kill_runs(
    num_processes: int, kills: int, seed: int, folder: Path, cancelled: threading.Event
) -> Iterator[tuple[StartMethod, str, list[Outcome]]]:
    """For each start method with this many processes: the hash of an uninterrupted run, and the outcome of each killed run."""
    methods = [method for method in START_METHODS if method.num_processes == num_processes]
    expected, duration = run_uninterrupted(methods[0], folder)
    generator, done = random.Random(seed), 0

    def draw(number: int) -> PlannedKill:
        """The next kill, after `number` kills of this run."""
        waits_for_save = (done + number) % SAVE_KILL_INTERVAL == 1
        seconds, rank = generator.uniform(0, duration), generator.randrange(num_processes)
        return PlannedKill(seconds, 0 if waits_for_save else rank, waits_for_save)  # process 0 is the one that saves

    for number, method in enumerate(methods):
        last = done + kills // len(methods) + (number < kills % len(methods))
        outcomes = []
        while done < last and not cancelled.is_set():
            output = folder / f"{num_processes}-{number}-{len(outcomes)}"
            outcomes.append(KilledRun(method, folder / "settings.yaml", output).kill_and_resume(draw, last - done))
            done += len(outcomes[-1].phases)
            if outcomes[-1].lost and not outcomes[-1].phases:  # it never ran
                break
            phases = ", ".join(outcomes[-1].phases) or "no phase: it finished first"
            print(f"{method.name}: killed in {phases}; {last - done} left", file=sys.stderr, flush=True)
        done = last
        yield method, expected, outcomes


def run_uninterrupted(method: StartMethod, folder: Path) -> tuple[str, float]:
    """The hash of the run, and the seconds from the start of its processes to their end."""
    run = KilledRun(method, folder / "settings.yaml", folder / f"{method.num_processes}-uninterrupted")
    outcome = run.kill_and_resume(None, 0)
    if outcome.lost:
        raise ConfigError(f"-processes: even an uninterrupted run does not finish here: {outcome.lost}")
    return hash_of(outcome), run.seconds


def hash_of(outcome: Outcome) -> str:
    from tests.support.run_hash import run_hash

    return run_hash(outcome.folder)


COLUMNS = ["", "kills", *(f"in {phase}" for phase in PHASES), "aimed at a save", "of these in a save"]
COLUMNS += ["runs", "lost", "other hash", "processes left", "seconds until it trained again, median (spread)"]


def judge(method: StartMethod, expected: str, outcomes: list[Outcome]) -> tuple[list[str], bool]:
    """The row of the table, and whether something is wrong."""
    phases = [phase for each in outcomes for phase in each.phases]
    aimed = [phase for each in outcomes for phase in each.aimed]
    lost = [each for each in outcomes if each.lost]
    differ = [each.folder for each in outcomes if not each.lost and hash_of(each) != expected]
    orphans, seconds = sum(each.orphans for each in outcomes), [each for run in outcomes for each in run.seconds]
    for each in lost:
        print(f"{method.name}: LOST: {each.lost}", file=sys.stderr)
    for folder in differ:
        print(f"{method.name}: ANOTHER HASH: {folder}", file=sys.stderr)
    numbers = [len(phases), *map(phases.count, PHASES), len(aimed), aimed.count(SAVE)]
    numbers += [len(outcomes), len(lost), len(differ), orphans]
    return [method.name, *map(str, numbers), spread(seconds) if seconds else "-"], bool(lost or differ or orphans)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
