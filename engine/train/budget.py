"""TRAIN.BUDGET: of how many updates a run is, so that it ends in time with its learning rate landed."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from configs.schema import to_seconds
from engine.train.counters import EpochResult
from engine.train.forecast import MEASURED, NOT_TYPICAL, Forecast, time_in
from engine.train.trainer import Callback, Trainer
from utils.errors import ConfigError
from utils.text import counted

LEAST = 13  # updates after the first choice, for the rest of the warm-up and the landing
SPARE, SPARE_PART = 1.5, 0.5  # seconds, and part of what follows the last update, that are left over for what varies
MOST, MOST_PART = 2.5, 0.025  # seconds, or part of the budget, that are left over at most
LOOK_AGAIN, TOLERANCE = 0.05, 0.02  # parts of the time that is left: between two looks; by which the end may be missed
COSTS = ("update", "evaluation", "end_work", "then")  # that a checkpoint holds


class Allowance:
    """How long the run may take: "8h" over all its starts, by a clock that nobody sets; until "07:00", by the one on the wall."""

    def __init__(
        self,
        text: str,
        started: float,
        saved: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        """`started`: of the program, by `clock`. `saved`: what a checkpoint holds of it."""
        self.text, self._started, self.clock, self._wall = text, started, clock, wall
        self._seconds, self._before = to_seconds(text), saved.get("used", 0.0)
        is_same = text == saved.get("text")  # then 07:00 is the one that the run began with, even if that is over
        self._end = saved.get("end") if is_same else next_time(text, wall()) if self._seconds is None else None

    def used(self) -> float:
        """Seconds in which the run was alive; of earlier starts up to the last save."""
        return self._before + self.clock() - self._started

    def left(self) -> float:
        return self._seconds - self.used() if self._end is None else self._end - self._wall()

    def state(self) -> dict[str, Any]:
        return {"text": self.text, "used": self.used(), "end": self._end}


def next_time(text: str, now: float) -> float:
    """The next time of day such as 07:00 after `now`, in seconds since 1970."""
    hour, minute = map(int, text.split(":"))
    here = datetime.fromtimestamp(now)
    today = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (today if today > here else today + timedelta(days=1)).timestamp()


class Budget(Callback):
    """Chooses the number of updates by the forecast of the run, which is called before; in process 0."""

    def __init__(
        self,
        forecast: Forecast,
        allowance: Allowance,
        saved: dict[str, Any] | None = None,
        finish: Callable[[], float] = lambda: 0.0,
        say: Callable[[str], None] = print,
        note: Callable[[str], None] = print,
    ):
        """`finish`: does what the run does after its last evaluation, and returns how long that took. `say`, `note`: of the log."""
        self.forecast, self.allowance, self._finish, self._say, self._note = forecast, allowance, finish, say, note
        self._clock, self.refusal = allowance.clock, None
        self._began = self._next_look = 0.0
        for name in COSTS if saved else ():
            setattr(forecast, name, saved[name])

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return self.allowance.state() | {name: getattr(self.forecast, name) for name in COSTS}

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._began = self._began or self._clock()

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        """Write once what stands at the end of a run, to see how long that takes."""
        if result.images is not None and not self.forecast.then:
            start, self.forecast.then = self._clock(), self.forecast.update
            self.forecast.end_work = self._finish()
            self.forecast.leave_out(self._clock() - start)

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        return self.refusal is not None

    def choose(self, trainer: Trainer) -> int:
        now, left, forecast, schedule = self._clock(), self.allowance.left(), self.forecast, trainer.schedule
        # A run that goes on repeats what it did, until it knows how fast it is here.
        until_measured = (NOT_TYPICAL + MEASURED) * forecast.update if schedule.choices else 0.0
        can_wait = not forecast.is_measured and left > until_measured + forecast.after_last_update() + self._spare()
        if now < self._next_look or can_wait or not forecast.update:
            return 0
        step = trainer.step + (trainer.process.world_size > 1)  # several processes take it over one update later
        if not schedule.choices:
            try:
                self.refuse_too_short(step, trainer.step > NOT_TYPICAL)
            except ConfigError as error:
                self.refusal = error
                return 0
        self._next_look = now + min(LOOK_AGAIN * max(left, 0.0), now - self._began)
        num_updates = self.fitting(step)
        missed = forecast.seconds(step, num_updates) - forecast.seconds(step, schedule.num_updates)
        if schedule.choices and (not missed or abs(missed) <= TOLERANCE * (left - forecast.after_last_update())):
            return 0
        self._say(f"budget {self.describe(step, num_updates)}")
        self._say = self._note  # corrections are for log.txt
        return num_updates

    def fitting(self, step: int) -> int:
        """The updates of the longest run that ends in time, with some to spare; one at least from this step on."""
        target = self.allowance.left() - self._spare()
        ends = range(step + 2, self.forecast.of_settings + 1)
        return step + 1 + bisect_right(ends, target, key=lambda end: self.forecast.seconds(step, end))

    def _spare(self) -> float:
        most = max(MOST, MOST_PART * (self.allowance.used() + self.allowance.left()))
        return min(SPARE + SPARE_PART * self.forecast.after_last_update(), most)

    def _need(self, step: int, chosen: int) -> float:
        """Seconds from this step on, if the first choice is that late."""
        return self.forecast.seconds(step, min(chosen + LEAST, self.forecast.of_settings)) + self._spare()

    def refuse_too_short(self, step: int, is_typical: bool = True) -> None:
        """ConfigError where there is no time for a warm-up and a landing. `is_typical`: the update that was measured."""
        if self.allowance.left() < self._need(step, step):
            chosen = max(step, NOT_TYPICAL + MEASURED) if is_typical else step
            shortest = math.ceil(self.allowance.used() + self._need(step, chosen))
            fits = f"{shortest}s" if shortest < 120 else f"{math.ceil(shortest / 60)}m"
            raise ConfigError(
                f"TRAIN.BUDGET (-budget) is {self.allowance.text}: too short for a warm-up and a landing; the shortest that "
                f"fits is about {fits}"
            )

    def describe(self, step: int, num_updates: int) -> str:
        """What a run of so many updates is, and when it ends."""
        forecast, per_epoch, every = self.forecast, self.forecast.order.steps_per_epoch, self.forecast.validate_freq
        number = num_updates / per_epoch
        how_many = f"about {number:.{0 if number >= 10 else 1}f} epochs"
        if num_updates == forecast.of_settings:
            how_many = f"less is needed for the settings' {counted(round(number), 'epoch')}"
        often = "each evaluated" if every == 1 else f"evaluated every {every}"
        end = time_in(forecast.seconds(step, num_updates))
        return f"{self.allowance.text}: {how_many} of {per_epoch * forecast.update:.3g} s, {often}; ends {end}"
