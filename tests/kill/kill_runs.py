"""Kill runs with kill -9 at random moments, start them again, and compare their results with an uninterrupted run.

    python tests/kill/kill_runs.py -quick

A small ViT (-amp with bfloat16, drop path, mixup, EMA, accumulation) is trained once without interruption. Then runs
are killed at moments drawn uniformly from the duration of that run, including start-up and saves, and restarted with
-resume auto until they finish, until all kills are used. (tests/faults/test_killed.py kills at every moment of a save.)
KINDS lists the kinds of runs; -quick kills only the first. With two processes, the killed process is drawn at random.
Half of these kills happen under main_multi_gpu.py's own launcher, which ends the run, and half under torchrun
--max-restarts, which restarts it. Prints a Markdown table. The exit code is 1 if a run was lost, ended with another
hash, or left a process behind. Needs Linux. With `-program halfstep`, the installed program starts the runs (`halfstep
train ...`), not the files of this tree.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # the project's packages, from any folder

from tests.support import native_images
from tests.support.forks import MARK, ROOT, find_processes, kill, variables_of
from tests.support.number_rows import write_digits

SETTINGS = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.7, 1], BATCH_SIZE: 16,
       NUM_WORKERS: 1}
MODEL: {TYPE: vit, NAME: vit_kill_runs, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2, DROPPATH: 0.2,
       DROPOUT: 0.1}
TRAIN:
  {WARMUP_EPOCHS: 1, BASE_LR: 1e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0, ACCUM_ITER: 2, SMOOTHING: 0.1,
   MIXUP_ALPHA: 0.8, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
AMP: true
PRECISION: {DTYPE: bfloat16}
DEVICE: cpu
TRACK: []
REPORT: false
SAVE_STEPS: 5
SAVE_FREQ: 1
"""
NUMBERS = (
    "DATA.DATASET=csv DATA.COLUMNS=[path,digit,ink] DATA.VAL_FRACTION=0.25 TRAIN.OBJECTIVE=numbers TRAIN.SMOOTHING=0 "
    "DATA.DATA_PATH={folder}/numbers/digits.csv"
)
NATIVE = (
    "DATA.DATASET=imagefolder DATA.PIXELS=native DATA.IMAGE_CHANNELS=5 DATA.IMAGE_SIZE=16 DATA.CACHE=disk "
    "DATA.DATA_PATH={folder}/native"
)
OF_PRETRAINING = "DATA.DATASET=synthetic DATA.SYNTHETIC_SIZE=64 MODEL.NUM_CLASSES=3"
# {kind of run: its settings beside SETTINGS}
KINDS = {
    "digits": "",
    "numbers, some of them missing": NUMBERS,
    "native pixels, 5 channels": NATIVE,
    "numbers by folds": f"{NUMBERS} DATA.FOLDS=3",
    "new classifier": "MODEL.PRETRAINED={folder}/pretrained.pth MODEL.NEW_CLASSIFIER=zeros",
}
KILLS, EPOCHS = {1: 25, 2: 13}, 8  # {number of processes: kills of each kind}
QUICK_KILLS, QUICK_EPOCHS = {1: 3, 2: 2}, 2
NUM_DIGITS, NUM_NATIVE = (
    600,
    (512, 64),
)  # images of the runs with numbers, and with native pixels (training, validation)
TIMEOUT = 300.0  # seconds after which a run counts as hung
ORPHAN_TIMEOUT = 30.0  # seconds that the processes of a run may outlive their launcher
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1000 --monitor-interval 0.1".split()


@dataclass(frozen=True)
class StartMethod:
    """A way to start a run."""

    name: str
    command: tuple[str, ...]
    num_processes: int
    restarts: bool = False  # the launcher restarts the processes when one dies


def start_methods(program: str | None) -> list[StartMethod]:
    """Return the ways to start a run: with an installed program, or with the files of this tree."""
    single, multi, launched = (
        [sys.executable, "main_single_gpu.py"],
        [sys.executable, "main_multi_gpu.py"],
        ["main_multi_gpu.py"],
    )
    if program:
        single, multi, launched = [program, "train"], [program, "train"], ["--no-python", program, "train"]
    return [
        StartMethod("one process", (*single,), 1),
        StartMethod("two, own launcher", (*multi, "-ngpus", "2"), 2),
        StartMethod("two, torchrun --max-restarts", (sys.executable, *TORCHRUN, *launched), 2, restarts=True),
    ]


@dataclass
class Outcome:
    """The result of one run."""

    kills: int = 0
    orphans: int = 0
    lost: str = ""  # the reason, if the run was lost
    folder: Path | None = None  # the folder of the finished run


class RunLost(Exception):
    """An error for a run that did not finish, or lost saved progress."""


class KilledRun:
    """One run with its own output folder, from its first start to its end."""

    def __init__(self, method: StartMethod, flags: list[str], output: Path):
        output.mkdir()
        self._method, self._output, self._process = method, output, None
        self._command = [*method.command, "-output", str(output), "-resume", "auto", *flags]
        self._printed = output / "printed.txt"
        self._ranks: dict[int, int] = {}  # {rank: pid} since the last start
        self._saved_step = 0  # the saved step before the last kill
        self._started_at = 0.0  # time at which all processes of the last start existed
        self.seconds = 0.0  # from then to the end of the last start
        self.outcome = Outcome()

    def kill_and_resume(self, draw: Callable[[], tuple[float, int]] | None, max_kills: int) -> Outcome:
        """Kill the run up to `max_kills` times, then let it end. `draw` returns seconds after a start, and a rank."""
        try:
            while not self._run(*(draw() if self.outcome.kills < max_kills else (TIMEOUT, None))):
                pass
            folders = [path.parent for path in self._output.glob("train-*/last.pth")]
            if len(folders) != 1:
                raise RunLost(f"it started over: {len(folders)} folders with checkpoints")
            (self.outcome.folder,) = folders
        except RunLost as lost:
            self.outcome.lost = "\n".join([str(lost), *self._printed.read_text().splitlines()[-20:]])
        finally:  # also after Ctrl-C
            kill(find_processes(self._output))
        return self.outcome

    def _run(self, seconds: float, rank: int | None) -> bool:
        """Start the run unless it is running, then kill a process, if one is given. Return whether the run finished."""
        if self._process is None:
            variables = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(self._output)}
            with open(self._printed, "a") as file:
                self._process = subprocess.Popen(
                    self._command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
                )
        self._wait_for_ranks()
        if not self._watch(seconds):
            return self._has_ended(by_kill=False)
        if rank is None:
            raise RunLost(f"it did not end within {TIMEOUT:g} s")
        pid = self._ranks[rank]
        if not variables_of(pid, self._output):  # it has just ended
            return False
        kill([pid])
        while variables_of(pid, self._output):  # it is still running
            time.sleep(0.001)
        self.outcome.kills += 1
        self._saved_step = max(self._saved_step, self._status().get("step", 0))
        return False if self._method.restarts else self._has_ended(by_kill=True)

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have started after the last kill, or until the run has ended."""
        deadline, previous = time.monotonic() + TIMEOUT, set(self._ranks.values())
        while self._process.poll() is None:
            ranks = self._find_ranks()
            if len(ranks) == self._method.num_processes and not previous & set(ranks.values()):
                self._ranks = ranks
                break
            if time.monotonic() > deadline:
                raise RunLost(f"its processes did not start within {TIMEOUT:g} s")
            time.sleep(0.02)
        self._started_at = time.monotonic()

    def _find_ranks(self) -> dict[int, int]:
        if self._method.num_processes == 1:
            return {0: self._process.pid} if self._process.poll() is None else {}
        found = {}
        for pid, variables in find_processes(self._output).items():
            found |= {int(text[5:]): pid for text in variables if text.startswith("RANK=")}
        return found

    def _watch(self, seconds: float) -> bool:
        """Watch the run for this long. Return whether it is still alive."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            status = self._status()
            trains = status.get("pid") in self._ranks.values() and status["state"] != "starting"
            if trains and status.get("step", self._saved_step) < self._saved_step:
                raise RunLost(f"it resumed from step {status['step']}, but step {self._saved_step} was saved")
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.02))
        return False

    def _has_ended(self, by_kill: bool) -> bool:
        """Wait for the end of the processes. Return whether the run finished rather than died from the kill."""
        self.seconds = time.monotonic() - self._started_at
        try:
            code = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RunLost(f"it did not end within {TIMEOUT:g} s") from None
        self._process = None
        if code and not by_kill:
            raise RunLost(f"it ended with exit code {code}, and not by a kill")
        deadline = time.monotonic() + ORPHAN_TIMEOUT
        while (left := find_processes(self._output)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.outcome.orphans += len(left)
        kill(left)
        return code == 0

    def _status(self) -> dict:
        """Return status.json of the newest run folder, or {} if there is none."""
        path = max(self._output.glob("train-*/status.json"), default=None)
        return json.loads(path.read_text()) if path else {}


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    all_kills, epochs = (QUICK_KILLS, QUICK_EPOCHS) if arguments.quick else (KILLS, EPOCHS)
    numbers = [arguments.processes] if arguments.processes else list(all_kills)
    kinds = list(KINDS)[:1] if arguments.quick else list(KINDS)
    methods, rows, failed = start_methods(arguments.program), [], False
    with tempfile.TemporaryDirectory(prefix="kill-runs-") as name:
        folder = Path(name)
        write_data(folder, kinds, methods[0])
        try:
            for kind in kinds:
                flags = [*flags_of(kind, folder), f"TRAIN.NUM_EPOCHS={epochs}"]
                output = folder / f"kind-{kinds.index(kind)}"
                output.mkdir()
                for number in numbers:
                    kills = arguments.kills or all_kills[number]
                    of_number = [method for method in methods if method.num_processes == number]
                    for method, expected, outcomes in kill_runs(of_number, kills, arguments.seed, flags, output):
                        row, is_wrong = judge(method, expected, outcomes)
                        rows.append([kind, *row])
                        failed |= is_wrong
        except BaseException:  # mainly Ctrl-C
            kill(find_processes(folder))
            raise
    print(f"`python tests/kill/kill_runs.py {' '.join(argv)}`")
    for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
        print(f"| {' | '.join(row)} |")
    return int(failed)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quick = "3 kills with one process and 2 with two, in shorter runs of the first kind: a minute or two"
    parser.add_argument("-quick", "--quick", action="store_true", help=quick)
    parser.add_argument(
        "-kills", type=int, help="kills of each kind and number of processes [25 with one, 13 with two]"
    )
    parser.add_argument("-processes", type=int, choices=(1, 2), help="only this number of processes [both]")
    parser.add_argument(
        "-program", metavar="HALFSTEP", help="an installed halfstep to start instead of this tree's files"
    )
    parser.add_argument("-seed", type=int, default=0, help="seed for the moments and the killed processes [0]")
    return parser.parse_args(argv)


def write_data(folder: Path, kinds: list[str], method: StartMethod) -> None:
    """Write the settings file, and the images and the pretrained weights of these kinds of runs."""
    (folder / "settings.yaml").write_text(SETTINGS)
    if "numbers" in " ".join(kinds):
        (folder / "numbers").mkdir()
        write_digits(folder / "numbers", NUM_DIGITS, missing=range(0, NUM_DIGITS, 5))
    if "native" in " ".join(kinds):
        native_images.draw(folder / "native", *NUM_NATIVE, size=(16, 16))
    if "new classifier" in kinds:
        flags = [*flags_of("digits", folder), *OF_PRETRAINING.split(), "TRAIN.NUM_EPOCHS=2"]
        outcome = KilledRun(method, flags, folder / "pretraining").kill_and_resume(None, 0)
        if outcome.lost:
            raise RunLost(outcome.lost)
        shutil.copy(outcome.folder / "best.pth", folder / "pretrained.pth")


def flags_of(kind: str, folder: Path) -> list[str]:
    return ["-cfg", str(folder / "settings.yaml"), "-opts", *KINDS[kind].format(folder=folder).split()]


def kill_runs(
    methods: list[StartMethod], kills: int, seed: int, flags: list[str], folder: Path
) -> list[tuple[StartMethod, str, list[Outcome]]]:
    """Return [(method, hash of an uninterrupted run, outcomes)] for methods that all have equally many processes."""
    num_processes = methods[0].num_processes
    whole = KilledRun(methods[0], flags, folder / f"{num_processes}-uninterrupted")
    expected = hash_of(whole.kill_and_resume(None, 0))
    generator, done, found = random.Random(seed), 0, []

    def draw() -> tuple[float, int]:
        return generator.uniform(0, whole.seconds), generator.randrange(num_processes)

    for number, method in enumerate(methods):
        last = done + kills // len(methods) + (number < kills % len(methods))
        outcomes = []
        while done < last:
            output = folder / f"{num_processes}-{number}-{len(outcomes)}"
            outcomes.append(KilledRun(method, flags, output).kill_and_resume(draw, last - done))
            done += outcomes[-1].kills
            if outcomes[-1].lost and not outcomes[-1].kills:  # it never ran
                break
            print(f"{method.name}: {last - done} kills left", file=sys.stderr, flush=True)
        done = last
        found.append((method, expected, outcomes))
    return found


def hash_of(outcome: Outcome) -> str:
    from tests.support.run_hash import run_hash

    return f"lost: {outcome.lost}" if outcome.lost else run_hash(outcome.folder)


COLUMNS = ["run", "processes", "kills", "runs", "lost", "other hash", "processes left"]


def judge(method: StartMethod, expected: str, outcomes: list[Outcome]) -> tuple[list[str], bool]:
    """Return the row of the table, and whether something is wrong."""
    lost = [each for each in outcomes if each.lost]
    differ = [each.folder for each in outcomes if not each.lost and hash_of(each) != expected]
    orphans = sum(each.orphans for each in outcomes)
    for each in lost:
        print(f"{method.name}: LOST: {each.lost}", file=sys.stderr)
    for folder in differ:
        print(f"{method.name}: ANOTHER HASH: {folder}", file=sys.stderr)
    numbers = [sum(each.kills for each in outcomes), len(outcomes), len(lost), len(differ), orphans]
    return [method.name, *map(str, numbers)], bool(lost or differ or orphans)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
