"""TRAIN.BUDGET: of how many updates a run is, so that it ends in time with its learning rate landed."""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from configs.schema import Config, to_seconds
from datasets.batch_order import Order
from engine.evaluation.scores import Scores
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
from utils.errors import ConfigError
from utils.text import counted

NOT_TYPICAL, MEASURED = 3, 10  # first updates of a process, which are slower; those by which the first choice is made
LEAST = 13  # updates that must be left then, for the warm-up and the landing
SPARE, SPARE_PART = 1.0, 0.25  # seconds, and part of what follows the last update, that are left over for what varies
LOOK_AGAIN, TOLERANCE = 0.05, 0.02  # parts of the time that is left: between two looks; by which the end may be missed
END_BY_START = 1 / 3  # what follows the last evaluation, by the time until the first update, until it was measured
MARKS = 200  # places in the past, as long as what is left, between which updates are timed


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
        self.text, self._started, self._clock, self._wall = text, started, clock, wall
        self._seconds, self._before = to_seconds(text), saved.get("used", 0.0)
        is_same = text == saved.get(
            "text"
        )  # of a resumed run; then 07:00 is the one that it began with, even if that is over
        self._end = saved.get("end") if is_same else next_time(text, wall()) if self._seconds is None else None

    def used(self) -> float:
        """Seconds in which the run was alive, up to the last save of earlier starts."""
        return self._before + self._clock() - self._started

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


@dataclass
class Costs:
    """What the parts of a run take, in seconds."""

    update: float = 0.0
    evaluated: float = 0.0  # from the last update of an epoch with evaluation to the first one of the next
    other: float = 0.0  # and of an epoch without
    end_work: float = 0.0  # after the last evaluation: pictures, tables and report


class Forecast:
    """How long updates and what lies between epochs take together."""

    def __init__(self, config: Config, order: Order, costs: Costs, longest_save: Callable[[], float] = lambda: 0.0):
        self.per_epoch, self.every, self.costs = order.steps_per_epoch, config.VALIDATE_FREQ, costs
        self.recipe = config.TRAIN.NUM_EPOCHS * self.per_epoch  # updates, at most
        self._longest_save = longest_save

    def after_last_update(self) -> float:
        return self.costs.evaluated + self._longest_save() + self.costs.end_work

    def spare(self) -> float:
        return SPARE + SPARE_PART * self.after_last_update()

    def seconds(self, step: int, num_updates: int) -> float:
        """From this step to the end of a run of so many updates."""
        first, last = step // self.per_epoch, math.ceil(num_updates / self.per_epoch) - 1  # epochs
        evaluated = last // self.every - first // self.every
        between = evaluated * self.costs.evaluated + (last - first - evaluated) * self.costs.other
        return (num_updates - step) * self.costs.update + between + self.after_last_update()

    def most_updates(self, step: int, seconds: float) -> int:
        """The updates of the longest run that ends within so many seconds; at most those of the settings' epochs."""
        return step + bisect_right(range(step + 1, self.recipe + 1), seconds, key=lambda end: self.seconds(step, end))

    def describe(self, text: str, step: int, num_updates: int) -> str:
        """What a run of so many updates is, and when it ends."""
        left = self.seconds(step, num_updates)
        hours = "%H:%M:%S" if left < 600 else "%H:%M" if left < 20 * 3600 else "%Y-%m-%d %H:%M"
        end = time.strftime(hours, time.localtime(time.time() + left))
        number, length = num_updates / self.per_epoch, self.per_epoch * self.costs.update
        often = "each evaluated" if self.every == 1 else f"evaluated every {self.every}"
        what = f"about {number:.{0 if number >= 10 else 1}f} epochs of {length:.3g} s, {often}; ends {end}"
        if num_updates == self.recipe:
            what = f"the {counted(round(number), 'epoch')} of the settings take less, {length:.3g} s each, {often}; ends {end}"
        return f"budget {text}: {what}"

    def refuse_too_short(self, text: str, used: float, step: int, left: float) -> None:
        """ConfigError where there is no time for a warm-up and a landing."""
        least = min(step + LEAST, self.recipe)
        if left < self.seconds(step, least) + self.spare():
            shortest = math.ceil(used + self.seconds(step, least) + self.spare())
            what = f"{shortest}s" if shortest < 120 else f"{math.ceil(shortest / 60)}m"
            raise ConfigError(
                f"TRAIN.BUDGET (-budget) is {text}: too short for a warm-up and a landing; the shortest that fits is about {what}"
            )


class Budget(Callback):
    """Measures what the parts of the run take, and chooses its number of updates by that; in process 0."""

    def __init__(
        self,
        forecast: Forecast,
        allowance: Allowance,
        finish: Callable[[], None],
        say: Callable[[str], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`finish`: does what the run does after its last evaluation, so that it can be measured."""
        self.forecast, self.allowance, self.refusal = forecast, allowance, None
        self._finish, self._say, self._note, self._clock = finish, say, note, clock
        self._knows_end = forecast.costs.end_work > 0  # from an earlier start of this run
        self._first: tuple[float, int] | None = None  # when this start was ready for its first update, and its step
        self._trained = 0.0  # when the last update of the epoch was done
        self._was_evaluated = False
        self._paused = 0.0  # seconds between epochs
        self._marks: deque[tuple[float, int]] = deque()  # seconds of training, and the step then
        self._next_look = 0.0
        self._is_told = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        costs = asdict(self.forecast.costs)
        return self.allowance.state() | costs | {"end_work": costs["end_work"] * self._knows_end}

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        self.forecast.costs.evaluated = seconds

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._trained = self._clock()

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        """Write what stands at the end of a run once, to see how long that takes."""
        self._was_evaluated = bool(result.scores)
        if result.images is not None and not self._knows_end:
            start, self._knows_end = self._clock(), True
            self._finish()
            self.forecast.costs.end_work = self._clock() - start
            self._trained += self.forecast.costs.end_work
            self._paused += self.forecast.costs.end_work

    def on_epoch_start(self, trainer: Trainer) -> None:
        if self._trained:
            costs, name = self.forecast.costs, "evaluated" if self._was_evaluated else "other"
            took, before = self._clock() - self._trained, getattr(costs, name)
            setattr(costs, name, (took + before) / 2 if before else took)
            self._paused += took
            self._trained = 0.0

    def on_rollback(self, trainer: Trainer) -> None:
        self._trained = 0.0
        self._marks.clear()

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        return self.refusal is not None

    def choose(self, trainer: Trainer) -> int:
        now, step, left = self._clock(), trainer.step, self.allowance.left()
        self._first = self._first or (now, step)
        costs, choices, target = self.forecast.costs, trainer.schedule.choices, left - self.forecast.spare()
        costs.end_work = costs.end_work or END_BY_START * self.allowance.used()
        is_measured = self._measure(now - self._paused, step, left)
        if now < self._next_look or (not (is_measured or choices) and (target > 0 or not costs.update)):
            return 0
        # Several processes take it over one update later.
        first = step + (trainer.process.world_size > 1)
        if not choices:
            try:
                self.forecast.refuse_too_short(self.allowance.text, self.allowance.used(), first, left)
            except ConfigError as error:
                self.refusal = error
                return 0
        self._next_look = now + min(LOOK_AGAIN * max(target, 0.0), now - self._first[0])
        num_updates = max(self.forecast.most_updates(first, target), first + 1)
        here, there = (self.forecast.seconds(step, each) for each in (trainer.schedule.num_updates, num_updates))
        if choices and (here == there or abs(here - there) <= TOLERANCE * target):
            return 0
        (self._note if self._is_told else self._say)(self.forecast.describe(self.allowance.text, step, num_updates))
        self._is_told = True
        return num_updates

    def _measure(self, trained: float, step: int, left: float) -> bool:
        """Take the time of an update from what was done in the past seconds, as many as are left: what came and went in
        them may do so again. Returns whether enough was measured in this start."""
        marks, since = self._marks, step - self._first[1]
        if since < NOT_TYPICAL:
            if since and not self.forecast.costs.update:
                self.forecast.costs.update = (trained + self._paused - self._first[0]) / since
            return False
        while len(marks) > 1 and step - marks[1][1] >= MEASURED and trained - marks[1][0] > left:
            marks.popleft()
        is_measured = bool(marks) and step - marks[0][1] >= MEASURED
        if is_measured:
            self.forecast.costs.update = (trained - marks[0][0]) / (step - marks[0][1])
        if not marks or trained - marks[-1][0] > left / MARKS:
            marks.append((trained, step))
        return is_measured
