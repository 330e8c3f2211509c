"""Runs the trials of a sweep: as many at a time as there are slots, each a program of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from scripts.sweeping.plan import ROOT, Plan, Trial
from scripts.sweeping.progress import Progress
from scripts.sweeping.results import (
    DONE,
    FAILED,
    NON_FINITE,
    STOPPED,
    WAITING,
    Result,
    is_better,
    is_locked,
    read_result,
    write_trials,
)
from utils.errors import ConfigError, cause_of
from utils.program import StopSignal, die_with_parent

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_WARNINGS = 60


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

    def __init__(self, plan: Plan, slots: list[dict[str, str]], show: Progress):
        """`slots`: for each trial at a time its variables."""
        self.plan, self.slots, self.show = plan, slots, show
        self.results: dict[int, Result] = {}
        self.running: dict[int, tuple[Trial, Program]] = {}  # by the number of the slot
        self.stop, self.refused = StopSignal(), ""
        for trial in plan.trials:
            self.results[trial.index] = read_result(plan.folder_of(trial))

    def run(self, trials: Iterator[Trial]) -> int:
        """Run those of these trials that are not finished. Returns the exit code."""
        self._note()
        while True:
            self._look()
            if self.stop.number or self.refused:
                self._end()
                break
            free = next((number for number in range(len(self.slots)) if number not in self.running), None)
            trial = next(trials, None) if free is not None else None
            if trial is not None and not self.results.get(trial.index, Result(WAITING)).is_final:
                self._begin(trial, free)
            elif trial is None:
                if not self.running:
                    break
                time.sleep(SECONDS_BETWEEN_LOOKS)
        if self.refused:
            raise ConfigError(self.refused)
        return 128 + self.stop.number if self.stop.number else self._code()

    def _begin(self, trial: Trial, slot: int) -> None:
        folder = self.plan.folder_of(trial)
        if not self._wait_for(trial, folder):
            return
        program = [sys.executable, str(ROOT / self.plan.program), *self.plan.arguments(trial)]
        try:
            started = Program(program, self.plan.output_of(trial), self.slots[slot], self.plan.cwd)
        except OSError as error:
            self.refused = f"-output: {trial.title} cannot be started in {folder.parent} ({cause_of(error)})"
            return
        self.running[slot] = trial, started
        self.show.started(trial)

    def _wait_for(self, trial: Trial, folder: Path) -> bool:
        """Wait for a run in the folder, which outlived its sweep. False if the sweep is to stop."""
        warned = -float("inf")
        while is_locked(folder):
            if time.monotonic() - warned > SECONDS_BETWEEN_WARNINGS:
                self.show.say(f"{trial.title}: waiting for a run that is still at work in {folder}")
                warned = time.monotonic()
            if self.stop.number:
                return False
            self._look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def _look(self) -> None:
        """Note the trials that have ended."""
        for slot, (trial, program) in list(self.running.items()):
            if (code := program.poll()) is not None:
                del self.running[slot]
                self._ended(trial, code)
        self.show.tick([self.plan.folder_of(trial) for trial, _ in self.running.values()])

    def _ended(self, trial: Trial, code: int) -> None:
        result = read_result(self.plan.folder_of(trial))
        said = last_error(self.plan.output_of(trial))
        if code == 2 and result.state == WAITING:  # it did not come to train: so it would be with all others too
            self.refused = f"{trial.describe()}: {said}\nthe command: {self.plan.command(trial)}"
        was_told = self.stop.number and code == 128 + signal.SIGTERM
        if result.state != DONE and (code == 0 or was_told):
            result = replace(result, state=STOPPED)
        elif result.state != DONE:
            why = f"killed by signal {-code}" if code < 0 else result.reason or said
            result = replace(result, state=FAILED, exit_code=code, reason=why)
        self.results[trial.index] = result
        self._note()
        self.show.ended(trial, result, self._best())

    def _note(self) -> None:
        trials = self.plan.trials
        write_trials(self.plan, [self.results.get(each.index, Result(WAITING)) for each in trials], self.show.warn)

    def _best(self) -> tuple[int, Result] | None:
        best = None
        for index, result in self.results.items():
            if result.state == DONE and result.best is not None:
                best = (index, result) if best is None or is_better(result.metric, result.best, best[1].best) else best
        return best

    def _end(self) -> None:
        """Tell all trials to save and end, and wait for them."""
        for _, program in self.running.values():
            program.stop()
        if self.running:
            self.show.say("stopping; the trials save")
        while self.running:
            self._look()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _code(self) -> int:
        """0 if every trial is done, 3 if some ended with non-finite gradients and the others are done, else 1."""
        codes = {each.exit_code for each in self.results.values() if each.state == FAILED}
        unfinished = any(each.state not in (DONE, FAILED) for each in self.results.values())
        if codes == {NON_FINITE} and not unfinished:
            return NON_FINITE
        return 1 if codes or unfinished else 0


def last_error(output: Path) -> str:
    """The mistake that a run named last in what it printed."""
    try:
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "see its output"
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]).removeprefix("error: ") if starts else (lines or ["no output"])[-1]
