"""TRAIN.BUDGET: chooses the number of updates so that the run ends on time with its learning-rate schedule complete."""

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from configs.schema import to_seconds
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.callback import Callback
from engine.train.counters import EpochResult
from engine.train.forecast import MEASURED, NOT_TYPICAL, Forecast, time_in
from engine.train.schedule import Schedule
from engine.train.trainer import Trainer
from utils.errors import ConfigError, cause_of, naming_damage
from utils.files import content_of, write_text
from utils.text import counted

MIN_UPDATES = 13  # minimum number of updates after the first choice, for the rest of the warm-up and the decay
SPARE, SPARE_PART = 1.5, 0.5  # reserve for variations: seconds, plus a fraction of the time after the last update
MAX_SPARE, MAX_SPARE_PART = 2.5, 0.025  # limit of the reserve: seconds or a fraction of the budget, whichever is larger
CHECK_AGAIN, TOLERANCE = 0.05, 0.02  # fractions of the time left: pause between checks; tolerated error of the end time
COSTS = ("update", "evaluation", "end_work", "then")  # fields of the forecast's times, as saved in a checkpoint
CHOICES_FILE = "budget.json"  # in the run's folder
MAX_BYTES = 2**20  # largest size of CHOICES_FILE


def budget_callbacks(
    session: Session, plan: TrainPlan, trainer: Trainer, forecast: Forecast, finish: Callable[[], float]
) -> list[Callback]:
    """Return the callbacks of a run with a budget, for process 0. `finish`: see Budget."""
    log, saved = session.log, plan.inputs.saved.get("budget", {})
    allowance = Allowance(plan.config.TRAIN.BUDGET, plan.inputs.loaded.started, saved)

    record = ChoiceRecord(session.path / CHOICES_FILE, forecast, allowance.clock, log.warn)
    record.write(trainer)  # also replaces the record of a start that was killed before its first save
    budget = Budget(forecast, allowance, saved, finish, log.say, log.note, lambda: record.longest)
    trainer.parts["budget"] = budget
    return [record, budget]


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
        """Parse `text`. `started`: the time on `clock` when the program started; `saved`: the state in a checkpoint."""
        self.text, self._started, self.clock, self._wall = text, started, clock, wall
        self._seconds, self._before = to_seconds(text), saved.get("used", 0.0)
        is_same = text == saved.get("text")  # a run with the same text keeps its end time, even if that time has passed
        self._end = saved.get("end") if is_same else next_time(text, wall()) if self._seconds is None else None

    def used(self) -> float:
        """Return the seconds that the run has used. Earlier starts of the program count up to their last save."""
        return self._before + self.clock() - self._started

    def left(self) -> float:
        return self._seconds - self.used() if self._end is None else self._end - self._wall()

    def state(self) -> dict[str, Any]:
        return {"text": self.text, "used": self.used(), "end": self._end}


def next_time(text: str, now: float) -> float:
    """Return the next time after `now` when a clock shows `text`, such as 07:00, in seconds since 1970."""
    hour, minute = map(int, text.split(":"))
    here = datetime.fromtimestamp(now)
    today = here.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (today if today > here else today + timedelta(days=1)).timestamp()


class Budget(Callback):
    """Chooses the number of updates from the run's forecast, in process 0. The forecast must be an earlier callback."""

    def __init__(
        self,
        forecast: Forecast,
        allowance: Allowance,
        saved: dict[str, Any] | None = None,
        finish: Callable[[], float] = lambda: 0.0,
        say: Callable[[str], None] = print,
        note: Callable[[str], None] = print,
        longest_write: Callable[[], float] = lambda: 0.0,
    ):
        """Restore the forecast from `saved`.

        `finish`: a function that does the work after the last evaluation of a run and returns its duration in seconds;
        `say`, `note`: methods of the log; `longest_write`: a function that returns how many seconds the slowest
        write of a choice took.
        """
        self._longest_write = longest_write
        self.forecast, self.times, self.allowance = forecast, forecast.times, allowance
        self._finish, self._say, self._note = finish, say, note
        self._clock, self.refusal = allowance.clock, None
        self._began = self._next_check = 0.0
        for name in COSTS if saved else ():
            setattr(self.times, name, saved[name])

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.allowance.state() | {name: getattr(self.times, name) for name in COSTS}

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._began = self._began or self._clock()

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        """After the first evaluation, do the end-of-run work once, to measure how long it takes."""
        if result.images is not None and not self.times.then:
            start, self.times.then = self._clock(), self.times.update
            self.times.end_work = self._finish()
            self.forecast.leave_out(self._clock() - start)

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        return self.refusal is not None

    def choose(self, trainer: Trainer) -> int:
        now, left, times, schedule = self._clock(), self.allowance.left(), self.times, trainer.schedule
        has_choice = schedule.choices or schedule.to_repeat
        # A resumed run keeps its choice until it has measured its speed on this machine.
        until_measured = (NOT_TYPICAL + MEASURED) * times.update if has_choice else 0.0
        can_wait = not self.forecast.is_measured and left > until_measured + times.after_last_update() + self._spare()
        if now < self._next_check or can_wait or not times.update:
            return 0
        step = trainer.step + (trainer.process.world_size > 1)  # several processes use the choice one update later
        if not has_choice:
            try:
                self.refuse_too_short(step, trainer.step > NOT_TYPICAL)
            except ConfigError as error:
                self.refusal = error
                return 0
        self._next_check = now + min(CHECK_AGAIN * max(left, 0.0), now - self._began)
        num_updates = self.fitting(step)
        if self._stays(schedule, step, num_updates, left):
            return 0
        self._say(f"budget {self.describe(step, num_updates)}")
        self._say = self._note  # later corrections go only to log.txt
        return num_updates

    def _stays(self, schedule: Schedule, step: int, fitting: int, left: float) -> bool:
        """Return whether the run keeps its number of updates, although it has time for `fitting` updates."""
        if schedule.to_repeat:
            # The run repeats its recorded choices, even on a faster machine. If the time left is enough for less than half
            # of the updates after a choice, the run chooses again, so that the learning rate has time to decay.
            chosen_at, chosen = schedule.to_repeat[0]
            return fitting >= (chosen_at + chosen) / 2
        if not schedule.choices:
            return False
        times = self.times
        missed = times.until_end(step, fitting) - times.until_end(step, schedule.num_updates)
        tolerated = max(TOLERANCE * (left - times.after_last_update()), self._longest_write())
        return not missed or abs(missed) <= tolerated

    def fitting(self, step: int) -> int:
        """Return the number of updates of the longest run that ends on time with a reserve, at least `step` + 1."""
        target = self.allowance.left() - self._spare() - self._longest_write()
        ends = range(step + 2, self.times.most_updates + 1)
        return step + 1 + bisect_right(ends, target, key=lambda end: self.times.until_end(step, end))

    def _spare(self) -> float:
        most = max(MAX_SPARE, MAX_SPARE_PART * (self.allowance.used() + self.allowance.left()))
        return min(SPARE + SPARE_PART * self.times.after_last_update(), most)

    def _need(self, step: int, chosen: int) -> float:
        """Return the seconds that a run needs from `step` on if it makes its first choice at step `chosen`."""
        return self.times.until_end(step, min(chosen + MIN_UPDATES, self.times.most_updates)) + self._spare()

    def refuse_too_short(self, step: int, is_typical: bool = True) -> None:
        """Raise ConfigError if the time left is too short. `is_typical`: whether the measured times are typical."""
        if self.allowance.left() < self._need(step, step):
            chosen = max(step, NOT_TYPICAL + MEASURED) if is_typical else step
            shortest = math.ceil(self.allowance.used() + self._need(step, chosen))
            fits = f"{shortest}s" if shortest < 120 else f"{math.ceil(shortest / 60)}m"
            raise ConfigError(
                f"TRAIN.BUDGET (-budget) is {self.allowance.text}, too short for the warm-up and decay of the learning "
                f"rate; set it to about {fits} or more"
            )

    def describe(self, step: int, num_updates: int) -> str:
        """Return a description of a run with this number of updates, and when it ends."""
        times, per_epoch, every = self.times, self.times.order.steps_per_epoch, self.times.validate_freq
        number = num_updates / per_epoch
        how_many = f"about {number:.{0 if number >= 10 else 1}f} epochs"
        if num_updates == times.most_updates:
            how_many = f"enough for all {counted(round(number), 'epoch')}"
        often = "each evaluated" if every == 1 else f"evaluated every {every}"
        end = time_in(times.until_end(step, num_updates))
        return f"{self.allowance.text}: {how_many} of {per_epoch * times.update:.3g} s, {often}; ends {end}"


class ChoiceRecord(Callback):
    """Writes each chosen number of updates to the run's folder before it takes effect. A resumed run repeats the choices.

    Used only in process 0. A checkpoint contains only the choices made before it; this file contains later ones too.
    Rejected: saving a checkpoint for each choice, because training would wait until a large model is saved.
    """

    def __init__(self, path: Path, forecast: Forecast, clock: Callable[[], float], warn: Callable[[str], None]):
        self._path, self._forecast, self._clock, self._warn = path, forecast, clock, warn
        self.longest = 0.0  # seconds of the longest write

    def on_choice(self, trainer: Trainer) -> None:
        self._forecast.leave_out(self.write(trainer))

    def write(self, trainer: Trainer) -> float:
        """Write all choices to the file. Return the seconds that this took.

        If writing fails, the run uses the choice anyway, because otherwise it would end too late.
        """
        start = self._clock()
        self._attempt(trainer)
        seconds = self._clock() - start
        self.longest = max(self.longest, seconds)
        return seconds

    def _attempt(self, trainer: Trainer) -> None:
        schedule = trainer.schedule
        content = basis_of(trainer) | {"choices": schedule.choices + schedule.to_repeat}
        try:
            write_text(self._path, json.dumps(content) + "\n")
        except OSError as error:
            self._warn(
                f"cannot write {self._path} ({cause_of(error)}); training continues, but if the run is killed before "
                "its next save, it chooses its number of updates anew"
            )


def basis_of(trainer: Trainer) -> dict[str, Any]:
    """Return the facts that a choice depends on. If any of them differs, a run does not repeat the choice."""
    data = trainer.data
    return {
        "budget": trainer.config.TRAIN.BUDGET,
        "epochs": trainer.config.TRAIN.NUM_EPOCHS,
        "images": data.order.num_images,
        "images_per_update": data.global_batch,
        "updates_per_epoch": data.steps_per_epoch,
        # A rollback extends this list, so that discarded choices are not repeated.
        "left_out": [[each.start, each.stop] for each in trainer.left_out],
    }


def repeat_choices(path: Path, trainer: Trainer) -> list[str]:
    """Make a resumed run repeat the choices that it made after its checkpoint, from `path`. Return lines for the log.

    Collective. Each process then repeats each choice at its recorded step; a vote would delay it by one update.
    """
    trainer.schedule.to_repeat, lines = trainer.process.first(lambda: later_choices(path, trainer))
    return lines


def later_choices(path: Path, trainer: Trainer) -> tuple[list[list[int]], list[str]]:
    """Return the choices in the file from the current step on, if they belong to this run, and lines for the log."""
    otherwise = "the budget chooses anew"
    try:
        with naming_damage(path):
            recorded = json.loads(content_of(path, MAX_BYTES))
            choices = recorded.pop("choices")
            later = [each for each in choices if each[0] >= trainer.step]
            recorded["choices_before"] = [each for each in choices if each[0] < trainer.step]
            here = basis_of(trainer) | {"choices_before": trainer.schedule.choices}
            different = [name for name, value in here.items() if recorded.get(name) != value]
            if not different:
                check_choices(choices, trainer.config.TRAIN.NUM_EPOCHS * trainer.data.steps_per_epoch)
    except FileNotFoundError:  # no record, for example because the checkpoint is in another folder
        return [], []
    except ConfigError as error:
        return [], [f"resume: {error}; {otherwise}"]
    except OSError as error:
        return [], [f"resume: cannot read {path} ({cause_of(error)}); {otherwise}"]
    if not later:
        return [], []
    if different:
        names = ", ".join(different).replace("_", " ")
        return [], [f"resume: the choices in {path} are not repeated, because these differ: {names}; {otherwise}"]
    found = counted(len(later), "choice")
    return later, [f"resume: repeats {found} of the budget, from step {later[0][0]:,} on ({path})"]


def check_choices(choices: list[list[int]], of_settings: int) -> None:
    """Raise ValueError if no run can have made these choices. `of_settings`: the number of updates without a budget."""
    last, num_updates = -1, of_settings
    for step, chosen in choices:
        is_possible = last < step < num_updates and step < chosen <= of_settings
        if {type(step), type(chosen)} != {int} or not is_possible:
            raise ValueError(f"no run can have chosen {chosen} updates at step {step}")
        last, num_updates = step, chosen
