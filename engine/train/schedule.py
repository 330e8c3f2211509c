"""The learning rate as a function of the step."""

import math

from configs.schema import Train
from utils.errors import ensure


def batch_factor(settings: Train, global_batch: int) -> float:
    """The factor of the three rates of the settings."""
    if not settings.LINEAR_SCALED_LR:
        return 1.0
    ratio = global_batch / settings.LINEAR_SCALED_LR
    return math.sqrt(ratio) if settings.LR_SCALING == "sqrt" else ratio


def planned_updates(settings: Train, steps_per_epoch: int, choices: list[list[int]]) -> int:
    """The updates of a run: as the budget has chosen last, or those of the settings' epochs."""
    return choices[-1][1] if choices else settings.NUM_EPOCHS * steps_per_epoch


class Schedule:
    """The learning rate as a function of the step, and of how many updates the run has.

    A budget (TRAIN.BUDGET) changes that number while the run goes on. Each update then stands for a place among the updates
    of the settings' own epochs, and has its rate: the last update for their last one, whatever was chosen when, so the run
    lands; and between the update before a choice and the last one places are evenly spaced, so the rate does not jump. All
    of the schedule is shortened in proportion, the warm-up too. Rejected: a warm-up of as many updates as the settings say,
    which a short run would never leave.
    """

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        self.resume([])
        scale = batch_factor(settings, global_batch)
        rates = settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR
        self.start, self.base, self.end = (rate * scale for rate in rates)

    @property
    def num_epochs(self) -> int:
        """The last one may be shorter than the others."""
        return math.ceil(self.num_updates / self._steps_per_epoch)

    def end_of(self, epoch: int) -> int:
        """The step after the last one of this epoch."""
        return min((epoch + 1) * self._steps_per_epoch, self.num_updates)

    def choose(self, step: int, num_updates: int) -> None:
        """From this step on the run has so many updates; at least this one. Drops the choices that were to be repeated."""
        ensure(num_updates > step, f"a run of {num_updates} updates cannot contain update {step}")
        self._anchor = step - 1, self._place(step - 1)
        self.choices.append([step, num_updates])
        self.num_updates = num_updates
        self.to_repeat = []

    def repeat(self, step: int) -> bool:
        """Make the choice that an earlier start made at this step. Returns whether there is one."""
        if not self.to_repeat or self.to_repeat[0][0] != step:
            return False
        (_, num_updates), *later = self.to_repeat
        self.choose(step, num_updates)
        self.to_repeat = later
        return True

    def resume(self, choices: list[list[int]]) -> None:
        """Go back to what a checkpoint holds: [step, number of updates] of each choice. The same floats come out."""
        self.choices: list[list[int]] = []
        self.to_repeat: list[list[int]] = []  # choices that an earlier start made after the checkpoint
        self._anchor = -1, -1.0
        self.num_updates = planned_updates(self._settings, self._steps_per_epoch, [])
        for step, num_updates in choices:
            self.choose(step, num_updates)

    def _place(self, step: int) -> float:
        """Which of the updates of the settings' own epochs a step stands for: itself, until something was chosen."""
        if not self.choices:
            return step
        (first, place), last = self._anchor, planned_updates(self._settings, self._steps_per_epoch, []) - 1
        # Counted back from the end: exact at the last update, and everywhere if the settings' epochs fit.
        return last - (last - place) * (self.num_updates - 1 - step) / (self.num_updates - 1 - first)

    def __call__(self, step: int) -> float:
        settings, step = self._settings, self._place(step)
        time, per_epoch = step, self._steps_per_epoch
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # changes once per epoch, counted from 1
            time, per_epoch = step // self._steps_per_epoch + 1, 1
        elif settings.LR_SCHEDULER.PER_EPOCH:
            time, per_epoch = step // self._steps_per_epoch, 1
        epoch = time / per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(time, per_epoch)

    def _after_warmup(self, time: float, per_epoch: int) -> float:
        """The rate at a time that has `per_epoch` units in an epoch."""
        settings, chosen = self._settings, self._settings.LR_SCHEDULER
        if chosen.NAME == "constant":
            return self.base
        first = settings.WARMUP_EPOCHS if chosen.AFTER_WARMUP else 0
        if chosen.NAME == "step":
            since = time - first * per_epoch
            drops = int(since // (chosen.DECAY_EPOCHS * per_epoch))  # rounded as timm's, which counts in these units
            if chosen.MILESTONES:
                drops = sum(since >= milestone * per_epoch for milestone in chosen.MILESTONES)
            return self.base * chosen.DECAY_RATE**drops
        epoch, last = time / per_epoch, settings.NUM_EPOCHS - chosen.COOLDOWN_EPOCHS
        if chosen.NAME == "wsd":
            first = max(settings.WARMUP_EPOCHS, last - chosen.DECAY_FRACTION * settings.NUM_EPOCHS)
        done = max(min((epoch - first) / max(last - first, 1e-9), 1.0), 0.0)
        left = 1 - math.sqrt(done) if chosen.NAME == "wsd" else 0.5 * (1 + math.cos(math.pi * done))
        return self.end + (self.base - self.end) * left
