"""Estimates the remaining time of a run."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Config, to_seconds
from datasets.order import Order
from engine.evaluation.scores import Scores
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.text import counted, format_duration

NOT_TYPICAL, MEASURED = 3, 10  # number of slow updates after a start; number of updates needed for a measurement
MARKS = 200  # approximate number of points in time that are kept to measure updates
END_BY_START = 1 / 2  # estimate of the work after the last evaluation, as a fraction of the time until the first update
ENOUGH = 10.0  # seconds of training after which the log gets an estimate


@dataclass
class RunTimes:
    """The seconds that each part of a run takes (0: not measured yet). `until_end` adds them up from any step."""

    order: Order
    validate_freq: int  # epochs between two evaluations
    most_updates: int  # total number of updates in the settings; a budget can only lower it
    evaluation_in_updates: float  # an estimate, used until an evaluation is measured
    longest_save: Callable[[], float]
    before_first_update: float = 0.0  # only set by -check, for a run that has not started
    update: float = 0.0
    evaluation: float = 0.0
    end_work: float = 0.0  # pictures, tables and report after the last evaluation; an estimate
    evaluates: bool = True  # whether an epoch ends with an evaluation
    num_folds: int = 0  # of DATA.FOLDS: the last epoch ends with so many further runs

    @classmethod
    def of(
        cls, config: Config, order: Order, num_evaluated: int, longest_save: Callable[[], float] = lambda: 0.0
    ) -> "RunTimes":
        """Return the times of a run before anything is measured. `num_evaluated` is the number of validation images."""
        # An evaluation makes a forward pass, which takes a third of the time of a training step.
        forwards = num_evaluated * order.steps_per_epoch / order.num_images
        return cls(
            order=order,
            validate_freq=config.VALIDATE_FREQ,
            most_updates=config.TRAIN.NUM_EPOCHS * order.steps_per_epoch,
            evaluation_in_updates=forwards / 3 * (1 + config.TRAIN.MODEL_EMA),
            longest_save=longest_save,
            evaluates=num_evaluated > 0,
            num_folds=config.DATA.FOLDS or 0,
        )

    def until_end(self, step: int, num_updates: int, num_done: int | None = None) -> float:
        """Return the seconds from this step to the end of a run of `num_updates`.

        `num_done` is the number of epochs whose evaluation is done; None means all epochs before this step.
        """
        per_epoch, interval = self.order.steps_per_epoch, self.validate_freq
        num_done = step // per_epoch if num_done is None else num_done
        before_last = math.ceil(num_updates / per_epoch) - 1  # number of epochs before the last one
        num_evaluations = before_last // interval - num_done // interval if num_done <= before_last else -1
        training = self.before_first_update + (num_updates - step) * self.update
        evaluations = (num_evaluations + 1) * self.one_evaluation() + self.of_folds(num_updates)
        return training + evaluations + self.after_last_evaluation()

    def one_evaluation(self) -> float:
        """Return the seconds of an evaluation: measured, or an estimate from the updates."""
        if not self.evaluates:
            return 0.0
        return self.evaluation or self.evaluation_in_updates * self.update

    def of_folds(self, num_updates: int) -> float:
        """Return the seconds of the further runs of DATA.FOLDS. Each lacks the images of its fold."""
        if not self.num_folds:
            return 0.0
        start = self.num_folds * self.before_first_update
        return start + (self.num_folds - 1) * num_updates * self.update

    def after_last_evaluation(self) -> float:
        """Return the seconds of a save, and of the pictures, tables and report."""
        return self.longest_save() + self.end_work


class UpdateTimer:
    """Measures the mean seconds per update in this start of the program.

    The mean covers as much past time as the run has left, because the causes of slow updates may occur again.
    """

    def __init__(self, now: float, step: int):
        self.first_step, self.is_measured = step, False
        self.newest = 0.0  # mean of the newest MEASURED updates, or of up to as many before them; 0: not measured
        self._marks = deque([(now, step)])  # (seconds of training, step)
        self._newest_mark = now, step

    def measure(self, now: float, step: int, left: float) -> float:
        """Return the seconds per update. `step` includes the update just done. `left`: seconds until the run ends."""
        newest_mark, marks = self._newest_mark, self._marks
        if step - newest_mark[1] >= MEASURED:
            self.newest = (now - newest_mark[0]) / (step - newest_mark[1])
            self._newest_mark = now, step
        while len(marks) > 1 and step - marks[1][1] >= MEASURED and now - marks[1][0] > left:
            marks.popleft()
        since, first = marks[0]
        self.is_measured = self.is_measured or step - first >= MEASURED
        if step - self.first_step in (1, NOT_TYPICAL):
            marks.clear()
        if not marks or now - marks[-1][0] > left / MARKS:
            marks.append((now, step))
        return (now - since) / (step - first)

    def timed(self, now: float) -> float:
        """Return the length in seconds of the period over which updates are measured."""
        return now - self._marks[0][0]


class Forecast(Callback):
    """Measures updates and evaluations, and estimates the remaining time of the run."""

    def __init__(
        self,
        config: Config,
        times: RunTimes,
        start: float,
        beat: Callable[..., None] = dict,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`start`: the program's start time on `clock`. `beat` gets the step and the remaining time at each report."""
        self.times, self._start, self._max_time = times, start, config.RUN.MAX_TIME
        self._beat, self._say, self._clock = beat, say, clock
        self._is_said = config.TRAIN.BUDGET is not None  # a budget logs its own line
        self._begin()

    def _begin(self) -> None:
        self._timer: UpdateTimer | None = None  # None: no epoch has begun
        # _trained: time of the last report (0 after an epoch without evaluation). _paused: seconds of all evaluations.
        self._trained = self._paused = 0.0

    @property
    def is_measured(self) -> bool:
        """Return whether this start has made enough updates to measure their time."""
        return self._timer is not None and self._timer.is_measured

    @property
    def slowest_update(self) -> float:
        """Return the mean seconds of an update, or of the newest ones if they are slower. Needs `is_measured`."""
        return max(self.times.update, self._timer.newest)

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        self.times.evaluation = seconds

    def on_epoch_start(self, trainer: Trainer) -> None:
        now, times = self._clock(), self.times
        if self._timer is None:
            self._timer = UpdateTimer(now, trainer.step)
            times.end_work = times.end_work or END_BY_START * (now - self._start)
        if self._trained:
            took = now - self._trained
            # The first end of an epoch replaces the evaluation of the initial weights, which is cold and saves nothing.
            times.evaluation = (took + times.evaluation) / 2 if self._paused else took
            self._paused += took

    def on_update(self, trainer: Trainer) -> None:
        left = self.times.until_end(trainer.step, trainer.schedule.num_updates)
        self.times.update = self._timer.measure(self._clock() - self._paused, trainer.step, left)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._trained = self._clock()
        left = self.left(trainer, trainer.epoch)
        position = {"epoch": trainer.epoch, "step": trainer.step}
        self._beat(position=position, eta_seconds=None if left is None else round(left))
        if left is not None and not self._is_said and self._timer.timed(self._trained - self._paused) >= ENOUGH:
            self._is_said = True
            self._say(f"time: {self.describe(trainer.step, left)}")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if result.scores:
            self.times.evaluation = self.times.evaluation or result.evaluation_seconds
        self._trained *= bool(result.scores)  # without an evaluation, the time between two epochs counts as training

    def on_rollback(self, trainer: Trainer) -> None:
        self._begin()

    def left(self, trainer: Trainer, num_done: int) -> float | None:
        """Return the seconds left in the run after `num_done` evaluated epochs, or None before the second update."""
        if self._timer is None or trainer.step < self._timer.first_step + 2:
            return None
        return self.times.until_end(trainer.step, trainer.schedule.num_updates, num_done)

    def describe(self, step: int, left: float) -> str:
        """Describe the remaining time, the end time, and the epoch reached if RUN.MAX_TIME ends this start earlier."""
        short = f"{math.ceil(left)} s" if left < 100 else f"{left / 60:.0f} min"
        text = f"about {short if left < 3600 else format_duration(left)}, until {time_in(left)}"
        allowed = self._start + to_seconds(self._max_time) - self._clock() if self._max_time else math.inf
        if left <= allowed:
            return text
        per_epoch, most = self.times.order.steps_per_epoch, self.times.most_updates
        reached = (step + (most - step) * max(allowed, 0) / left) / per_epoch
        limit = f"RUN.MAX_TIME, {self._max_time}, ends this start before that"
        return f"{text}; {limit}, after about {reached:.1f} of {counted(most // per_epoch, 'epoch')}"


def time_in(seconds: float) -> str:
    """Return the time of day after these seconds, with the date if it may be another day."""
    if seconds < 600:
        clock = "%H:%M:%S"
    elif seconds < 20 * 3600:
        clock = "%H:%M"
    else:
        clock = "%Y-%m-%d %H:%M"
    return time.strftime(clock, time.localtime(time.time() + seconds))
