"""TRAIN.BUDGET: of how many updates a run is, so that it ends in time with its learning rate landed."""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from configs.schema import Config, to_seconds
from datasets.batch_order import Order
from engine.evaluation.scores import Scores
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Callback, Trainer
from utils.errors import ConfigError
from utils.text import counted

NOT_TYPICAL, MEASURED = 3, 10  # first updates of a start, which are slower; those that are needed to know their time
LEAST = 13  # updates after the first choice, for the rest of the warm-up and the landing
SPARE, SPARE_PART = 1.0, 0.5  # seconds, and part of what follows the last update, that are left over for what varies
LOOK_AGAIN, TOLERANCE = 0.05, 0.02  # parts of the time that is left: between two looks; by which the end may be missed
MARKS = 200  # places in the past, as long as what is left, between which updates are timed
COSTS = ("update", "evaluation", "end_work", "then")  # that a checkpoint holds
END_BY_START = 1 / 3  # what follows the last evaluation, by the time until the first update, until it was measured


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


@dataclass
class Forecast:
    """How long a run takes, by what its parts take: seconds, 0 until they were measured."""

    config: Config
    order: Order
    longest_save: Callable[[], float] = lambda: 0.0
    update: float = 0.0
    evaluation: float = (
        0.0  # from the last update of an epoch to the first of the next; without one that counts as training
    )
    end_work: float = 0.0  # after the last evaluation: pictures, tables and report
    then: float = 0.0  # what an update took when that was measured

    @property
    def of_settings(self) -> int:
        """The updates of the settings' own epochs: no run has more."""
        return self.config.TRAIN.NUM_EPOCHS * self.order.steps_per_epoch

    def after_last_update(self) -> float:
        # Where updates have become slower, so may the processor; or only the device or the disk has.
        slower = max(1.0, self.update / self.then) if self.then else 1.0
        return self.evaluation + self.longest_save() + self.end_work * (1 + slower) / 2

    def seconds(self, step: int, num_updates: int) -> float:
        """From this step to the end of a run of so many updates."""
        per_epoch, every = self.order.steps_per_epoch, self.config.VALIDATE_FREQ
        before_last = math.ceil(num_updates / per_epoch) - 1  # epochs
        num_evaluations = before_last // every - step // per_epoch // every
        return (num_updates - step) * self.update + num_evaluations * self.evaluation + self.after_last_update()

    def choose(self, step: int, left: float) -> int:
        """The updates of the longest run that ends within so many seconds with some to spare; one at least from this step on."""
        target = left - self.spare()
        ends = range(step + 2, self.of_settings + 1)
        return step + 1 + bisect_right(ends, target, key=lambda end: self.seconds(step, end))

    def spare(self) -> float:
        return SPARE + SPARE_PART * self.after_last_update()

    def refuse_too_short(self, allowance: Allowance, step: int) -> None:
        """ConfigError where there is no time for a warm-up and a landing."""
        need = self.seconds(step, min(step + LEAST, self.of_settings)) + self.spare()
        if allowance.left() < need:
            shortest = math.ceil(allowance.used() + need)
            fits = f"{shortest}s" if shortest < 120 else f"{math.ceil(shortest / 60)}m"
            raise ConfigError(
                f"TRAIN.BUDGET (-budget) is {allowance.text}: too short for a warm-up and a landing; the shortest that fits is "
                f"about {fits}"
            )

    def describe(self, text: str, step: int, num_updates: int) -> str:
        """What a run of so many updates is, and when it ends."""
        left, per_epoch = self.seconds(step, num_updates), self.order.steps_per_epoch
        clock = "%H:%M:%S" if left < 600 else "%H:%M" if left < 20 * 3600 else "%Y-%m-%d %H:%M"
        end = time.strftime(clock, time.localtime(time.time() + left))
        number = num_updates / per_epoch
        how_many = f"about {number:.{0 if number >= 10 else 1}f} epochs"
        if num_updates == self.of_settings:
            how_many = f"less is needed for the settings' {counted(round(number), 'epoch')}"
        often = "each evaluated" if self.config.VALIDATE_FREQ == 1 else f"evaluated every {self.config.VALIDATE_FREQ}"
        return f"{text}: {how_many} of {per_epoch * self.update:.3g} s, {often}; ends {end}"


class Budget(Callback):
    """Measures what the parts of the run take, and chooses its number of updates by that; in process 0."""

    def __init__(
        self,
        forecast: Forecast,
        allowance: Allowance,
        saved: dict[str, Any],
        finish: Callable,
        say: Callable,
        note: Callable,
    ):
        """`finish`: does what the run does after its last evaluation, and returns how long that took. `say`, `note`: of the log."""
        self.forecast, self.allowance, self._finish, self._say, self._note = forecast, allowance, finish, say, note
        self._clock, self.refusal = allowance.clock, None
        for name in COSTS:
            setattr(forecast, name, saved.get(name, 0.0))
        self._begin()

    def _begin(self) -> None:
        self._first: tuple[float, int] | None = None  # when the first update was to begin, and its step
        self._trained = self._paused = 0.0  # when the last update of an epoch was done; seconds of all evaluations
        self._marks: deque[tuple[float, int]] = deque()  # seconds of training, and the step then
        self._next_look = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return self.allowance.state() | {name: getattr(self.forecast, name) for name in COSTS}

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        self.forecast.evaluation = seconds

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._trained = self._clock()

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        """Write once what stands at the end of a run, to see how long that takes."""
        self._trained *= bool(result.scores)
        if result.images is not None and not self.forecast.then:
            start, self.forecast.then = self._clock(), self.forecast.update
            self.forecast.end_work = self._finish()
            took = self._clock() - start
            self._paused, self._trained = self._paused + took, self._trained + took

    def on_epoch_start(self, trainer: Trainer) -> None:
        if self._trained:
            took = self._clock() - self._trained
            self.forecast.evaluation = (took + (self.forecast.evaluation or took)) / 2
            self._paused += took

    def on_rollback(self, trainer: Trainer) -> None:
        self._begin()

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        return self.refusal is not None

    def choose(self, trainer: Trainer) -> int:
        now, left, forecast, schedule = self._clock(), self.allowance.left(), self.forecast, trainer.schedule
        self._first = self._first or (now, trainer.step)
        forecast.end_work = forecast.end_work or END_BY_START * self.allowance.used()
        is_measured = self._measure(now, trainer.step, left)
        # A run that goes on repeats what it did, until it knows how fast it is here.
        until_measured = (NOT_TYPICAL + MEASURED) * forecast.update if schedule.choices else 0.0
        can_wait = not is_measured and left > until_measured + forecast.after_last_update() + forecast.spare()
        if now < self._next_look or can_wait or not forecast.update:
            return 0
        step = trainer.step + (trainer.process.world_size > 1)  # several processes take it over one update later
        if not schedule.choices:
            try:
                forecast.refuse_too_short(self.allowance, step)
            except ConfigError as error:
                self.refusal = error
                return 0
        self._next_look = now + min(LOOK_AGAIN * max(left, 0.0), now - self._first[0])
        num_updates = forecast.choose(step, left)
        missed = forecast.seconds(step, num_updates) - forecast.seconds(step, schedule.num_updates)
        if schedule.choices and (not missed or abs(missed) <= TOLERANCE * (left - forecast.after_last_update())):
            return 0
        self._say(forecast.describe(f"budget {self.allowance.text}", step, num_updates))
        self._say = self._note  # corrections are for log.txt
        return num_updates

    def _measure(self, now: float, step: int, left: float) -> bool:
        """Take the time of an update from what was done in the past seconds, as many as are left: what came and went in
        them may do so again. Returns whether enough was measured in this start."""
        marks, (first, first_step), trained = self._marks, self._first, now - self._paused
        if step - first_step < NOT_TYPICAL:
            if step > first_step and not self.forecast.update:
                self.forecast.update = (now - first) / (step - first_step)
            return False
        while len(marks) > 1 and step - marks[1][1] >= MEASURED and trained - marks[1][0] > left:
            marks.popleft()
        if not marks or trained - marks[-1][0] > left / MARKS:
            marks.append((trained, step))
        if step - marks[0][1] < MEASURED:
            return False
        self.forecast.update = (trained - marks[0][0]) / (step - marks[0][1])
        return True
