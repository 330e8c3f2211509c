"""Conditions that end a run before its last epoch: no progress, a signal, the time limit, too many non-finite gradients or unreadable images."""

import time
from collections.abc import Callable

from configs.schema import Train
from datasets import BadImages, Batch
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.text import counted

DONE = "done"  # why a run ends after its last epoch
EARLY_STOP = "early stop"  # the reason in status.json
ADVICE = "lower TRAIN.BASE_LR, set TRAIN.GRAD_CLIP, or in float16 try -amp_dtype bfloat16"


class NonFinite(Exception):
    """Too many consecutive updates had non-finite gradients. Without a rollback the run ends with exit code 3."""

    def __init__(self, message: str, streak: range):
        super().__init__(message)
        self.streak = streak  # the skipped updates


def refuse_if_nothing_counted(trainer: Trainer) -> None:
    """NonFinite at the end of a run of which every update was skipped: it is not done, its weights are those it began with."""
    if 0 < trainer.step <= int(trainer.counters.skips_in_a_row):
        raise NonFinite(
            f"all {counted(trainer.step, 'update')} had a non-finite gradient, so nothing was learned; look at the weights of "
            f"MODEL.PRETRAINED and at the images, or {ADVICE}",
            range(trainer.step),
        )


class Stopped(Exception):
    """A signal or a callback stops the run. It is raised in all processes after the same step."""

    def __init__(self, signal: int):
        """`signal`: its number; 0: the time is up."""
        self.signal = signal


def why_finished(settings: Train, num_epochs: int, epoch: int, not_better: int) -> str:
    """Why a run of `num_epochs` ends after `epoch`, with so many evaluations in a row that brought no new best; empty: it goes
    on."""
    if epoch >= num_epochs:
        return DONE
    if settings.EARLY_STOP and not_better >= settings.EARLY_STOP:
        return f"no better in {counted(not_better, 'evaluation')} in a row (TRAIN.EARLY_STOP)"
    return ""


class SkipLimit(Callback):
    """Ends the run after PRECISION.MAX_CONSECUTIVE_SKIPS consecutive skipped updates."""

    def __init__(self, max_skips: int, get_advice: Callable[[], str] | None = None):
        """`get_advice`: returns what to change, or an empty text if unknown."""
        self._max_skips, self._get_advice = max_skips, get_advice

    def on_report(self, trainer: Trainer, report: Report) -> None:
        skips = report.skips_in_a_row
        if skips >= self._max_skips:
            advice = (self._get_advice and self._get_advice()) or ADVICE
            raise NonFinite(
                f"{counted(skips, 'update')} in a row had a non-finite gradient, up to step {trainer.step}; the weights are those "
                f"before them; {advice}",
                range(trainer.step - skips, trainer.step),
            )


class BadImageLimit(Callback):
    """Ends the run when too many training images are unreadable."""

    def __init__(self, bad_images: BadImages):
        self.bad_images = bad_images

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        self.bad_images.note(batch.bad)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self.bad_images.check(trainer.process)


class TimeLimit(Callback):
    """Stops a run early enough that it is saved before RUN.MAX_TIME is over."""

    def __init__(
        self,
        seconds: float,
        start: float,
        longest_save: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start`: the clock's time at the program's start; `longest_save`: seconds of the longest save so far."""
        self._end, self._longest_save, self._clock = start + seconds, longest_save, clock
        self._update = self._turn = 0.0  # longest so far: an update; the last update of an epoch up to the next one
        self._before: tuple[float, int] | None = None  # time and updates_left of the last call

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        """Several processes stop one update later, and a save may have to wait for the one before.

        So it leaves time for two updates and two saves, and for the evaluation if it is due.
        """
        now = self._clock()
        if self._before:
            before, left_before = self._before
            if left_before == 1:
                self._turn = max(self._turn, now - before)
            else:
                self._update = max(self._update, now - before)
        self._before = now, updates_left
        turn = self._turn if updates_left <= 2 else 0
        return now + 2 * (self._update + self._longest_save()) + turn >= self._end
