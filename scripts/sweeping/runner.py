"""Runs the trials of a sweep one after another, reads their results, and writes trials.csv and the table."""

import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engine.evaluation.scores import TITLES, format_value
from engine.record.saved_files import read_table
from engine.record.saved_run import is_locked, read_status
from scripts.comparing.statistics import spread
from scripts.sweeping.plan import Sweep, Trial, describe
from utils.errors import ConfigError, ExitCode, cause_of
from utils.files import FolderLock, creating, write_text
from utils.program import StopSignal, die_with_parent
from utils.text import counted, csv_text, format_time, markdown_table

ONE_TRIAL = (
    "A single trial says nothing about its settings, only about its weights; repeat the sweep with -seeds 0,1,2 and "
    "another -output to compare settings."
)
WAITING, RUNNING, DONE, STOPPED, FAILED = "waiting", "running", "done", "stopped", "failed"


@dataclass(frozen=True)
class Result:
    """The state and result of a trial. `metric` decides which epoch is best; `best` is its value in that epoch."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    metric: str | None = None
    best: float | None = None
    epoch: int | None = None  # number of the best epoch
    seconds: float | None = None

    @property
    def is_final(self) -> bool:
        """Return whether another start would change nothing: the trial is done, or would fail again in the same way."""
        return self.state == DONE or (self.state == FAILED and self.exit_code == ExitCode.NON_FINITE)


def read_result(folder: Path) -> Result:
    """Return the result in the folder of a run. A killed run counts as stopped, so it will be resumed."""
    try:
        status = read_status(folder)
    except ConfigError:
        status = {}
    if not status.get("state"):
        return Result(WAITING)
    metric, best = status.get("best_metric"), status.get("best", {})
    if metric not in TITLES or metric not in best:
        metric, best = None, {}  # no epoch has ended, or status.json was changed by hand
    code = status.get("exit_code")
    state = DONE if status["state"] == DONE else RUNNING if is_locked(folder) else FAILED
    if state == FAILED and (code in (None, 0) or status.get("signal")):
        state = STOPPED
    seconds = None
    with contextlib.suppress(ConfigError, ValueError, KeyError):
        rows = read_table(folder / "metrics.csv")
        seconds = sum(float(row["train_seconds"]) + float(row["eval_seconds"] or 0) for row in rows)
    return Result(state, str(status.get("reason") or ""), code, metric, best.get(metric), best.get("epoch"), seconds)


def write_trials(sweep: Sweep, folder: Path, results: Sequence[Result]) -> None:
    """Write trials.csv. If that fails, only print a warning, since no trial depends on the file."""
    rows = [["index", *sweep.over, "seed", "fold", "state", "metric", "best", "epoch", "seconds", "folder"]]
    for trial, result in zip(sweep.trials, results, strict=True):
        seconds = None if result.seconds is None else round(result.seconds, 1)
        facts = [trial.seed, trial.fold, result.state, result.metric, result.best, result.epoch, seconds]
        rows.append([trial.index, *trial.settings.values(), *facts, trial.name])
    try:
        write_text(folder / "trials.csv", csv_text(rows))
    except OSError as error:
        print(f"warning: cannot write {folder / 'trials.csv'} ({cause_of(error)}); the sweep continues")


def table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per point, and the command of the best point.

    The best mean comes first; points with unfinished trials come last.
    """
    states = [each.state for each in results]
    numbers = {state: states.count(state) for state in (DONE, FAILED, STOPPED, RUNNING, WAITING)}
    summary = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    summary = f"{counted(len(states), 'trial')}: {summary}\n\n"
    metric = next((each.metric for each in results if each.metric), None)
    digits, per_point = 4 if metric == "loss" else 2, len(results) // len(sweep.points)
    ranked = ranked_points(sweep, results)
    if not ranked:
        return f"{summary}no trial is done"
    points = [
        [describe(sweep.points[number]) or "as given", spread(values, digits), f"{len(values)} of {per_point}"]
        for number, values in ranked
    ]
    title = f"best {TITLES[metric]}{'' if metric == 'loss' else ', %'}"
    rows = markdown_table(["settings", title, "trials"], points)
    command = sweep.command_of_point(sweep.points[ranked[0][0]])
    limit = f" {ONE_TRIAL}" if len(ranked) > 1 and any(len(values) < 2 for _, values in ranked[:2]) else ""
    note = f"±: standard deviation over seeds and folds.{limit} Settings of the first row:"
    return f"{summary}{rows}\n\n{note}\n\n    {command}"


def ranked_points(sweep: Sweep, results: Sequence[Result]) -> list[tuple[int, list[float]]]:
    """Return (point, best values of its finished trials), the best mean first. Points with unfinished trials come last."""
    metric = next((each.metric for each in results if each.metric), None)
    sign, points, per_point = 1 if metric == "loss" else -1, [], len(results) // len(sweep.points)
    for number in range(len(sweep.points)):
        of_point = results[number * per_point : (number + 1) * per_point]
        values = [each.best for each in of_point if each.state == DONE and each.best is not None]
        if values:
            points.append((len(values) < len(of_point), sign * sum(values) / len(values), number, values))
    return [(number, values) for *_, number, values in sorted(points, key=lambda point: point[:3])]


# --- running the trials ---


SECONDS_BETWEEN_LOOKS = 0.1


def start(arguments: list[str], output: Path, cwd: str) -> subprocess.Popen:
    """Start a run that appends its output to a file."""
    with open(output, "ab", opener=creating) as file:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=cwd,
            process_group=0,  # so that Ctrl-C reaches only the sweep, which signals its trial once
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # the trial saves on SIGTERM
        )


class Runner:
    """Starts one trial after another, and records their results."""

    def __init__(self, sweep: Sweep, folder: Path, lock: FolderLock):
        self.sweep, self.folder, self.lock = sweep, folder, lock
        self.results = {trial.index: read_result(folder / trial.name) for trial in sweep.trials}
        self.stop = StopSignal()
        self.seconds = [each.seconds for each in self.results.values() if each.seconds]  # durations of ended trials

    @property
    def num_left(self) -> int:
        return self.sweep.num_trials - sum(each.is_final for each in self.results.values())

    def _time_left(self, of_running: float | None = None) -> str:
        """Return the estimated time left as text. `of_running`: estimated duration of the running trial, if known."""
        each = statistics.fmean(self.seconds) if self.seconds else of_running
        return f", about {format_time(each * self.num_left)} left" if each and self.num_left else ""

    def run(self) -> int:
        """Run the trials that are not finished. Return the exit code.

        The code is 0 if every trial is done, 3 if the gradients of some trials were not finite and all others are
        done, and 1 otherwise. If a signal stopped the sweep, it is 128 plus the signal's number.
        """
        of, place = f"{self.num_left} of {counted(self.sweep.num_trials, 'trial')}", self.folder / "trial-000.txt"
        print(f"{of} to run, one after another{self._time_left()}; their output: {place} ...", flush=True)
        for trial in self.sweep.trials:
            while is_locked(self.folder / trial.name) and not self.stop.number:
                time.sleep(SECONDS_BETWEEN_LOOKS)  # a run that outlived an earlier sweep still writes there
            if self.stop.number:
                break
            self.lock.check()  # by now the folder may belong to another sweep
            if not self.results[trial.index].is_final:
                self._ended(trial, self._run(trial))
        if self.stop.number:
            return 128 + self.stop.number
        codes = {0 if each.state == DONE else each.exit_code or 1 for each in self.results.values()}
        return max(codes) if codes <= {0, ExitCode.NON_FINITE} else 1

    def _run(self, trial: Trial) -> int:
        """Run the trial and return its exit code. After a signal to the sweep, make the trial save and end."""
        try:
            command = [sys.executable, *self.sweep.command(trial, self.folder)]
            program = start(command, self._output(trial), self.sweep.cwd)
        except OSError as error:
            raise ConfigError(
                f"-output: cannot start {trial} in {self.folder} ({cause_of(error)}); choose another folder"
            ) from error
        began, is_signalled, is_estimated = time.monotonic(), False, bool(self.seconds)
        while (code := program.poll()) is None:
            if not is_estimated and (eta := self._eta(trial)):
                left = self._time_left(time.monotonic() - began + eta)
                print(f"{trial}: about {format_time(eta)} left for this trial{left} in all", flush=True)
                is_estimated = True
            if self.stop.number and not is_signalled:
                program.terminate()
                is_signalled = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self.seconds += [time.monotonic() - began] * (code == 0)
        return code

    def _output(self, trial: Trial) -> Path:
        """Return the file with the output of the trial."""
        return self.folder / f"{trial.name}.txt"

    def _eta(self, trial: Trial) -> float | None:
        """Return the run's own estimate of its remaining seconds, or None. This must not try the run's lock."""
        with contextlib.suppress(ConfigError):
            return read_status(self.folder / trial.name).get("eta_seconds")
        return None

    def _ended(self, trial: Trial, code: int) -> None:
        self.lock.check()
        result, error = read_result(self.folder / trial.name), last_error(self._output(trial))
        is_refused = code == 2 and result.state == WAITING
        if result.state != DONE:
            was_stopped = code == 0 or (self.stop.number and code == 128 + signal.SIGTERM)
            why = f"killed by signal {-code}" if code < 0 else result.reason or error
            changes = {"state": STOPPED} if was_stopped else {"state": FAILED, "exit_code": code, "reason": why}
            result = replace(result, **changes)
        self.results[trial.index] = result
        write_trials(self.sweep, self.folder, [*self.results.values()])
        number = self.sweep.num_trials - self.num_left
        outcome = f"{result.state} {result.reason}".strip()
        if result.state == DONE and result.best is not None:
            outcome = f"{TITLES[result.metric]} {format_value(result.metric, result.best)} in epoch {result.epoch}"
        print(f"[{number}/{self.sweep.num_trials}] {trial}: {outcome}{self._time_left()}", flush=True)
        if is_refused:  # the trial ended before training; the other trials would fail in the same way
            raise ConfigError(f"{trial}: {error}\nits output: {self._output(trial)}")


def last_error(output: Path) -> str:
    """Return the last error in the output of a run."""
    try:
        printed = output.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "see its output"
    _, found, error = f"\n{printed}".rpartition("\nerror: ")
    return error.strip() if found else (printed.splitlines() or ["no output"])[-1]
