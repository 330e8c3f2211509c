"""The learning rate as a function of the step."""

import math

from configs.schema import Train


def batch_factor(settings: Train, global_batch: int) -> float:
    """The factor of the three rates of the settings."""
    if not settings.LINEAR_SCALED_LR:
        return 1.0
    ratio = global_batch / settings.LINEAR_SCALED_LR
    return math.sqrt(ratio) if settings.LR_SCALING == "sqrt" else ratio


class Schedule:
    """The learning rate as a function of the step."""

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        scale = batch_factor(settings, global_batch)
        rates = settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR
        self.start, self.base, self.end = (rate * scale for rate in rates)

    def __call__(self, step: int) -> float:
        settings = self._settings
        time, per_epoch = step, self._steps_per_epoch
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # changes once per epoch, counted from 1
            time, per_epoch = step // self._steps_per_epoch + 1, 1
        elif settings.LR_SCHEDULER.PER_EPOCH:
            time, per_epoch = step // self._steps_per_epoch, 1
        epoch = time / per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(time, per_epoch)

    def _after_warmup(self, time: int, per_epoch: int) -> float:
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
