"""Runs the trials of a sweep: as many at a time as there are slots, each a program of its own.

What optuna knows is rebuilt from the plan and the runs, so a kill loses none of it. Its own journal was tried: killed inside a
write it cannot be read again (JSONDecodeError).
"""

import contextlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from configs.schema import Config
from configs.values import SETTINGS
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
from utils.host import available_cores
from utils.program import StopSignal, die_with_parent

SECONDS_BETWEEN_LOOKS = 0.1
ATTEMPTS = 100  # to find a point that was not tried yet


def choose_slots(config: Config, jobs: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """For each of the trials at a time its variables: devices of its own, or a share of the cores."""
    if jobs == 1:
        return [{}]
    per_job = config.START.NGPUS or 1
    devices = visible_devices(environment) if config.DEVICE in ("auto", "cuda") else []
    if not devices:
        threads = max(1, len(available_cores()) // (jobs * per_job))
        return [{"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", str(threads))}] * jobs
    if per_job > 1 and jobs * per_job > len(devices):
        raise ConfigError(
            f"-jobs: {jobs} trials of {per_job} devices each (-ngpus) need {jobs * per_job}, and there are {len(devices)}; "
            f"set -jobs {max(1, len(devices) // per_job)}"
        )
    places = [[devices[(job * per_job + each) % len(devices)] for each in range(per_job)] for job in range(jobs)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(place)} for place in places]


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """CUDA devices by the names that CUDA_VISIBLE_DEVICES takes, without importing torch."""
    if (names := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip() not in ("", "-1")]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    return []


class Program:
    """A run that was started here."""

    def __init__(self, arguments: list[str], output: Path, environment: Mapping[str, str], cwd: str):
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                cwd=cwd,
                process_group=0,  # so that Ctrl-C reaches the sweep alone, which tells its trials once
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # it saves then
            )

    def poll(self) -> int | None:
        """The exit code, None while it runs; that of a process that a signal killed is negative."""
        return self._process.poll()

    def stop(self) -> None:
        """Tell the run to save and end."""
        self._process.send_signal(signal.SIGTERM)


class Runner:
    """Starts trials as slots get free, and notes what becomes of them."""

    def __init__(self, plan: Plan, folder: Path, slots: list[dict[str, str]]):
        """`slots`: for each trial at a time its variables."""
        self.plan, self.folder, self.slots = plan, folder, slots
        self.results = {trial.index: read_result(folder / trial.name) for trial in plan.trials}
        self.running: dict[int, tuple[Trial, Program]] = {}  # by the number of the slot
        self.stop, self.refused = StopSignal(), ""

    def run(self, trials: Iterator[Trial]) -> int:
        """Run those of these trials that are not finished. Returns the exit code."""
        waiting = None
        while True:
            self._look()
            if self.stop.number or self.refused:
                break
            free = next((number for number in range(len(self.slots)) if number not in self.running), None)
            if free is not None and waiting is None:
                waiting = next(trials, None)
                if waiting is None and not self.running:
                    break
            if waiting and self.results.get(waiting.index, Result(WAITING)).is_final:
                waiting = None
            elif free is not None and waiting and not is_locked(self.folder / waiting.name):
                self._begin(waiting, free)
                waiting = None
            else:  # no slot is free, or a run that outlived its sweep is still at work in the folder
                time.sleep(SECONDS_BETWEEN_LOOKS)
        for _, program in self.running.values():
            program.stop()
        while self.running:
            self._look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if self.refused:
            raise ConfigError(self.refused)
        return 128 + self.stop.number if self.stop.number else self._code()

    def _begin(self, trial: Trial, slot: int) -> None:
        command = [sys.executable, *self.plan.command(trial, self.folder)]
        try:
            program = Program(command, self._output(trial), self.slots[slot], self.plan.cwd)
        except OSError as error:
            self.refused = f"-output: {trial} cannot be started in {self.folder} ({cause_of(error)})"
        else:
            self.running[slot] = trial, program

    def _output(self, trial: Trial) -> Path:
        """What the run prints."""
        return self.folder / f"{trial.name}.txt"

    def _look(self) -> None:
        """Note the trials that have ended."""
        for slot, (trial, program) in list(self.running.items()):
            if (code := program.poll()) is not None:
                del self.running[slot]
                self._ended(trial, code)

    def _ended(self, trial: Trial, code: int) -> None:
        result, error = read_result(self.folder / trial.name), last_error(self._output(trial))
        if code == 2 and result.state == WAITING:  # it did not come to train: so it would be with all others too
            self.refused = f"{trial}: {error}\nits output: {self._output(trial)}"
        if result.state != DONE:
            was_stopped = code == 0 or (self.stop.number and code == 128 + signal.SIGTERM)
            why = f"killed by signal {-code}" if code < 0 else result.reason or error
            changes = {"state": STOPPED} if was_stopped else {"state": FAILED, "exit_code": code, "reason": why}
            result = replace(result, **changes)
        self.results[trial.index] = result
        write_trials(self.plan, self.folder, self._in_order())
        number = sum(each.is_final for each in self.results.values())
        what = f"{result.state} {result.reason}".strip()
        if result.state == DONE and result.best is not None:
            what = f"{result.metric} {result.best:.4g} in epoch {result.epoch}"
        print(f"[{number}/{self.plan.num_trials}] {trial}: {what}", flush=True)

    def _in_order(self) -> list[Result]:
        return [self.results.get(trial.index, Result(WAITING)) for trial in self.plan.trials]

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
