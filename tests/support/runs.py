"""Runs the real programs as a user types them, in one or several processes, and returns their output and files."""

import contextlib
import csv
import gc
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.support.forks import DEADLINE, ROOT, start_fork
from tests.support.in_process import ONLY_IN_FORKS, like_a_process, main_of
from tests.support.ranks import RANKS
from tests.support.refusals import assert_names
from utils.program import exit_code


@dataclass
class Ended:
    """The result of a run that has ended."""

    codes: list[int]  # exit codes of its processes
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        return self.codes[0]

    @property
    def printed(self) -> str:
        return self.stdout + self.stderr

    def done(self) -> "Ended":
        """Assert that the run succeeded."""
        assert set(self.codes) == {0}, self.printed
        return self

    def refused(self, *names: str | int) -> "Ended":
        """Assert that the run was refused with an error that has these names."""
        assert self.returncode == 2 and "Traceback" not in self.printed, self.printed
        assert_names(self.stderr, *names)
        return self


class Run:
    """A started program: one process or several ranks, each a fork."""

    def __init__(self, script: str, *arguments: str, processes: int = 1, environment: dict | None = None, **options):
        """`script`: a file, or a module by its dotted name. For the options see start_fork."""
        self._stdout, self._stderr = (tempfile.NamedTemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        program = str(ROOT / script) if script.endswith(".py") else script
        outputs = [self._stdout.name, self._stderr.name]
        self.processes = [
            start_fork(program, arguments, outputs, (environment or {}) | rank, **options)
            for rank in as_ranks(processes)
        ]

    def printed(self) -> str:
        """Return the output so far and the exit codes of the processes."""
        texts = [Path(each.name).read_text() for each in (self._stdout, self._stderr)]
        return "\n".join([*texts, f"exit codes: {[process.exitcode for process in self.processes]}"])

    def wait(self) -> Ended:
        for process in self.processes:
            process.join(DEADLINE)
        codes = [process.exitcode for process in self.processes]
        with self._stdout as stdout, self._stderr as stderr:
            ended = Ended(codes, stdout.read(), stderr.read())
        assert None not in codes, ended
        return ended


def run(script: str, *arguments: str, **options) -> Ended:
    """Run a program to its end. For the options see Run."""
    return Run(script, *arguments, **options).wait()


def typed(
    script: str,
    *words: object,
    processes: int = 1,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    faults: dict[str, list] | None = None,
) -> Ended:
    """Run a program to its end in the fastest way, for tests that do not need a process of its own.

    One process: in the process of the test. Two: in processes that do this for all tests (ranks.py). If a fault kills
    the program, for example, it runs in forks.
    """
    words, variables, faults = [str(word) for word in words], environment or {}, faults or {}
    if processes > 2 or ONLY_IN_FORKS & faults.keys():
        return run(script, *words, processes=processes, cwd=cwd or ROOT, environment=variables, faults=faults)
    if processes == 2:
        ranks = [variables | rank for rank in as_ranks(processes)]
        return Ended(*RANKS.run(script, words, ranks, cwd or ROOT, faults))
    out, err = io.StringIO(), io.StringIO()
    gc.freeze()  # objects of earlier tests need not be searched below, which would take up to a second
    with contextlib.ExitStack() as stack:
        if cwd:
            stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(like_a_process(faults, os.environ | variables))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = exit_code(main_of(script), words)
    gc.collect()  # release the lock on the run's folder; normally it ends with the process
    return Ended([code], out.getvalue(), err.getvalue())


def command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments]


def run_fresh(script: str, *arguments: str, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> Ended:
    """Run a program in a new interpreter, to test imports, sys.path or the launcher's own processes."""
    done = subprocess.run(
        command(script, *arguments),
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return Ended([done.returncode], done.stdout, done.stderr)


class LastSentence(NamedTuple):
    """The last sentence of a run: how the run ended, its best score, and on which images this was measured."""

    end: str  # how it ended, such as "done"
    failure: str  # why the last checkpoint could not be saved, or ""
    score: str  # title and value, such as "top-1 50.00%"; "" if nothing was measured
    is_highest: bool  # whether no other epoch has a better score
    epoch: int  # of the best weights, from 1; 0: the score is of the initial weights
    weights: str  # raw weights or EMA; "" if the run has only one kind
    facts: list[str]  # further facts about the score, such as its interval and the score before training
    rest: str  # the images, the duration and the folder, or why nothing was measured

    @property
    def value(self) -> float:
        return float(self.score.rpartition(" ")[2].rstrip("%"))

    @property
    def before(self) -> str:
        """Return the score of the initial weights as text, or "" if it is not named."""
        return next((fact.removesuffix(BEFORE) for fact in self.facts if fact.endswith(BEFORE)), "")


BEFORE = " before training"
LAST_SENTENCE = re.compile(
    r"(?P<end>.*?)(, not saved \((?P<failure>.*?)\))?; (no best\.pth yet|nothing was measured|"
    r"(?P<highest>best )?validation (?P<score>\S[^(]* [-\d.]+%?) "
    r"\((before training|epoch (?P<epoch>\d+)(, (?P<weights>EMA|raw weights))?)(; (?P<facts>[^)]*))?\))(?P<rest>.*)"
)


def last_sentence(said: str) -> LastSentence:
    """Parse the last sentence in the output of a run. A warning and the suggested next commands may follow it."""
    parts = next(filter(None, map(LAST_SENTENCE.fullmatch, reversed(said.splitlines()))), None)
    assert parts, said
    words = {name: parts[name] or "" for name in ("end", "failure", "score")}
    facts = parts["facts"].split("; ") if parts["facts"] else []
    best = {"is_highest": bool(parts["highest"]), "epoch": int(parts["epoch"] or 0), "weights": parts["weights"] or ""}
    return LastSentence(**words, **best, facts=facts, rest=parts["rest"])


def run_folder(output: Path) -> Path:
    """Return the folder of the run, the only one in `output`."""
    (folder,) = output.iterdir()
    return folder


def rows_of(path: Path | str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def epochs_of(folder: Path) -> list[dict]:
    """Return the metrics of a run, one dict per epoch."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def status_of(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Parse the rows that -check prints: {row: (verdict, its text)}."""
    found = re.findall(r"^(\S.*?) +(ok|WARN|WRONG) +(.*(?:\n {26}.*)*)", text, re.M)
    assert found and len({what for what, _, _ in found}) == len(found), text
    return {what: (verdict, told) for what, verdict, told in found}


TORCHRUN = "torch.distributed.run"  # the module of torchrun


def launch(module: str, world_size: int, settings: Path, out: Path, *arguments: str) -> dict:
    """Run the module as this many ranks and return what it saved to `out`."""
    ended = run(module, str(settings), str(out), *arguments, processes=world_size)
    assert ended.codes == [0] * world_size, ended.stderr
    import torch  # imported late, because most tests that start processes do not need torch

    return torch.load(out, weights_only=True)


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on, or an empty list if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE, runs: Collection[Run] = ()):
    """Wait for the condition. Fail with the output of all `runs` if one of them fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        failed = any(process.exitcode for each in runs for process in each.processes)
        assert time.monotonic() < deadline and not failed, "\n\n".join(each.printed() for each in runs)
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"], ["X"])


# Not the ports that the system assigns to outgoing connections, because other tests may open some meanwhile. Each
# process that runs tests starts its search at a different port.
_PORTS = itertools.cycle(range(10000, 30000))
_PORTS = itertools.islice(_PORTS, os.getpid() * 101 % 20000, None)


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the ports are a cycle")


def as_ranks(world_size: int) -> list[dict[str, str]]:
    """Return the environment variables of each process; none for a single process."""
    if world_size == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank)} for rank in range(world_size)]
