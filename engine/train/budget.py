"""TRAIN.BUDGET: chooses the number of updates so that the run ends on time with its learning-rate schedule complete."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from configs.schema import to_seconds
from datasets.order import Order
from engine.train.callback import Callback
from engine.train.forecast import MEASURED, NOT_TYPICAL, Forecast, time_in
from engine.train.schedule import Schedule
from engine.train.trainer import Trainer
from utils.errors import ConfigError, FruitlessStart
from utils.text import counted

MOST_MEASURED = 200  # updates after which the run chooses, if its epochs are longer
MIN_UPDATES = 13  # minimum number of updates after the choice, for the rest of the warm-up and the decay
RESERVE = 0.04  # fraction of the budget that the choice leaves free, because later updates may be slower
MIN_GAIN = 0.05  # a later choice saves the run, so it needs this many more updates, as a fraction of the planned ones
CHECKS = 4  # the run looks again after this part of the updates that are left
LANDING = 10  # updates in which the learning rate falls to its end if the time is nearly up long before the last update


class Allowance:
    """The time limit of a run: "8h" for all its starts together, by a monotonic clock, or "07:00" by the wall clock."""

    def __init__(
        self,
        text: str,
        started: float,
        saved: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        """Parse `text`.

        `started`: the time on `clock` from which this start counts; `saved`: the state in a checkpoint.
        """
        self.text, self._started, self._clock, self._wall = text, started, clock, wall
        self._seconds, self._before = to_seconds(text), saved.get("used", 0.0)
        is_same = text == saved.get("text")  # a run with the same text keeps its end time, even if that time has passed
        if is_same:
            self._end = saved.get("end")
        else:
            self._end = next_time(text, wall()) if self._seconds is None else None

    def used(self) -> float:
        """Return the seconds that the run has used. Earlier starts of the program count up to their last save."""
        return self._before + self._clock() - self._started

    def left(self) -> float:
        return self._seconds - self.used() if self._end is None else self._end - self._wall()

    def reserve(self) -> float:
        return RESERVE * (self.used() + self.left())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"text": self.text, "used": self.used(), "end": self._end}


def next_time(text: str, now: float) -> float:
    """Return the next time after `now` when a clock shows `text`, such as 07:00, in seconds since 1970."""
    hour, minute = map(int, text.split(":"))
    here = datetime.fromtimestamp(now)
    today = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (today if today > here else today + timedelta(days=1)).timestamp()


def fewest_updates(order: Order, most_updates: int) -> int:
    """Return the number of updates of the shortest run that a budget can choose."""
    measured = max(min(order.steps_per_epoch, MOST_MEASURED), NOT_TYPICAL + MEASURED)
    return min(measured + MIN_UPDATES, most_updates)


class Budget(Callback):
    """Chooses the number of updates of a run, so that it ends on time with its schedule complete.

    The start that chooses raises the number later if updates become faster, for example because another program has
    ended. If they become slower, it lowers the number. A resumed run lowers it only if its time would not be enough. If
    updates become so slow that the time is nearly up before the next look, the run ends after LANDING updates or fewer.
    Every process has this callback. Process 0 measures, and all processes choose before the same update. A checkpoint
    with the choice is on the disk before an update uses it, so a resumed run has the same schedule.
    """

    def __init__(
        self,
        first_step: int,
        forecast: Forecast,
        allowance: Allowance,
        say: Callable[[str], None] = print,
        save: Callable[[], None] = lambda: None,
    ):
        """`say`: a method of the log; `save`: a function that saves the run, and returns when this is on the disk."""
        self._forecast, self._times, self._allowance = forecast, forecast.times, allowance
        self._say, self._save = say, save
        self._chooses_at, self._has_chosen = self._step_of_choice(first_step), False
        # In process 0: the step at which it last asked to stop although a number of updates is chosen.
        self._asked_at = -2

    def _step_of_choice(self, first_step: int) -> int:
        """Return the step of the choice: an epoch or MOST_MEASURED updates after the first step of this start."""
        return first_step + min(self._times.order.steps_per_epoch, MOST_MEASURED)

    def on_rollback(self, trainer: Trainer) -> None:
        self._chooses_at = self._step_of_choice(trainer.step)

    def before_update(self, trainer: Trainer) -> None:
        schedule, step = trainer.schedule, trainer.step
        if step < self._chooses_at or not self._forecast.is_measured:
            return
        if schedule.choices and not self._times.evaluation:  # a resumed run waits for its first evaluation
            return
        self._has_chosen = self._has_chosen or not schedule.choices
        choose = partial(self._adjusted, step, schedule) if schedule.choices else partial(self.fitting, step)
        num_updates = trainer.process.first(choose)
        self._chooses_at = step + max(MEASURED, (num_updates - step) // CHECKS)
        self._apply(trainer, num_updates)

    def _apply(self, trainer: Trainer, num_updates: int) -> None:
        """Let the run have this number of updates, and save the choice if it is new."""
        schedule = trainer.schedule
        if not schedule.choices or num_updates != schedule.num_updates:
            if trainer.process.is_first:
                self._say(f"budget {self.describe(trainer.step, num_updates)}")
            schedule.choose(trainer.step, num_updates)
            self._save()

    def _adjusted(self, step: int, schedule: Schedule) -> int:
        """Return the planned number of updates, or one that fits better: a much higher or a lower one."""
        longest, first, planned = self._longest(step), schedule.choices[0][1], schedule.num_updates
        if self._has_chosen and longest > (1 + MIN_GAIN) * planned:
            return longest
        # A raised number must leave half of the reserve. The first choice counts until a quarter is not left.
        is_raised = self._has_chosen and planned > first
        if self._fits(step, planned, self._allowance.reserve() / (2 if is_raised else 4)):
            return planned
        if self._fits(step, first, self._allowance.reserve() / 4):
            longest = max(longest, first)
        return min(planned, max(longest, step + 1))

    def _fits(self, step: int, num_updates: int, margin: float) -> bool:
        return self._times.until_end(step, num_updates) + margin <= self._allowance.left()

    def shortens_run(self, trainer: Trainer) -> bool:
        """End the run with a complete schedule after the updates that still fit. Return False if none does."""
        # Several processes act on a vote one update later. Otherwise another callback has asked.
        num_updates = trainer.process.first(lambda: self._landing(trainer) if trainer.step <= self._asked_at + 1 else 0)
        if num_updates <= trainer.step:
            return False
        self._apply(trainer, num_updates)
        return True

    def _landing(self, trainer: Trainer) -> int:
        """Return the number of updates of the longest run, if updates stay as slow as the newest ones."""
        if not self._forecast.is_measured:
            return 0
        left = self._allowance.left() - self._time_of_end() - self._times.longest_save()
        return min(trainer.step + int(left / self._forecast.slowest_update), trainer.schedule.num_updates)

    def _time_of_end(self) -> float:
        """Return the seconds that a run needs after its last update, and a quarter of the reserve."""
        return self._times.evaluation + self._times.after_last_evaluation() + self._allowance.reserve() / 4

    def fitting(self, step: int) -> int:
        """Return the number of updates of the longest run that ends on time, with the reserve left free.

        Raise ConfigError if it has fewer than MIN_UPDATES updates after the choice.
        """
        num_updates = self._longest(step)
        if num_updates < self._fewest(step):
            raise self._too_short(step)
        return num_updates

    def _longest(self, step: int) -> int:
        most, target = self._times.most_updates, self._allowance.left() - self._allowance.reserve()
        ends = range(step + 1, most + 1)
        return step + bisect_right(ends, target, key=lambda end: self._times.until_end(step, end))

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        """Return whether the time is too short for the last updates and the end of the run, as far as it is measured.

        Before the choice, also return True if the shortest run does not fit, so that the user need not wait for it.
        """
        if not trainer.process.is_first:
            return False
        step, has_chosen = trainer.step, bool(trainer.schedule.choices)
        needed = self._allowance.reserve() / 4
        if self._forecast.is_measured:
            # Before the choice, two updates must fit, because several processes stop one update later.
            updates = min(LANDING, trainer.schedule.num_updates - step) if has_chosen else 2
            needed = self._time_of_end() + updates * self._forecast.slowest_update
            if not has_chosen:  # without the reserve: the first measurements are less certain than those at the choice
                needed = max(needed, self._times.until_end(step, self._fewest(step)))
        if self._allowance.left() > needed:
            return False
        if has_chosen:
            self._asked_at = step
        else:
            self.refusal = self._too_short(step)
        return True

    def _fewest(self, step: int) -> int:
        """Return the smallest number of updates of a run that is at this step."""
        return min(max(step, self._chooses_at) + MIN_UPDATES, self._times.most_updates)

    def _too_short(self, step: int) -> ConfigError:
        seconds = self._allowance.used() + self._times.until_end(step, self._fewest(step))
        shortest = math.ceil(seconds / (1 - RESERVE))
        fits = f"{shortest}s" if shortest < 120 else f"{math.ceil(shortest / 60)}m"
        error = FruitlessStart if step < self._times.order.steps_per_epoch else ConfigError
        return error(
            f"TRAIN.BUDGET (-budget) is {self._allowance.text}, too short for the warm-up and decay of the learning "
            f"rate; set it to about {fits} or more"
        )

    def describe(self, step: int, num_updates: int) -> str:
        """Return a description of a run with this number of updates, and when it ends."""
        times, per_epoch, interval = self._times, self._times.order.steps_per_epoch, self._times.validate_freq
        number = num_updates / per_epoch
        how_many = f"about {number:.{0 if number >= 10 else 1}f} epochs"
        if num_updates == times.most_updates:
            how_many = f"enough for all {counted(round(number), 'epoch')}"
        often = "each evaluated" if interval == 1 else f"evaluated every {interval}"
        end = time_in(times.until_end(step, num_updates))
        return f"{self._allowance.text}: {how_many} of {per_epoch * times.update:.3g} s, {often}; ends {end}"
