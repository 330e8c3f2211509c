"""TRAIN.BUDGET: a run ends on time with its schedule complete, on machines of different speed, by a simulated clock."""

import itertools
import re
import time
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace

import pytest

from configs.schema import to_seconds
from engine.callback_list import callbacks_that_save
from engine.stages import train_epoch
from engine.train.budget import MIN_UPDATES, Allowance, Budget, next_time
from engine.train.clock import Clock
from engine.train.counters import EpochResult, Report
from engine.train.forecast import MEASURED, NOT_TYPICAL, Forecast, RunTimes
from engine.train.schedule import Schedule
from engine.train.stop_conditions import Stopped, TimeLimit, why_finished
from engine.train.trainer import Trainer
from tests.support.configs import CPU, small_config
from tests.support.refusals import assert_names
from utils.errors import ConfigError, FruitlessStart

PER_EPOCH = 22
END_LR = 1e-5
ORDER = SimpleNamespace(steps_per_epoch=PER_EPOCH, num_images=64 * PER_EPOCH)
ALONE = SimpleNamespace(world_size=1, is_first=True, first=lambda task: task(), delayed_max=lambda vote: vote)
QUIET = SimpleNamespace(**dict.fromkeys(("start_bar", "move_bar", "end_bar"), lambda *_: None))
NEW = {"budget": {}, "choices": [], "epoch": 0, "step": 0}


@dataclass
class World:
    """A simulated machine: the seconds that each part takes, and the time."""

    start: float = 8.0
    update: float = 0.1
    evaluation: float = 0.3
    first_evaluation: float = 0.3
    save: float = 0.0
    end_work: float = 2.0
    now: float = 0.0
    changes_at: int = 10**9  # from this step on, updates take `then` times as long
    then: float = 1.0


class FakeTrainer:
    """The parts of a trainer that the loop over updates needs. `rates` has the learning rate of each update by step."""

    notify = Trainer.notify

    def __init__(self, config, world: World):
        self.config, self.world, self.process, self.left_out = config, world, ALONE, []
        self.schedule = Schedule(config.TRAIN, PER_EPOCH, 64)
        self.data = SimpleNamespace(steps_per_epoch=PER_EPOCH, global_batch=64, order=ORDER)
        self.epoch = self.step = 0
        self.clock = Clock.on(CPU)
        self.rates: dict[int, float] = {}

    def update(self, window) -> None:
        self.rates[self.step] = self.schedule(self.step)
        is_cold, is_later = len(self.rates) < 4, self.step >= self.world.changes_at
        self.world.now += self.world.update * (5 if is_cold else self.world.then if is_later else 1)
        self.step += 1
        self.notify("on_update")

    def report(self) -> Report:
        return Report(self.step - 1, self.epoch, *[0.0] * 9)


class Run:
    """One start of a run with a budget on a simulated machine, from the first update or from a checkpoint."""

    def __init__(self, config, world: World, saved: dict = NEW):
        self.world, self.saved, self.lines = world, saved, []
        self.trainer = trainer = FakeTrainer(config, world)
        trainer.epoch, trainer.step = saved["epoch"], saved["step"]
        trainer.schedule.resume(saved["choices"])
        clock = lambda: world.now  # noqa: E731
        times = RunTimes.of(config, ORDER, 64, lambda: world.save)
        self.forecast = forecast = Forecast(config, times, world.now, clock=clock)
        started = world.now + (0 if saved is NEW else world.start)  # see callbacks_that_save
        self.allowance = Allowance(config.TRAIN.BUDGET, started, saved["budget"], clock, clock)
        self.budget = Budget(trainer.step, forecast, self.allowance, self.lines.append, self.save_and_wait)
        trainer.callbacks = [forecast, self.budget]
        world.now += world.start
        if saved is NEW:
            world.now += world.first_evaluation
            trainer.notify("on_start_scored", None, world.first_evaluation)

    def save(self) -> None:
        trainer, choices = self.trainer, [[*each] for each in self.trainer.schedule.choices]
        self.saved = {
            "budget": self.allowance.state(),
            "choices": choices,
            "epoch": trainer.epoch,
            "step": trainer.step,
        }

    def save_and_wait(self) -> None:
        self.save()
        self.world.now += self.world.save

    def go(self, until: int = 10**9) -> "Run":
        """Train to the end of the run, or until the epoch that reaches the step `until` is saved."""
        trainer, frequency = self.trainer, self.trainer.config.VALIDATE_FREQ
        windows, stop = itertools.repeat(SimpleNamespace(num_samples=64)), SimpleNamespace(number=0)
        while not why_finished(trainer.config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, 0):
            train_epoch(trainer, windows, QUIET, stop, self.save)
            number = trainer.epoch + 1
            scores = {"": None} if number % frequency == 0 or number == trainer.schedule.num_epochs else {}
            self.world.now += self.world.evaluation if scores else 0
            trainer.notify("on_epoch_end", EpochResult(None, scores, 0, 0, 0))
            trainer.epoch += 1
            self.save()
            if trainer.step >= until:
                return self
        self.world.now += self.world.save + self.world.end_work
        return self

    @property
    def last_rate(self) -> float:
        return self.trainer.rates[max(self.trainer.rates)]


@pytest.fixture
def config(tmp_path):
    def make(budget: str, *options: str):
        usual = ["TRAIN.NUM_EPOCHS=3000", "TRAIN.WARMUP_EPOCHS=320", "TRAIN.BASE_LR=3e-3", f"TRAIN.END_LR={END_LR}"]
        return small_config(tmp_path, *usual, f"TRAIN.BUDGET={budget}", "REPORT_FREQ=10", *options)

    return make


MACHINES = {
    "even": {},
    "slow disk": {"save": 2.0},
    "long evaluation": {"evaluation": 6.0, "first_evaluation": 6.0},
    "quick updates": {"update": 0.02},
    "slow updates": {"update": 1.5},
    "slow start": {"start": 40.0, "end_work": 12.0},
}


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("name", MACHINES)
def test_run_with_budget_ends_on_time_at_final_learning_rate(config, name, frequency):
    run = Run(config("5m", f"VALIDATE_FREQ={frequency}"), World(**MACHINES[name])).go()
    assert 276 <= run.world.now <= 300, run.lines
    rates = [run.trainer.rates[step] for step in range(run.trainer.step)]
    assert run.last_rate == pytest.approx(END_LR, abs=1e-7) and max(rates) == pytest.approx(3e-3, rel=0.02)
    assert run.trainer.schedule.choices == [[PER_EPOCH, run.trainer.step]] and len(run.lines) == 1


def test_end_of_first_epoch_replaces_the_time_of_a_slow_first_evaluation(config):
    assert 276 <= Run(config("5m"), World(first_evaluation=3.0)).go().world.now <= 300


@pytest.mark.parametrize("per_epoch, step", [(2, 13), (22, 22), (1000, 200)])
def test_choice_follows_first_epoch_or_200_updates(config, monkeypatch, per_epoch, step):
    monkeypatch.setattr(ORDER, "steps_per_epoch", per_epoch)
    monkeypatch.setattr(f"{__name__}.PER_EPOCH", per_epoch)
    run = Run(config("5m"), World()).go(until=per_epoch)
    assert run.go(until=step + 1).trainer.schedule.choices[0][0] == step


@pytest.mark.parametrize("world", [World(start=1.0, update=0.1), World(start=60.0, update=0.05), World(update=0.105)])
def test_resumed_run_keeps_its_number_of_updates(config, world):
    """On machines of other speeds, as long as the time is enough. A resumed start counts from its first update."""
    first = Run(config("5m"), World()).go(until=1500)
    world.now, world.changes_at = 1e6, 0
    again = Run(config("5m"), world, first.saved).go()
    assert again.trainer.schedule.choices == first.trainer.schedule.choices and again.lines == []
    assert again.trainer.step == again.trainer.schedule.num_updates and again.last_rate == pytest.approx(
        END_LR, abs=1e-7
    )


@pytest.mark.parametrize("checkpoint, used", [(None, 100), ("last.pth", 0)])
def test_start_of_a_resumed_run_does_not_count(config, checkpoint, used):
    inputs = SimpleNamespace(checkpoint=checkpoint, saved={}, loaded=SimpleNamespace(started=time.monotonic() - 100))
    plan, trainer = SimpleNamespace(config=config("5m"), inputs=inputs), SimpleNamespace(step=0, parts={})
    forecast, session = (
        SimpleNamespace(times=SimpleNamespace(order=ORDER)),
        SimpleNamespace(log=SimpleNamespace(say=print)),
    )
    callbacks_that_save(session, plan, trainer, forecast, save=print)
    assert used <= trainer.parts["budget"].used() < used + 50


def test_fewer_epochs_after_a_resume_shorten_the_chosen_run(config):
    first = Run(config("5m"), World()).go(until=500)
    again = Run(config("5m", "TRAIN.NUM_EPOCHS=50", "TRAIN.WARMUP_EPOCHS=5"), World(), first.saved).go()
    assert again.trainer.step == 50 * PER_EPOCH and again.last_rate == pytest.approx(END_LR, abs=1e-7)


def test_run_without_choice_chooses_after_its_resume(config):
    saved = {"budget": {"text": "5m", "used": 100.0, "end": None}, "choices": [], "epoch": 3, "step": 3 * PER_EPOCH}
    run = Run(config("5m"), World(start=0.0), saved).go()
    assert run.trainer.schedule.choices == [[4 * PER_EPOCH, run.trainer.step]]
    assert 276 <= 100 + run.world.now <= 300 and run.last_rate == pytest.approx(END_LR, abs=1e-7)


def test_state_of_version_1_with_several_choices_goes_on_with_the_last(config):
    times = {"update": 0.1, "evaluation": 0.3, "end_work": 2.0, "then": 0.1}
    budget = {"text": "5m", "used": 110.0, "end": None} | times
    saved = {"budget": budget, "choices": [[13, 2100], [500, 1700], [880, 1800]], "epoch": 45, "step": 45 * PER_EPOCH}
    run = Run(config("5m"), World(), saved)
    # The rates of 1.1.0 at these steps.
    rates = {990: 0.001578200589355856, 1500: 0.0002700195740629497, 1799: END_LR}
    assert {step: run.trainer.schedule(step) for step in rates} == pytest.approx(rates, rel=1e-6)
    run.go()
    assert run.trainer.step == 1800 and run.saved["choices"] == saved["choices"]


SLOWER = [*itertools.product(["5m"], [60, 500, 1500, 2500], [1.1, 1.5, 2, 4, 10, 30, 100])]
SLOWER += itertools.product(["1m"], [60, 100], [1.5, 4, 10])


@pytest.mark.parametrize("budget, changes_at, then", SLOWER)
def test_run_that_becomes_slower_ends_on_time_at_final_learning_rate(config, budget, changes_at, then):
    run = Run(config(budget), World(changes_at=changes_at, then=then)).go()
    seconds = to_seconds(budget)
    assert 0.9 * seconds - 0.1 * then <= run.world.now <= seconds, run.trainer.schedule.choices
    assert run.budget.refusal is None and run.last_rate == pytest.approx(END_LR, abs=1e-7)
    rates = [run.trainer.rates[step] for step in range(run.trainer.step)]
    same = Schedule(run.trainer.config.TRAIN, PER_EPOCH, 64)
    same.resume(run.trainer.schedule.choices)
    assert same(run.trainer.step - 1) == rates[-1], "a checkpoint gives the same rates"
    if then <= 2:  # the rate falls evenly
        assert max(before - after for before, after in itertools.pairwise(rates)) < 3e-3 / (0.1 * len(rates))


@pytest.mark.parametrize("then", [1.1, 1.5, 4, 30])
def test_run_resumed_on_a_slower_machine_ends_on_time_at_final_learning_rate(config, then):
    first = Run(config("5m"), World()).go(until=1000)
    run = Run(config("5m"), World(update=0.1 * then), first.saved).go()
    assert 270 <= run.saved["budget"]["used"] <= 300 and run.last_rate == pytest.approx(END_LR, abs=1e-7)
    assert run.trainer.step < first.trainer.schedule.num_updates


def test_run_stops_if_not_even_one_more_update_fits(config):
    run = Run(config("40s"), World(changes_at=100, then=100))
    with pytest.raises(Stopped):
        run.go()
    assert run.budget.refusal is None and run.world.now <= 40 + 10, "a single update takes 10 s"


def test_time_limit_stops_a_run_although_its_budget_is_not_used_up(config):
    run = Run(config("5m"), World())
    limit = TimeLimit(60, 0.0, run.forecast.times, lambda: run.world.now)
    run.trainer.callbacks.append(limit)
    with pytest.raises(Stopped):
        run.go()
    assert run.world.now < 60 and len(run.trainer.schedule.choices) == 1


@pytest.mark.parametrize("changes_at, then", [(30, 0.5), (200, 0.25), (900, 0.5), (1200, 0.5)])
def test_run_that_becomes_faster_is_made_longer(config, changes_at, then):
    """The rate has no jump, and a checkpoint gives the same rates."""
    run = Run(config("5m"), World(update=0.2, changes_at=changes_at, then=then)).go(until=1250)
    saved = run.saved
    again = Run(config("5m"), World(update=0.2 * then), saved).go()
    assert 260 <= run.go().world.now <= 300, run.lines
    choices, rates = run.trainer.schedule.choices, [run.trainer.rates[step] for step in range(run.trainer.step)]
    assert len(run.lines) == len(choices) > 1 and choices == sorted(choices, key=lambda choice: choice[1])
    assert run.last_rate == pytest.approx(END_LR, abs=1e-7) and max(rates) == pytest.approx(3e-3, rel=0.02)
    assert max(abs(after - before) for before, after in itertools.pairwise(rates)) < 3e-5
    assert again.trainer.schedule.choices == saved["choices"] and again.last_rate == pytest.approx(END_LR, abs=1e-7)
    same = Schedule(run.trainer.config.TRAIN, PER_EPOCH, 64)
    same.resume(choices)
    assert [same(step) for step in range(choices[-1][0], len(rates))] == rates[choices[-1][0] :]


@pytest.mark.parametrize("slower", [0.4, 0.6, 0.9])
def test_raised_number_of_updates_is_lowered_in_time(config, slower):
    run = Run(config("5m"), World(update=0.2, changes_at=100, then=0.25)).go(until=1800)
    run.world.then = slower
    run.go()
    totals = [total for _, total in run.trainer.schedule.choices]
    assert totals[0] < totals[-1] < max(totals) and min(totals) == totals[0]
    assert 260 <= run.world.now <= 300 and run.last_rate == pytest.approx(END_LR, abs=1e-7)


def test_resumed_run_without_time_stops_before_its_first_update(config):
    first = Run(config("5m"), World()).go(until=500)
    first.saved["budget"]["used"] = 300.0
    again = Run(config("5m"), World(), first.saved)
    with pytest.raises(Stopped):
        again.go()
    assert again.trainer.rates == {}


@pytest.mark.parametrize("update", [0.9, 1.1, 1.3, 1.6, 1.9, 2.3, 2.9, 60.0])
def test_suggested_budget_is_never_rounded_down_below_the_shortest(config, update):
    """The next shorter budget, in seconds or in minutes, is refused again."""
    run = Run(config(f"{round(30 * update) + 10}s"), World(update=update))
    with pytest.raises(Stopped):
        run.go()
    assert_names(str(run.budget.refusal), "-budget", run.trainer.config.TRAIN.BUDGET)
    fits = re.search(r"about (\w+)", str(run.budget.refusal))[1]
    fitting = Run(config(fits), World(update=update)).go()
    assert fitting.trainer.step >= PER_EPOCH + MIN_UPDATES and fitting.world.now <= to_seconds(fits)
    assert fitting.last_rate == pytest.approx(END_LR, abs=1e-7)
    unit = 1 if fits.endswith("s") else 60
    with pytest.raises((Stopped, ConfigError)):
        Run(config(f"{to_seconds(fits) - unit}s"), World(update=update)).go()


@pytest.mark.parametrize("budget, update", [("54s", 1.0), ("75s", 1.5)])
def test_too_short_budget_is_refused_once_updates_are_measured(config, budget, update):
    run = Run(config(budget), World(update=update))
    with pytest.raises(Stopped):
        run.go()
    assert isinstance(run.budget.refusal, FruitlessStart) and run.trainer.step == NOT_TYPICAL + MEASURED < PER_EPOCH


def test_time_of_day_stays_the_same_day_after_a_resume(config):
    noon = datetime(2026, 3, 1, 12, 0).timestamp()
    run = Run(config("12:05"), World(now=noon))
    assert run.allowance.left() == pytest.approx(300 - 8.3, abs=0.01)
    assert 276 <= run.go().world.now - noon <= 300
    again = Allowance("12:05", 0, run.saved["budget"], lambda: 0.0, lambda: noon + 400)
    assert again.left() == -100  # not tomorrow's 12:05
    assert Allowance("8h", 0, run.saved["budget"], lambda: 0.0).left() == 8 * 3600 - run.saved["budget"]["used"]


@pytest.mark.parametrize(
    "text, now, then",
    [("07:00", (1, 22, 30), (2, 7, 0)), ("7:00", (1, 6, 59), (1, 7, 0)), ("23:59", (1, 23, 59), (2, 23, 59))],
)
def test_time_of_day_budget_means_its_next_occurrence(text, now, then):
    assert next_time(text, datetime(2026, 3, *now).timestamp()) == datetime(2026, 3, *then).timestamp()


@pytest.mark.parametrize("options", ["", "TRAIN.LR_SCHEDULER.PER_EPOCH=true", "TRAIN.LR_SCHEDULER.NAME=wsd"])
def test_run_shorter_than_budget_keeps_its_usual_learning_rates(config, options):
    settings = config("5m", "TRAIN.NUM_EPOCHS=20", "TRAIN.WARMUP_EPOCHS=3", *options.split())
    run, rate = Run(settings, World()).go(), Schedule(settings.TRAIN, PER_EPOCH, 64)
    assert run.trainer.rates == {step: rate(step) for step in range(20 * PER_EPOCH)}
    assert "20 epochs" in run.lines[0] and run.world.now < 100
