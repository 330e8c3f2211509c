"""The learning rate as a function of the step (TRAIN.LR_SCHEDULER.NAME, TRAIN.WARMUP_EPOCHS, TRAIN.NUM_EPOCHS)."""

import math

from configs.schema import Train
from utils.errors import ensure


def batch_factor(settings: Train, global_batch: int) -> float:
    """Return the factor that TRAIN.LINEAR_SCALED_LR and TRAIN.LR_SCALING give to the three learning rates."""
    if not settings.LINEAR_SCALED_LR:
        return 1.0
    ratio = global_batch / settings.LINEAR_SCALED_LR
    return math.sqrt(ratio) if settings.LR_SCALING == "sqrt" else ratio


class Schedule:
    """The learning rate as a function of the step and of the total number of updates.

    A budget (TRAIN.BUDGET) chooses the total during a run. Each later update is mapped to a place in the schedule of
    NUM_EPOCHS and gets the rate at that place. The last update is always mapped to the end, so the schedule completes.
    From the last update before the choice to the end, the places are evenly spaced, so the rate does not jump. The rest
    of the schedule is shortened in proportion, including the warm-up. Rejected: a warm-up with the number of updates in
    the settings, which a short run would never finish.
    """

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        self._of_settings = settings.NUM_EPOCHS * steps_per_epoch  # the number of updates without a budget
        self.resume([])
        scale = batch_factor(settings, global_batch)
        rates = settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR
        self.start, self.base, self.end = (rate * scale for rate in rates)

    @property
    def num_epochs(self) -> int:
        """Return the number of epochs. The last one may be shorter."""
        return math.ceil(self.num_updates / self._steps_per_epoch)

    def end_of(self, epoch: int) -> int:
        """Return the step after the last step of this epoch."""
        return min((epoch + 1) * self._steps_per_epoch, self.num_updates)

    def choose(self, step: int, num_updates: int) -> None:
        """Set the total number of updates. The update at `step` is the first one that uses it."""
        ensure(num_updates > step, f"a run of {num_updates} updates cannot contain update {step}")
        self._anchor = step - 1, self._place(step - 1)
        self.choices.append([step, num_updates])
        self.num_updates = num_updates

    def resume(self, choices: list[list[int]]) -> None:
        """Apply the choices in a checkpoint, as [[step, number of updates], ...]. The rates stay exactly the same."""
        self.choices: list[list[int]] = []
        self._anchor = -1, -1.0
        self.num_updates = self._of_settings
        for step, num_updates in choices:
            self.choose(step, num_updates)
        self.num_updates = min(self.num_updates, self._of_settings)  # NUM_EPOCHS may be lower after a resume

    def _place(self, step: int) -> float:
        """Map a step to a place in the schedule of NUM_EPOCHS. If the total never changed, that is the step itself."""
        if not self.choices:
            return step
        (first, place), last = self._anchor, self._of_settings - 1
        # Computed from the end, so that the last place is exact. With an unchanged total, all places are exact.
        return last - (last - place) * (self.num_updates - 1 - step) / (self.num_updates - 1 - first)

    def __call__(self, step: int) -> float:
        settings, step = self._settings, self._place(step)
        time, per_epoch = step, self._steps_per_epoch
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # the rate changes once per epoch; epochs are counted from 1
            time, per_epoch = step // self._steps_per_epoch + 1, 1
        elif settings.LR_SCHEDULER.PER_EPOCH:
            time, per_epoch = step // self._steps_per_epoch, 1
        epoch = time / per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(time, per_epoch)

    def _after_warmup(self, time: float, per_epoch: int) -> float:
        """Return the rate at `time`, in steps or epochs. `per_epoch` is the length of an epoch in the same unit."""
        settings, chosen = self._settings, self._settings.LR_SCHEDULER
        if chosen.NAME == "constant":
            return self.base
        first = settings.WARMUP_EPOCHS if chosen.AFTER_WARMUP else 0
        if chosen.NAME == "step":
            since = time - first * per_epoch
            drops = int(since // (chosen.DECAY_EPOCHS * per_epoch))  # in timm's units, so that the rounding is the same
            if chosen.MILESTONES:
                drops = sum(since >= milestone * per_epoch for milestone in chosen.MILESTONES)
            return self.base * chosen.DECAY_RATE**drops  # TRAIN.LR_SCHEDULER.DECAY_RATE
        epoch, last = time / per_epoch, settings.NUM_EPOCHS - chosen.COOLDOWN_EPOCHS
        if chosen.NAME == "wsd":  # it falls in the last TRAIN.LR_SCHEDULER.DECAY_FRACTION of the run
            first = max(settings.WARMUP_EPOCHS, last - chosen.DECAY_FRACTION * settings.NUM_EPOCHS)
        done = max(min((epoch - first) / max(last - first, 1e-9), 1.0), 0.0)
        left = 1 - math.sqrt(done) if chosen.NAME == "wsd" else 0.5 * (1 + math.cos(math.pi * done))
        return self.end + (self.base - self.end) * left
