"""The learning rate as a function of the step."""

import math

from configs.schema import Train


class Schedule:
    """The learning rate as a function of the step."""

    def __init__(self, settings: Train, steps_per_epoch: int, global_batch: int):
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        scale = global_batch / settings.LINEAR_SCALED_LR if settings.LINEAR_SCALED_LR else 1.0
        self.start, self.base, self.end = (
            rate * scale for rate in (settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR)
        )

    def __call__(self, step: int) -> float:
        settings = self._settings
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # changes once per epoch, counted from 1
            epoch = step // self._steps_per_epoch + 1
        else:
            epoch = step / self._steps_per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(epoch)

    def _after_warmup(self, epoch: float) -> float:
        settings, chosen = self._settings, self._settings.LR_SCHEDULER
        if chosen.NAME == "constant":
            return self.base
        if chosen.NAME == "step":
            drops = (
                sum(epoch >= milestone for milestone in chosen.MILESTONES)
                if chosen.MILESTONES
                else int(epoch // chosen.DECAY_EPOCHS)
            )
            return self.base * chosen.DECAY_RATE**drops
        length = max(settings.NUM_EPOCHS - settings.WARMUP_EPOCHS, 1e-9)
        done = min((epoch - settings.WARMUP_EPOCHS) / length, 1.0)
        return self.end + (self.base - self.end) * 0.5 * (1 + math.cos(math.pi * done))
