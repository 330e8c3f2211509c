"""The learning rate as a function of the step; plateau's also depends on the evaluations so far."""

import math

from configs.schema import Train


def batch_factor(settings: Train, global_batch: int) -> float:
    """What the three rates of the settings are multiplied by."""
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
        self.start, self.base, self.end = (
            rate * scale for rate in (settings.WARMUP_START_LR, settings.BASE_LR, settings.END_LR)
        )
        self._waited, self._drops = 0, 0  # for plateau: evaluations since the best one, decays

    def __call__(self, step: int) -> float:
        settings = self._settings
        epoch = step / self._steps_per_epoch
        if settings.LR_SCHEDULER.NAME == "paddlevit":  # changes once per epoch, counted from 1
            epoch = step // self._steps_per_epoch + 1
        elif settings.LR_SCHEDULER.PER_EPOCH:
            epoch = step // self._steps_per_epoch
        if epoch < settings.WARMUP_EPOCHS:
            return self.start + (self.base - self.start) * epoch / settings.WARMUP_EPOCHS
        return self._after_warmup(epoch)

    def _after_warmup(self, epoch: float) -> float:
        settings, chosen = self._settings, self._settings.LR_SCHEDULER
        if chosen.NAME == "constant":
            return self.base
        if chosen.NAME == "step":
            drops = int(epoch // chosen.DECAY_EPOCHS)
            if chosen.MILESTONES:
                drops = sum(epoch >= milestone for milestone in chosen.MILESTONES)
            return self.base * chosen.DECAY_RATE**drops
        if chosen.NAME == "plateau":
            return max(self.base * chosen.DECAY_RATE**self._drops, min(self.end, self.base))
        last = settings.NUM_EPOCHS - chosen.COOLDOWN_EPOCHS
        first = settings.WARMUP_EPOCHS if chosen.AFTER_WARMUP else 0
        if chosen.NAME == "wsd":
            first = max(settings.WARMUP_EPOCHS, last - chosen.DECAY_FRACTION * settings.NUM_EPOCHS)
        done = max(min((epoch - first) / max(last - first, 1e-9), 1.0), 0.0)
        if chosen.NAME == "wsd":
            left = 1 - (math.sqrt(done) if chosen.DECAY_SHAPE == "sqrt" else done)
        else:
            left = 0.5 * (1 + math.cos(math.pi * done))
        return self.end + (self.base - self.end) * left

    def note_evaluation(self, step: int, is_best: bool) -> None:
        """For plateau: what the evaluation after `step` updates found. The same in all processes."""
        chosen = self._settings.LR_SCHEDULER
        if chosen.NAME != "plateau" or step < self._settings.WARMUP_EPOCHS * self._steps_per_epoch:
            return
        self._waited = 0 if is_best else self._waited + 1
        if self._waited > chosen.PATIENCE:
            self._waited, self._drops = 0, self._drops + 1

    def state_dict(self) -> dict[str, list[int]]:
        """Empty for those that are a function of the step."""
        return {"plateau": [self._waited, self._drops]} if self._settings.LR_SCHEDULER.NAME == "plateau" else {}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self._waited, self._drops = state.get("plateau", (0, 0))
