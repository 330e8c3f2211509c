"""Runs the trials of a sweep one after another, each a program of its own.

What optuna knows is rebuilt from the plan and the runs, so a kill loses none of it. Its own journal was tried: killed inside a
write it cannot be read again (JSONDecodeError).
"""

import contextlib
import importlib.util
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from configs.values import SETTINGS
from engine.record.saved_run import read_status
from scripts.sweeping.plan import Plan, Range, Trial, range_or_choices
from scripts.sweeping.results import (
    DONE,
    FAILED,
    NON_FINITE,
    STOPPED,
    WAITING,
    Result,
    is_locked,
    read_result,
    write_trials,
)
from utils.errors import ConfigError, cause_of
from utils.program import StopSignal, die_with_parent
from utils.text import counted, format_time

SECONDS_BETWEEN_LOOKS = 0.1
ATTEMPTS = 100  # to find a point that was not tried yet


class Program:
    """A run that was started here."""

    def __init__(self, arguments: list[str], output: Path, cwd: str):
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
                process_group=0,  # so that Ctrl-C reaches the sweep alone, which tells its trial once
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # it saves then
            )

    def poll(self) -> int | None:
        """The exit code, None while it runs; that of a process that a signal killed is negative."""
        return self._process.poll()

    def stop(self) -> None:
        """Tell the run to save and end."""
        self._process.send_signal(signal.SIGTERM)


class Runner:
    """Starts one trial after another, and notes what becomes of them."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder
        self.results = {trial.index: read_result(folder / trial.name) for trial in plan.trials}
        self.stop = StopSignal()
        self.seconds = [each.seconds for each in self.results.values() if each.seconds]  # of each trial that ended

    @property
    def num_left(self) -> int:
        return self.plan.num_trials - sum(each.is_final for each in self.results.values())

    def _time_left(self, of_running: float | None = None) -> str:
        """How long the rest takes, once a trial has ended or the one that runs knows how long it takes."""
        each = statistics.fmean(self.seconds) if self.seconds else of_running
        return f", about {format_time(each * self.num_left)} left" if each and self.num_left else ""

    def run(self, trials: Iterator[Trial]) -> int:
        """Run those of these trials that are not finished. Returns the exit code."""
        of, place = f"{self.num_left} of {counted(self.plan.num_trials, 'trial')}", self.folder / "trial-000.txt"
        print(f"{of} to run, one after another{self._time_left()}; what each prints: {place} ...", flush=True)
        for trial in trials:
            while is_locked(self.folder / trial.name) and not self.stop.number:
                time.sleep(SECONDS_BETWEEN_LOOKS)  # a run that outlived its sweep is still at work there
            if self.stop.number:
                break
            if not self.results.get(trial.index, Result(WAITING)).is_final:
                self._ended(trial, self._run(trial))
        return 128 + self.stop.number if self.stop.number else self._code()

    def _run(self, trial: Trial) -> int:
        """Run the trial and return its exit code; told to stop, it saves and ends."""
        try:
            command = [sys.executable, *self.plan.command(trial, self.folder)]
            program = Program(command, self._output(trial), self.plan.cwd)
        except OSError as error:
            raise ConfigError(f"-output: {trial} cannot be started in {self.folder} ({cause_of(error)})") from error
        start, is_told, is_estimated = time.monotonic(), False, bool(self.seconds)
        while (code := program.poll()) is None:
            if not is_estimated and (eta := self._eta(trial)):
                left = self._time_left(time.monotonic() - start + eta)
                print(f"{trial}: about {format_time(eta)} left of it{left} in all", flush=True)
                is_estimated = True
            if self.stop.number and not is_told:
                program.stop()
                is_told = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self.seconds += [time.monotonic() - start] * (code == 0)
        return code

    def _eta(self, trial: Trial) -> float | None:
        """The seconds left that the run itself tells."""
        with contextlib.suppress(ConfigError):
            return read_status(self.folder / trial.name).get("eta_seconds")
        return None

    def _output(self, trial: Trial) -> Path:
        """What the run prints."""
        return self.folder / f"{trial.name}.txt"

    def _ended(self, trial: Trial, code: int) -> None:
        result, error = read_result(self.folder / trial.name), last_error(self._output(trial))
        is_refused = code == 2 and result.state == WAITING
        if result.state != DONE:
            was_stopped = code == 0 or (self.stop.number and code == 128 + signal.SIGTERM)
            why = f"killed by signal {-code}" if code < 0 else result.reason or error
            changes = {"state": STOPPED} if was_stopped else {"state": FAILED, "exit_code": code, "reason": why}
            result = replace(result, **changes)
        self.results[trial.index] = result
        in_order = [self.results.get(each.index, Result(WAITING)) for each in self.plan.trials]
        write_trials(self.plan, self.folder, in_order)
        number = self.plan.num_trials - self.num_left
        what = f"{result.state} {result.reason}".strip()
        if result.state == DONE and result.best is not None:
            what = f"{result.metric} {result.best:.4g} in epoch {result.epoch}"
        print(f"[{number}/{self.plan.num_trials}] {trial}: {what}{self._time_left()}", flush=True)
        if is_refused:  # it did not come to train: so it would be with all others too
            raise ConfigError(f"{trial}: {error}\nits output: {self._output(trial)}")

    def _code(self) -> int:
        """0 if every trial is done, 3 if some ended with non-finite gradients and the others are done, else 1."""
        codes = {0 if each.state == DONE else each.exit_code or 1 for each in self.results.values()}
        return max(codes) if codes <= {0, NON_FINITE} else 1


def last_error(output: Path) -> str:
    """The mistake that a run named last in what it printed."""
    try:
        printed = output.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "see its output"
    _, found, error = f"\n{printed}".rpartition("\nerror: ")
    return error.strip() if found else (printed.splitlines() or ["no output"])[-1]


def check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "-optuna: the package optuna is not installed; pip install optuna, or list the values for a grid"
        )


def proposed_trials(runner: Runner) -> Iterator[Trial]:
    """The trials of the points that are in the plan, then of new ones, each proposed when there is room to run it."""
    number = 0
    while True:
        trials = runner.plan.trials
        while number < len(trials):
            yield trials[number]
            number += 1
        if len(runner.plan.points) >= runner.plan.optuna:
            return
        point = propose(runner.plan, runner.results)
        if point is None:
            print("optuna proposes only points that were tried already; the sweep ends")
            return
        runner.plan = replace(runner.plan, points=[*runner.plan.points, point])
        runner.plan.save(runner.folder)


def propose(plan: Plan, results: dict[int, Result]) -> dict[str, str] | None:
    """The settings of the next point; None if there seem to be no more. The same for the same plan and results."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {key: _distribution(key, text) for key, text in plan.over.items()}
    # A text is a choice; a number stands for itself.
    kinds = {key: SETTINGS[key].kind if hasattr(each, "low") else str for key, each in distributions.items()}
    config = plan.load_point({}).config
    direction = "minimize" if config.TRAIN.BEST_METRIC == "loss" else "maximize"
    for attempt in range(ATTEMPTS):
        # Seeded anew for each point, so that a sweep that was started again proposes as one that was not.
        sampler = optuna.samplers.TPESampler(seed=config.SEED + len(plan.points) + 1_000_000 * attempt)
        study = optuna.create_study(direction=direction, sampler=sampler)
        for number, point in enumerate(plan.points):
            of_point = [results.get(trial.index) for trial in plan.trials if trial.point == number]
            if all(each and each.state == DONE and each.best is not None for each in of_point):
                params = {key: kinds[key](word) for key, word in point.items()}
                value = statistics.fmean(each.best for each in of_point)
                study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
        point = {key: str(value) for key, value in study.ask(distributions).params.items()}
        if point not in plan.points:
            return point
    return None


def _distribution(key: str, text: str):
    import optuna

    each = range_or_choices(key, text)
    if not isinstance(each, Range):
        return optuna.distributions.CategoricalDistribution(each)
    is_whole = SETTINGS[key].kind is int
    kind = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
    return kind(each.low, each.high, log=each.is_log)
