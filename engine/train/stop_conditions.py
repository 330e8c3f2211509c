"""Conditions that end a run early: non-finite gradients, unreadable images, signals, time limit, no improvement."""

import time
from collections.abc import Callable

from configs.schema import Config, Train
from datasets import BadImages, Batch
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.forecast import RunTimes
from engine.train.trainer import Trainer
from utils.text import counted

DONE = "done"  # the reason if a run ends after its last epoch
EARLY_STOP = "early stop"  # the reason if TRAIN.EARLY_STOP ends a run, also in status.json
ADVICE = "lower TRAIN.BASE_LR, set TRAIN.GRAD_CLIP, or in float16 try -amp_dtype bfloat16"


class NonFinite(Exception):
    """Too many consecutive updates had non-finite gradients. If a rollback is impossible, the exit code is 3."""

    def __init__(self, message: str, streak: range):
        super().__init__(message)
        self.streak = streak  # the steps of the skipped updates


def refuse_if_nothing_counted(trainer: Trainer) -> None:
    """Raise NonFinite if every update of a run was skipped, because then its weights are still the initial ones."""
    if 0 < trainer.step <= int(trainer.counters.skips_in_a_row):
        raise NonFinite(
            f"all {counted(trainer.step, 'update')} had a non-finite gradient, so nothing was learned; check the "
            f"weights of MODEL.PRETRAINED and the images, or {ADVICE}",
            range(trainer.step),
        )


class Stopped(Exception):
    """Raised in all processes after the same step, when a signal or a callback stops the run."""

    def __init__(self, signal: int):
        """`signal` is the number of the signal, or 0 if a callback stops the run."""
        self.signal = signal


def why_finished(settings: Train, num_epochs: int, epoch: int, not_better: int) -> str:
    """Return why a run of `num_epochs` ends after `epoch`, or an empty string if it continues.

    `not_better` is the number of evaluations since the best one.
    """
    if epoch >= num_epochs:
        return DONE
    if settings.EARLY_STOP and not_better >= settings.EARLY_STOP:
        return f"no improvement in {counted(not_better, 'evaluation')} (TRAIN.EARLY_STOP)"
    return ""


def describe_time_limit(config: Config) -> str:
    """Return the settings that limit the time of a run, with their values."""
    limits = {"RUN.MAX_TIME": config.RUN.MAX_TIME, "TRAIN.BUDGET": config.TRAIN.BUDGET}
    return " or ".join(f"{key} ({value})" for key, value in limits.items() if value)


class SkipLimit(Callback):
    """At each report, raises NonFinite if PRECISION.MAX_CONSECUTIVE_SKIPS updates in a row were skipped."""

    def __init__(self, max_skips: int, get_advice: Callable[[], str] | None = None):
        """`get_advice` returns advice on what to change, or an empty string."""
        self._max_skips, self._get_advice = max_skips, get_advice

    def on_report(self, trainer: Trainer, report: Report) -> None:
        skips = report.skips_in_a_row
        if skips >= self._max_skips:
            advice = (self._get_advice and self._get_advice()) or ADVICE
            raise NonFinite(
                f"{counted(skips, 'update')} in a row had a non-finite gradient, up to step {trainer.step}; the "
                f"weights are from before these updates; {advice}",
                range(trainer.step - skips, trainer.step),
            )


class BadImageLimit(Callback):
    """Ends the run if too many training images are unreadable."""

    def __init__(self, bad_images: BadImages):
        self.bad_images = bad_images

    def on_micro_batch(self, trainer: Trainer, batch: Batch, weight: float) -> None:
        self.bad_images.note(batch.bad)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self.bad_images.check(trainer.process)


class TimeLimit(Callback):
    """Stops a run early enough to save it before RUN.MAX_TIME is over."""

    def __init__(
        self,
        seconds: float,
        start: float,
        times: RunTimes,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start`: the program's start time on `clock`. `times`: those that the forecast measures."""
        self._end, self._times, self._clock = start + seconds, times, clock
        self._update = self._turn = 0.0  # longest update and longest pause between epochs so far, in seconds
        self._before: tuple[float, int] | None = None  # time and updates_left of the last call

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        """Return whether there is too little time for two updates, two saves, and an evaluation if it is due.

        Two updates, because several processes stop one update later. Two saves: the last one may wait for another.
        """
        now = self._clock()
        if self._before:
            before, left_before = self._before
            if left_before == 1:
                self._turn = max(self._turn, now - before)
            else:
                self._update = max(self._update, now - before)
        self._before = now, updates_left
        turn = 0.0
        if updates_left <= 2:
            number = trainer.epoch + 1
            is_evaluated = number % self._times.validate_freq == 0 or number == trainer.schedule.num_epochs
            # Until an epoch has ended with an evaluation, only the forecast knows how long that takes.
            turn = max(self._turn, self._times.one_evaluation()) if is_evaluated else self._turn
        return now + 2 * (self._update + self._times.longest_save()) + turn >= self._end
