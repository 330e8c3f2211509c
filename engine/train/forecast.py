"""How long a run has still to go."""

import math
import time
from collections import deque
from collections.abc import Callable

from configs.schema import Config, to_seconds
from datasets.batch_order import Order
from engine.evaluation.scores import Scores
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.text import counted, format_duration

NOT_TYPICAL, MEASURED = 3, 10  # first updates of a start, which are slower; those that are needed to know their time
MARKS = 200  # places in the past, as long as what is left, between which updates are timed
END_BY_START = 1 / 3  # what follows the last evaluation, by the time until the first update, until it was measured
ENOUGH = 10.0  # seconds of training by which the whole run is judged


class Forecast(Callback):
    """Tells the time that is left, by what updates, evaluations and the end take.

    An update takes what those in the past took, as long ago as the end lies ahead: what came and went then may do so again.
    An evaluation that nobody saw is taken for a forward of its images, a third of a training step.
    """

    def __init__(
        self,
        config: Config,
        order: Order,
        num_evaluated: int,
        start: float,
        longest_save: Callable[[], float] = lambda: 0.0,
        beat: Callable[..., None] = dict,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`num_evaluated`: validation images. `start`: of the program. `beat`: takes after each report how far the training is."""
        self.order, self._start, self._longest_save = order, start, longest_save
        self._beat, self._say, self._clock = beat, say, clock
        self._evaluated = num_evaluated * order.steps_per_epoch / order.num_images / 3  # in updates
        self._evaluated *= 1 + config.TRAIN.MODEL_EMA
        self.validate_freq, self._max_time = config.VALIDATE_FREQ, config.START.MAX_TIME
        self._is_told = config.TRAIN.BUDGET is not None  # which tells it
        self.of_settings = config.TRAIN.NUM_EPOCHS * order.steps_per_epoch  # updates; no run has more
        self.until_first = 0.0  # seconds; for a run that has not begun
        # Seconds, 0 until they were measured: of an update, of an evaluation, of pictures, tables and report after the last
        # one, and of an update when that was measured.
        self.update = self.evaluation = self.end_work = self.then = 0.0
        self._begin()

    def _begin(self) -> None:
        self._first: int | None = None  # step of this start's first update
        self.is_measured = False  # in this start
        self._marks: deque[tuple[float, int]] = deque()  # seconds of training, and the step then
        self._trained = self._paused = 0.0  # when the last update of an epoch was done; seconds of all evaluations

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        self.evaluation = seconds

    def on_epoch_start(self, trainer: Trainer) -> None:
        now = self._clock()
        if self._first is None:
            self._first, self._is_known = trainer.step, self.update > 0  # from an earlier start
            self._marks.append((now, trainer.step))
            self.end_work = self.end_work or END_BY_START * (now - self._start)
        if self._trained:
            took = now - self._trained
            self.evaluation = (took + (self.evaluation or took)) / 2
            self._paused += took

    def on_update(self, trainer: Trainer) -> None:
        now, step, marks = self._clock() - self._paused, trainer.step, self._marks
        left = self.seconds(step, trainer.schedule.num_updates)
        while len(marks) > 1 and step - marks[1][1] >= MEASURED and now - marks[1][0] > left:
            marks.popleft()
        count = step - marks[0][1]
        self.is_measured = self.is_measured or count >= MEASURED
        if self.is_measured or not self._is_known:
            self.update = (now - marks[0][0]) / count
        if step - self._first in (1, NOT_TYPICAL):
            marks.clear()
        if not marks or now - marks[-1][0] > left / MARKS:
            marks.append((now, step))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._trained = self._clock()
        left = self.left(trainer, trainer.epoch)
        position = {"epoch": trainer.epoch, "step": trainer.step}
        self._beat(position=position, eta_seconds=None if left is None else round(left))
        if left is not None and not self._is_told and self._trained - self._paused - self._marks[0][0] >= ENOUGH:
            self._is_told = True
            self._say(f"time: {self.describe(trainer.step, left)}")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        self.evaluation = self.evaluation or result.evaluation_seconds
        self._trained *= bool(result.scores)  # what lies between two epochs without an evaluation counts as training

    def on_rollback(self, trainer: Trainer) -> None:
        self._begin()

    def leave_out(self, seconds: float) -> None:
        """Count this time neither as training nor as evaluation."""
        self._paused, self._trained = self._paused + seconds, self._trained + seconds

    def left(self, trainer: Trainer, num_done: int) -> float | None:
        """Seconds to the end of the run, after so many epochs with their evaluations; None before the second update."""
        if self._first is None or trainer.step < self._first + 2:
            return None
        return self.seconds(trainer.step, trainer.schedule.num_updates, num_done)

    def seconds(self, step: int, num_updates: int, num_done: int | None = None) -> float:
        """From this step to the end of a run of so many updates, of which so many epochs are evaluated: None, all before it."""
        per_epoch, every = self.order.steps_per_epoch, self.validate_freq
        num_done = step // per_epoch if num_done is None else num_done
        before_last = math.ceil(num_updates / per_epoch) - 1  # epochs
        num_evaluations = before_last // every - num_done // every if num_done <= before_last else -1
        training = self.until_first + (num_updates - step) * self.update
        return training + num_evaluations * self.one_evaluation() + self.after_last_update()

    def one_evaluation(self) -> float:
        return self.evaluation or self._evaluated * self.update

    def after_last_update(self) -> float:
        # Where updates have become slower, so may the processor; or only the device or the disk has.
        slower = max(1.0, self.update / self.then) if self.then else 1.0
        return self.one_evaluation() + self._longest_save() + self.end_work * (1 + slower) / 2

    def describe(self, step: int, left: float) -> str:
        """How long the run still takes, when that is over, and how far it gets before RUN.MAX_TIME."""
        short = f"{math.ceil(left)} s" if left < 100 else f"{left / 60:.0f} min"
        text = f"about {short if left < 3600 else format_duration(left)}, until {time_in(left)}"
        allowed = self._start + to_seconds(self._max_time) - self._clock() if self._max_time else math.inf
        if left <= allowed:
            return text
        per_epoch, limit = self.order.steps_per_epoch, f"RUN.MAX_TIME, {self._max_time}, ends this start before that"
        reached = (step + (self.of_settings - step) * max(allowed, 0) / left) / per_epoch
        return f"{text}; {limit}, after about {reached:.1f} of {counted(self.of_settings // per_epoch, 'epoch')}"


def time_in(seconds: float) -> str:
    """The time of day in so many seconds, with the date where that may be another one."""
    clock = "%H:%M:%S" if seconds < 600 else "%H:%M" if seconds < 20 * 3600 else "%Y-%m-%d %H:%M"
    return time.strftime(clock, time.localtime(time.time() + seconds))
