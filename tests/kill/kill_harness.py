"""Kill a run with kill -9, start it again, and record what it was doing at each kill (Linux)."""

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

from scripts.benchmarks.parts.common import ROOT

START_UP, EPOCH, EVALUATION, SAVE, EXIT = PHASES = ("start-up", "mid-epoch", "evaluation", "a save", "exit")
TIMEOUT = 300.0  # seconds after which a run counts as hung
ORPHAN_TIMEOUT = 30.0  # seconds that the processes of a run may outlive the one that started them
TEMPORARY = ".last.pth.tmp"  # the name of a checkpoint while it is written

TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1000 --monitor-interval 0.1".split()


@dataclass(frozen=True)
class StartMethod:
    """A way to start a run."""

    name: str
    command: tuple[str, ...]
    num_processes: int
    restarts: bool = False  # the launcher restarts the processes when one dies


START_METHODS = (
    StartMethod("one process", ("main_single_gpu.py",), 1),
    StartMethod("two, own launcher", ("main_multi_gpu.py", "-ngpus", "2"), 2),
    StartMethod("two, torchrun --max-restarts", (*TORCHRUN, "main_multi_gpu.py"), 2, restarts=True),
)


@dataclass(frozen=True)
class PlannedKill:
    """A kill that has not happened yet."""

    seconds: float  # after a start
    rank: int
    waits_for_save: bool = False  # after these seconds, wait for the next save to begin


@dataclass
class Outcome:
    """The result of one run."""

    phases: list[str] = field(default_factory=list)  # of the run at each kill
    aimed: list[str] = field(default_factory=list)  # the phases at those kills that waited for a save
    seconds: list[float] = field(default_factory=list)  # from each kill until it trained again
    orphans: int = 0
    lost: str = ""  # the reason, if the run was lost
    folder: Path | None = None  # of the finished run


class RunLost(Exception):
    """A run did not finish, or lost what it had saved."""


MARK = "HALFSTEP_KILL_RUNS"  # environment variable of all processes of a run: its output folder


def find_processes(output: Path) -> dict[int, list[str]]:
    """{pid: its environment} of the live processes of the runs that write to this folder or below it."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: variables for pid in numbers if (variables := variables_of(pid, output))}


def variables_of(pid: int, output: Path) -> list[str]:
    """The environment of a live process of such a run; an empty list for any other process."""
    with contextlib.suppress(OSError):  # another user's, or it ended just now
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if any(f"{text}/".startswith(f"{MARK}={output}/") for text in variables):
            return variables
    return []


class KilledRun:
    """One run with its own output folder, from its first start to its end."""

    def __init__(self, method: StartMethod, settings: Path, output: Path):
        output.mkdir()
        flags = [*method.command, "-cfg", str(settings), "-output", str(output), "-resume", "auto"]
        self._method, self._output, self._command = method, output, [sys.executable, *flags]
        self._process: subprocess.Popen | None = None
        self._ranks: dict[int, int] = {}  # {rank: pid} since the last start
        self._before: tuple[set, dict] = (set(), {})
        self._step = 0  # of the last save before the last kill
        self._killed_at: float | None = None  # None: it has trained again since
        self._started_at = 0.0  # when all processes of the last start existed
        self.seconds = 0.0  # from there to the end of the last start
        self.outcome = Outcome()

    def kill_and_resume(self, draw: Callable[[int], PlannedKill], max_kills: int) -> Outcome:
        """Kill it up to `max_kills` times, then let it end. `draw` returns the next kill, given the number so far."""
        try:
            while not self._run(draw(len(self.outcome.phases)) if len(self.outcome.phases) < max_kills else None):
                pass
            folders = [path.parent for path in self._output.glob("train-*/last.pth")]
            if len(folders) != 1:
                raise RunLost(f"it started over: {len(folders)} folders with checkpoints")
            (self.outcome.folder,) = folders
        except RunLost as lost:
            lines = self._output_file.read_text().splitlines()[-20:]
            self.outcome.lost = "\n".join([str(lost), *lines])
        finally:  # Ctrl-C included
            kill(find_processes(self._output))
        return self.outcome

    def _run(self, planned: PlannedKill | None) -> bool:
        """Start the run unless it is running, and kill one process as planned. Returns whether it finished instead."""
        if self._process is None:
            self._before = self._snapshot()  # before it can write anything
            self._start()
            self._wait_for_ranks()
        else:
            self._wait_for_ranks()
            self._before = self._snapshot()
        if not self._watch(planned.seconds if planned else TIMEOUT) or (
            planned and planned.waits_for_save and not self._wait_for_save()
        ):
            return self._has_ended(by_kill=False)
        if planned is None:
            raise RunLost(f"it did not end within {TIMEOUT:g} s")
        pid = self._ranks[planned.rank]
        if not variables_of(pid, self._output):  # it has just ended
            return False
        self._kill(pid, planned)
        return False if self._method.restarts else self._has_ended(by_kill=True)

    def _wait_for_save(self) -> bool:
        """Wait until the next save begins. Returns whether the run is still alive."""
        while not any(path.name == TEMPORARY for path, *_ in self._temporaries() - self._before[0]):
            if not self._watch(0.0005):
                return False
        return True

    def _start(self) -> None:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | {MARK: str(self._output)}
        with open(self._output_file, "a") as file:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def _output_file(self) -> Path:
        return self._output / "printed.txt"

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks exist, none of them from before the last kill, or until the run has ended."""
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
        """Watch the run for this long. Returns whether it is still alive."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            status = self._status()
            if self._killed_at is not None and has_begun(status, self._ranks.values()):
                self.outcome.seconds.append(time.monotonic() - self._killed_at)
                self._killed_at = None
                if status.get("step", self._step) < self._step:
                    raise RunLost(f"it resumed from step {status['step']}, but step {self._step} was saved")
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.02))
        return False

    def _kill(self, pid: int, planned: PlannedKill) -> None:
        kill([pid])
        self._killed_at = time.monotonic()
        while variables_of(pid, self._output):  # it is still running
            time.sleep(0.001)
        phase = self._phase()
        self.outcome.phases.append(phase)
        if planned.waits_for_save:
            self.outcome.aimed.append(phase)
        self._step = max(self._step, self._status().get("step", 0))

    def _has_ended(self, by_kill: bool) -> bool:
        """Wait for the end of the processes. Returns whether the run finished, rather than died by the kill."""
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

    def _snapshot(self) -> tuple[set, dict]:
        """The temporary files and the sizes of the logs."""
        return self._temporaries(), {path: path.stat().st_size for path in self._output.glob("*/log.txt")}

    def _status(self) -> dict:
        """status.json of the newest run folder; empty if there is none."""
        path = max(self._output.glob("train-*/status.json"), default=None)
        return json.loads(path.read_text()) if path else {}

    def _temporaries(self) -> set[tuple]:
        """Temporary files: being written now, or left behind by an earlier kill."""
        found = set()
        for path in self._output.glob("train-*/.*.tmp"):
            with contextlib.suppress(OSError):
                found.add((path, path.stat().st_ino, path.stat().st_mtime_ns))
        return found

    def _phase(self) -> str:
        temporaries, sizes = self._before
        log = max(self._output.glob("train-*/log.txt"), default=None)
        new_lines = log.read_bytes()[sizes.get(log, 0) :].decode() if log else ""
        return classify_phase(self._status(), self._ranks.values(), bool(self._temporaries() - temporaries), new_lines)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def has_begun(status: dict, pids: Collection[int]) -> bool:
    """Whether one of these processes has begun to train."""
    return status.get("pid") in pids and status["state"] != "starting"


def classify_phase(status: dict, pids: Collection[int], is_writing: bool, log: str) -> str:
    """Tell from its files what a run was doing. `log`: its log lines since the last start."""
    if not has_begun(status, pids):
        return START_UP
    if status["state"] == "done":
        return EXIT
    if is_writing:
        return SAVE
    lines = re.findall(r"^[-\d]{10} [:\d]{8} (?:-----|Epoch\[\d+/\d+\], Step\[(\d+)/(\d+)\])", log, re.MULTILINE)
    index, total = lines[-1] if lines else ("", "")
    return EVALUATION if index and int(index) + 1 == int(total) else EPOCH
