"""A run that is killed with kill -9 and started again, and what it was doing when it was hit (Linux)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benchmarks.common import ROOT

START_UP, EPOCH, EVALUATION, SAVE, EXIT = PLACES = ("start-up", "mid-epoch", "evaluation", "a save", "exit")
PATIENCE = 300.0  # seconds without an end, after which a run hangs
GRACE = 5.0  # seconds that the processes of a run may outlive the one that started them
SAVED = ".last.pth.tmp"  # what a checkpoint is called while it is being written

TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1000 --monitor-interval 0.1".split()


@dataclass(frozen=True)
class Way:
    """How a run is started."""

    name: str
    command: tuple[str, ...]
    num_processes: int
    starts_again: bool = False  # by itself, when a process dies


WAYS = (
    Way("one process", ("main_single_gpu.py",), 1),
    Way("two, own launcher", ("main_multi_gpu.py", "-ngpus", "2"), 2),
    Way("two, torchrun --max-restarts", (*TORCHRUN, "main_multi_gpu.py"), 2, starts_again=True),
)


@dataclass(frozen=True)
class Shot:
    """A kill that is to be."""

    seconds: float  # after a start
    rank: int
    is_aimed: bool = False  # from then on it waits for the next save


@dataclass
class Found:
    """What became of a run."""

    places: list[str] = field(default_factory=list)  # where each kill hit it
    aimed: list[str] = field(default_factory=list)  # of those, the places of the ones that were aimed at saves
    seconds: list[float] = field(default_factory=list)  # from a kill until it trained again
    orphans: int = 0
    lost: str = ""  # why, if it was
    folder: Path | None = None  # with what it ended with, if it was not


class Lost(Exception):
    """A run did not come to its end, or lost what it had saved."""


MARK = "HALFSTEP_TORTURE"  # in the environment of all processes of a run, whoever their parent is: where it writes


def find_processes(output: Path) -> dict[int, list[str]]:
    """{pid: its environment} of all that live and belong to the run that writes there, or to runs below."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: variables for pid in numbers if (variables := variables_of(pid, output))}


def variables_of(pid: int, output: Path) -> list[str]:
    """The environment of a process that lives and belongs to such a run; nothing of any other."""
    with contextlib.suppress(OSError):  # another user's, or it ended just now
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if any(f"{text}/".startswith(f"{MARK}={output}/") for text in variables):
            return variables
    return []


class Tormented:
    """One run in an `output` of its own, from its first start to its end."""

    def __init__(self, way: Way, settings: Path, output: Path):
        output.mkdir()
        flags = [*way.command, "-cfg", str(settings), "-output", str(output), "-resume", "auto"]
        self._way, self._output, self._command = way, output, [sys.executable, *flags]
        self._process: subprocess.Popen | None = None
        self._ranks: dict[int, int] = {}  # {rank: pid} of those that train, of this start
        self._before: tuple[set, dict] = (set(), {})
        self._step = 0  # saved when it was killed last
        self._killed: float | None = None  # when, if it has not trained again since
        self._began = 0.0  # when the processes of this start were there
        self.seconds = 0.0  # until the last start had come to its end
        self.found = Found()

    def torment(self, draw: Callable[[int], Shot], most: int) -> Found:
        """Kill it up to `most` times and let it end. `draw` gives the next kill, after so many."""
        try:
            while not self._run(draw(len(self.found.places)) if len(self.found.places) < most else None):
                pass
            folders = [path.parent for path in self._output.glob("train-*/last.pth")]
            if len(folders) != 1:
                raise Lost(f"it began anew: {len(folders)} folders with checkpoints")
            (self.found.folder,) = folders
        except Lost as lost:
            said = self._said.read_text().splitlines()[-20:]
            self.found.lost = "\n".join([str(lost), *said])
        finally:  # also where a person has had enough
            kill(find_processes(self._output))
        return self.found

    def _run(self, shot: Shot | None) -> bool:
        """Start it where nothing runs, and kill a process of it if one is to be. Whether it came to its end instead."""
        if self._process is None:
            self._start()
        self._wait_for_ranks()
        if not self._watch(shot.seconds if shot else PATIENCE) or (shot and shot.is_aimed and not self._aim()):
            return self._has_ended(by_kill=False)
        if shot is None:
            raise Lost(f"it did not end within {PATIENCE:g} s")
        pid = self._ranks[shot.rank]
        if not variables_of(pid, self._output):  # it has just ended
            return False
        self._kill(pid, shot)
        return False if self._way.starts_again else self._has_ended(by_kill=True)

    def _aim(self) -> bool:
        """Wait until the next save has begun. Whether it still runs."""
        while not any(path.name == SAVED for path, *_ in self._temporaries() - self._before[0]):
            if not self._watch(0.0005):
                return False
        return True

    def _start(self) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | {MARK: str(self._output)}
        with open(self._said, "a") as said:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=variables, stdout=said, stderr=said, start_new_session=True
            )

    @property
    def _said(self) -> Path:
        return self._output / "said.txt"

    def _wait_for_ranks(self) -> None:
        """Until all processes that train are there, none of them from before the last kill; or until it has ended."""
        deadline, former = time.monotonic() + PATIENCE, set(self._ranks.values())
        while self._process.poll() is None:
            ranks = self._find_ranks()
            if len(ranks) == self._way.num_processes and not former & set(ranks.values()):
                self._ranks = ranks
                break
            if time.monotonic() > deadline:
                raise Lost(f"its processes did not start within {PATIENCE:g} s")
            time.sleep(0.02)
        self._began = time.monotonic()
        self._before = self._temporaries(), {path: path.stat().st_size for path in self._output.glob("*/log.txt")}

    def _find_ranks(self) -> dict[int, int]:
        if self._way.num_processes == 1:
            return {0: self._process.pid} if self._process.poll() is None else {}
        found = {}
        for pid, variables in find_processes(self._output).items():
            found |= {int(text[5:]): pid for text in variables if text.startswith("RANK=")}
        return found

    def _watch(self, seconds: float) -> bool:
        """Look at it for so long. Whether it still runs."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            status = self._status()
            if self._killed is not None and status.get("pid") in self._ranks.values():
                self.found.seconds.append(time.monotonic() - self._killed)
                self._killed = None
                if status.get("step", self._step) < self._step:
                    raise Lost(f"it went on from step {status['step']}, but step {self._step} was saved")
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.02))
        return False

    def _kill(self, pid: int, shot: Shot) -> None:
        kill([pid])
        self._killed = time.monotonic()
        while variables_of(pid, self._output):  # until then it goes on
            time.sleep(0.001)
        place = self._place()
        self.found.places.append(place)
        if shot.is_aimed:
            self.found.aimed.append(place)
        self._step = max(self._step, self._status().get("step", 0))

    def _has_ended(self, by_kill: bool) -> bool:
        """Whether it came to its end, and not to that of a kill."""
        self.seconds = time.monotonic() - self._began
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Lost(f"it did not end within {PATIENCE:g} s") from None
        self._process = None
        if code and not by_kill:
            raise Lost(f"it ended with exit code {code}, and not by a kill")
        deadline = time.monotonic() + GRACE
        while (left := find_processes(self._output)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.found.orphans += len(left)
        kill(left)
        return code == 0

    def _status(self) -> dict:
        """What status.json of its newest folder says; nothing where it never began."""
        path = max(self._output.glob("train-*/status.json"), default=None)
        return json.loads(path.read_text()) if path else {}

    def _temporaries(self) -> set[tuple]:
        """Files that are being written, or were when a start before this one was killed."""
        found = set()
        for path in self._output.glob("train-*/.*.tmp"):
            with contextlib.suppress(OSError):
                found.add((path, path.stat().st_ino, path.stat().st_mtime_ns))
        return found

    def _place(self) -> str:
        temporaries, sizes = self._before
        log = max(self._output.glob("train-*/log.txt"), default=None)
        said = log.read_bytes()[sizes.get(log, 0) :].decode() if log else ""
        return tell_place(self._status(), self._ranks.values(), bool(self._temporaries() - temporaries), said)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tell_place(status: dict, pids: Collection[int], is_writing: bool, said: str) -> str:
    """What a start was doing when its files looked so. `said`: its lines of the log."""
    if status.get("pid") not in pids:
        return START_UP
    if status["state"] == "done":
        return EXIT
    if is_writing:
        return SAVE
    lines = re.findall(r"^(?:-----|Epoch\[\d+/\d+\], Step\[(\d+)/(\d+)\])", said, re.MULTILINE)
    index, total = lines[-1] if lines else ("", "")
    return EVALUATION if index and int(index) + 1 == int(total) else EPOCH
