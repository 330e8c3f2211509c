"""TRAIN.BUDGET: a run ends on time with its schedule complete, whatever the machine's speed, by a simulated clock."""

import errno
import itertools
import json
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from configs.schema import to_seconds
from engine.loop import Vote, stop_if_requested, train_epoch
from engine.train.counters import EpochResult, Report
from engine.train.forecast import Forecast, RunTimes
from engine.train.schedule import Schedule
from engine.train.stop_conditions import Stopped, why_finished
from engine.train.trainer import Trainer
from extras import budget
from extras.budget import CHOICES_FILE, Allowance, Budget, ChoiceRecord, next_time, repeat_choices
from tests.support.configs import small_config
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

PER_EPOCH = 22
END_LR = 1e-5


class World:
    """A simulated machine: the duration of each part, multiplied by the load at that time."""

    def __init__(self, start=8.0, update=0.1, evaluation=0.3, save=0.0, end_work=1.0, load=lambda now: 1.0, now=0.0):
        self.now, self.jumped, self.load, self.start = now, 0.0, load, start
        self.update, self.evaluation, self.save, self.end_work = update, evaluation, save, end_work

    def take(self, seconds: float) -> float:
        start, self.now = self.now, self.now + seconds * self.load(self.now)
        return self.now - start


class Lagging:
    """Two simulated processes. Process 0 votes, and the vote takes effect one update later."""

    world_size, last = 2, Vote()

    def first(self, task):
        return task()

    def delayed_max(self, vote: Vote) -> Vote:
        vote, self.last = self.last, vote
        return vote


ALONE = SimpleNamespace(world_size=1, delayed_max=lambda vote: vote, first=lambda task: task())


ORDER = SimpleNamespace(steps_per_epoch=PER_EPOCH, num_images=64 * PER_EPOCH)


def recorded(path: Path) -> list[list[int]]:
    """Return the choices in a run's folder."""
    return json.loads(path.read_text())["choices"]


class Killed(Exception):
    pass


class FakeTrainer:
    """The parts of a trainer that the loop over updates needs. `rates` has the learning rate of each update by step."""

    notify = Trainer.notify

    def __init__(self, config, world: World, process):
        self.config, self.world, self.process, self.left_out = config, world, process, []
        self.schedule = Schedule(config.TRAIN, PER_EPOCH, 64)
        self.data = SimpleNamespace(steps_per_epoch=PER_EPOCH, global_batch=64, order=ORDER)
        self.epoch = self.step = self.first = 0
        self.rates: dict[int, float] = {}
        self.dies_at, self.record = -1, None

    def update(self, window) -> None:
        if self.step == self.dies_at:
            raise Killed
        if self.record:
            assert recorded(self.record) == self.schedule.choices + self.schedule.to_repeat
        self.rates[self.step] = self.schedule(self.step)
        self.world.take(self.world.update * (5 if len(self.rates) < 3 else 1))
        self.step += 1
        self.notify("on_update")

    def report(self) -> Report:
        return Report(self.step - 1, self.epoch, *[0.0] * 9)


class Run:
    """One start of a run with a budget on a simulated machine, from the first update or from a checkpoint."""

    def __init__(
        self, config, world: World, process=ALONE, saved: dict | None = None, record: Path | None = None, left_out=()
    ):
        """`record`: the file to which choices are written."""
        self.world, self.lines, self.started = world, [], world.now
        self.trainer = trainer = FakeTrainer(config, world, process)
        trainer.left_out[:] = left_out
        self.saved = saved or {"budget": {}, "choices": [], "epoch": 0, "step": 0}
        self.saves = []
        trainer.epoch, trainer.step = self.saved["epoch"], self.saved["step"]
        trainer.schedule.resume(self.saved["choices"])
        clock = lambda: world.now  # noqa: E731
        forecast = Forecast(config, RunTimes.of(config, ORDER, 64, lambda: world.save), self.started, clock=clock)
        self.allowance = Allowance(
            config.TRAIN.BUDGET, world.now, self.saved["budget"], clock, lambda: world.now + world.jumped
        )
        finish, say = lambda: world.take(world.end_work), self.lines.append
        written = ChoiceRecord(record, forecast, clock, say) if record else SimpleNamespace(longest=0.0)
        longest = lambda: written.longest  # noqa: E731
        self.budget = Budget(forecast, self.allowance, self.saved["budget"], finish, say, say, longest)
        trainer.callbacks = [forecast, self.budget]
        if record:
            trainer.record = record
            trainer.callbacks.append(written)
            self.lines += repeat_choices(record, trainer) if saved else []
            written.write(trainer)
        world.take(world.start)
        if not saved:
            world.take(world.evaluation)
            trainer.notify("on_start_scored", None, world.evaluation)

    def save(self) -> None:
        trainer, choices = self.trainer, [[*each] for each in self.trainer.schedule.choices]
        self.saved = {"budget": self.budget.state(), "choices": choices, "epoch": trainer.epoch, "step": trainer.step}
        self.saves.append(self.saved)

    def go(self) -> "Run":
        """Train to the end, or until the run is killed."""
        log = SimpleNamespace(**dict.fromkeys(("start_bar", "move_bar", "end_bar"), lambda *_: None))
        trainer, frequency = self.trainer, self.trainer.config.VALIDATE_FREQ
        while not why_finished(trainer.config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, 0):
            train_epoch(
                trainer, itertools.repeat(SimpleNamespace(num_samples=64)), log, SimpleNamespace(number=0), self.save
            )
            number = trainer.epoch + 1
            scores = {"": None} if number % frequency == 0 or number == trainer.schedule.num_epochs else {}
            self.world.take(self.world.evaluation if scores else 0)
            trainer.notify("on_epoch_end", EpochResult(None, scores, 0, 0, 0, images=scores or None))
            trainer.epoch += 1
            self.world.take(self.world.save)
            self.save()
        self.world.take(self.world.end_work)
        return self

    @property
    def last_rate(self) -> float:
        return self.trainer.rates[max(self.trainer.rates)]


@pytest.fixture
def config(tmp_path):
    def make(budget: str, *options: str):
        usual = ["TRAIN.NUM_EPOCHS=3000", "TRAIN.WARMUP_EPOCHS=320", "TRAIN.BASE_LR=3e-3", f"TRAIN.END_LR={END_LR}"]
        return small_config(tmp_path, *usual, f"TRAIN.BUDGET={budget}", "REPORT_FREQ=10", "SAVE_STEPS=10", *options)

    return make


def comes_and_goes(every: float, factor: float) -> Callable[[float], float]:
    return lambda now: factor if now // every % 2 else 1.0


MACHINES = {
    "even": {},
    "slow disk": {"save": 2.0},
    "a long end": {"end_work": 24.0},
    "long evaluation": {"evaluation": 6.0},
    "quick updates": {"update": 0.02},
    "slow updates": {"update": 1.5},
    "no epoch ends": {"update": 6.0, "start": 3.0},
    "a load that comes and goes": {"load": comes_and_goes(17, 2.5)},
    "a load that comes late": {"load": lambda now: 2.0 if now > 240 else 1.0},
    "a load that goes": {"load": lambda now: 3.0 if now < 150 else 1.0},
}


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("process", [ALONE, Lagging])
@pytest.mark.parametrize("name", MACHINES)
def test_run_with_budget_ends_on_time_at_final_learning_rate(config, name, process, frequency):
    process = process() if process is Lagging else process
    run = Run(config("5m", f"VALIDATE_FREQ={frequency}"), World(**MACHINES[name]), process).go()
    assert 291 <= run.world.now <= 300, run.lines
    assert run.last_rate == pytest.approx(END_LR, abs=1e-7)
    rates = [run.trainer.rates[step] for step in range(run.trainer.step)]
    assert max(rates) == pytest.approx(3e-3, rel=0.02)
    assert run.trainer.schedule.num_updates == run.trainer.step


def test_measured_update_time_excludes_evaluations_and_final_work(config):
    run = Run(config("5m"), World(end_work=20.0, evaluation=3.0)).go()
    assert {re.search(r"epochs of (\S+) s", line)[1] for line in run.lines} == {"2.2"}, run.lines


def killed(
    settings, world: World, step: int, saved: dict | None = None, process=ALONE, record: Path | None = None
) -> Run:
    """Run until the run dies before this step. The disk has the state of the last save."""
    run = Run(settings, world, process, saved, record)
    run.trainer.dies_at = step
    with pytest.raises(Killed):
        run.go()
    return run


def test_resume_after_kill_repeats_learning_rates_and_excludes_downtime_from_budget(config):
    settings, before, repeated = config("5m", "SAVE_STEPS=100"), None, 0
    for step in (197, 985, 1485, None):
        saved = before.saved if before else None
        world = World(now=1e6 * (step or 1e4), start=1.0, load=comes_and_goes(9, 2))
        run = killed(settings, world, step, saved) if step else Run(settings, world, saved=saved).go()
        if before:
            choices = [each[0] for run in (before, run) for each in run.trainer.schedule.choices]
            common = range(
                saved["step"], min([each for each in choices if each >= saved["step"]] + [before.trainer.step])
            )
            assert [run.trainer.rates[each] for each in common] == [before.trainer.rates[each] for each in common]
            repeated += len(common)
        before = run
    assert repeated >= 20 and run.last_rate == pytest.approx(END_LR, abs=1e-7)
    assert 291 <= saved["budget"]["used"] + run.world.now - run.started <= 300


@pytest.mark.parametrize("processes", [(ALONE, ALONE), (Lagging, Lagging), (Lagging, ALONE), (ALONE, Lagging)])
def test_restart_after_kill_repeats_budget_choices_since_last_save(config, tmp_path, processes):
    """The run is killed before an update uses a choice, after one did, and some updates later."""
    settings, load = config("5m"), comes_and_goes(9, 2)
    first, then = ((lambda of=each: of() if of is Lagging else of) for each in processes)
    steps = [step for step, _ in Run(settings, World(load=load), first()).go().trainer.schedule.choices]
    unsaved = 0
    for step in [step + later for step in steps[:8] for later in (0, 1, 6)]:
        record = tmp_path / f"{step}.json"
        before = killed(settings, World(load=load), step, process=first(), record=record)
        choices = recorded(record)
        assert choices == before.trainer.schedule.choices
        unsaved += choices != before.saved["choices"]
        again = killed(settings, World(update=0.3), step, before.saved, then(), record)
        assert again.trainer.schedule.choices == choices
        assert all(before.trainer.rates[each] == rate for each, rate in again.trainer.rates.items())
    assert unsaved >= 8


@pytest.mark.parametrize("process", [ALONE, Lagging])
@pytest.mark.parametrize("step, update, repeated", [(1400, 0.05, 1400), (1400, 0.155, 1400), (1850, 0.142, 1700)])
def test_resume_from_older_checkpoint_repeats_later_budget_choices(config, tmp_path, process, step, update, repeated):
    """On a faster machine, and on a slower one if there is enough time to complete the schedule."""
    first_process, process = (Lagging(), Lagging()) if process is Lagging else (ALONE, ALONE)
    settings, record = config("5m"), tmp_path / CHOICES_FILE
    first = killed(settings, World(load=comes_and_goes(17, 2)), step, process=first_process, record=record)
    older = next(saved for saved in first.saves if saved["choices"])
    choices = [each for each in recorded(record) if each[0] < repeated]
    assert len(choices) - len(older["choices"]) >= 20
    again = Run(settings, World(start=1.0, update=update), process, older, record)
    assert_names(again.lines[0], record, "repeats", f"{recorded(record)[len(older['choices'])][0]:,}")
    again.go()
    assert again.trainer.schedule.choices[: len(choices)] == choices
    alike = range(older["step"], choices[-1][0] + 1)  # after the last repeated choice, the run may choose again
    assert all(first.trainer.rates[each] == again.trainer.rates[each] for each in alike)
    assert again.last_rate == pytest.approx(END_LR, abs=1e-7)
    assert older["budget"]["used"] + again.world.now <= 300


def test_resume_on_much_slower_machine_replaces_recorded_budget_choices(config, tmp_path):
    settings, record = config("5m"), tmp_path / CHOICES_FILE
    first = killed(settings, World(load=comes_and_goes(17, 2)), 1200, record=record)
    older = next(saved for saved in first.saves if saved["choices"])
    slow = Run(settings, World(start=1.0, update=1.0), saved=older, record=record).go()
    used = older["budget"]["used"] + slow.world.now
    assert 285 <= used <= 300 and slow.trainer.step < 400
    assert slow.last_rate == pytest.approx(END_LR, abs=1e-7)
    assert recorded(record) == slow.trainer.schedule.choices


@pytest.fixture
def between(config, tmp_path):
    """Return a run that was killed with one choice that no checkpoint has, and the file with that choice."""
    run = killed(config("5m"), World(), 16, record=tmp_path / CHOICES_FILE)
    assert (run.saved["step"], run.saved["choices"], len(recorded(tmp_path / CHOICES_FILE))) == (10, [], 1)
    return run, tmp_path / CHOICES_FILE


def test_run_with_expired_budget_ends_instead_of_repeating_its_choice(config, between):
    run, record = between
    run.saved["budget"]["used"] = 300.0
    last = Run(config("5m"), World(), saved=run.saved, record=record).go()
    assert last.trainer.step <= 12 and last.last_rate == pytest.approx(END_LR, abs=1e-7)


OTHERS = {
    "budget": "6m",
    "epochs": 10,
    "images": 1,
    "images_per_update": 32,
    "updates_per_epoch": 9,
    "left_out": [[3, 5]],
}


@pytest.mark.parametrize("name", [*OTHERS, "choices before"])
def test_budget_choice_made_under_other_conditions_is_not_repeated(config, between, name):
    run, record = between
    content = json.loads(record.read_text())
    other = {name: OTHERS[name]} if name in OTHERS else {"choices": [[5, 100], *content["choices"]]}
    record.write_text(json.dumps(content | other))
    again = Run(config("5m"), World(), saved=run.saved, record=record)
    assert again.trainer.schedule.to_repeat == [] and recorded(record) == []
    assert_names(again.lines[0], record, name.replace("_", " "))


DAMAGED = ["", "[]", "{}", "null", "[" * 10**5, '{"choices": 7}', '{"choices": [[13]]}', '{"choices": [7]}', "\0"]
IMPOSSIBLE = [
    "[[13, 13]]",
    "[[13, 1e9]]",
    "[[13, 50], [50, 60]]",
    "[[14, 50], [13, 60]]",
    "[[13, 66001]]",
    "[[13.0, 50]]",
]


@pytest.mark.parametrize("content", [*DAMAGED, *IMPOSSIBLE, "a folder"])
def test_damaged_record_of_budget_choices_is_reported_and_replaced(config, between, content):
    run, record = between
    if content in IMPOSSIBLE:
        content = json.dumps(json.loads(record.read_text()) | {"choices": json.loads(content)})
    record.unlink()
    record.mkdir() if content == "a folder" else record.write_text(content)
    again = Run(config("5m"), World(start=1.0), saved=run.saved, record=record)
    assert again.trainer.schedule.to_repeat == []
    assert_names(again.lines[0], record, "chooses anew")


def test_older_run_without_choice_record_resumes_silently(config, between):
    run, record = between
    record.unlink()
    assert Run(config("5m"), World(), saved=run.saved, record=record).lines == []


def test_budget_choice_arriving_with_a_stop_signal_is_discarded(config, between):
    run, record = between
    before, trainer = record.read_text(), run.trainer
    trainer.process = SimpleNamespace(world_size=2, delayed_max=lambda vote: Vote(signal=15, num_updates=40))
    with pytest.raises(Stopped):
        stop_if_requested(trainer, SimpleNamespace(number=0), 5)
    assert record.read_text() == before and trainer.schedule.choices == json.loads(before)["choices"]


def test_full_disk_causes_a_warning_but_run_ends_on_time(config, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "write_text", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    run = Run(config("5m"), World(), record=tmp_path / CHOICES_FILE)
    run.trainer.record = None
    assert 291 <= run.go().world.now <= 300
    assert run.last_rate == pytest.approx(END_LR, abs=1e-7)
    assert_names(run.lines[0], tmp_path / CHOICES_FILE, "disk full", "killed")


@pytest.mark.parametrize("load", [lambda now: 1.0, comes_and_goes(17, 2.5)])
def test_slow_writes_of_budget_choices_do_not_delay_the_run(config, tmp_path, monkeypatch, load):
    world, write = World(load=load), budget.write_text

    def slow(*given) -> None:
        world.now += 5.0
        write(*given)

    monkeypatch.setattr(budget, "write_text", slow)
    run = Run(config("5m"), world, record=tmp_path / CHOICES_FILE).go()
    assert 285 <= run.world.now <= 300 and run.last_rate == pytest.approx(END_LR, abs=1e-7)
    seconds = [float(re.search(r"epochs of (\S+) s", line)[1]) for line in run.lines]
    assert 2.19 < min(seconds) and max(seconds) < 2.2 * max(map(load, range(300))) + 0.01, run.lines


def test_resume_on_slower_machine_chooses_fewer_updates(config):
    settings = config("5m")
    first = killed(settings, World(), 500)
    before = first.saved["choices"][-1][1]
    slow = Run(settings, World(update=0.3), saved=first.saved)
    assert slow.trainer.schedule(499) == first.trainer.rates[499] and slow.trainer.schedule.num_updates == before
    slow.go()
    assert slow.trainer.step < before / 2 and "budget 5m" in slow.lines[0]
    assert slow.last_rate == pytest.approx(END_LR, abs=1e-7)


@pytest.mark.parametrize("left", [-10.0, 0.5, 2.0])
def test_expired_budget_ends_run_at_the_next_update(config, left):
    settings = config("5m")
    first = killed(settings, World(), 500)
    first.saved["budget"]["used"] = 300 - 8 - left
    last = Run(settings, World(), Lagging(), saved=first.saved).go()
    assert last.trainer.step - first.saved["step"] <= 2 and last.last_rate == pytest.approx(END_LR, abs=1e-7)


def test_clock_changes_affect_only_time_of_day_budgets(config):
    for hours in (-5, 5):
        world = World()
        run = Run(config("5m"), world)
        world.jumped = 3600 * hours
        assert 291 <= run.go().world.now <= 300
    noon = datetime(2026, 3, 1, 12, 0).timestamp()
    run = Run(config("12:05"), World(now=noon))
    assert run.allowance.left() == pytest.approx(300 - 8.3, abs=0.01)
    run.go()
    assert 291 <= run.world.now - noon <= 300
    again = Allowance("12:05", 0, run.saved["budget"], lambda: 0.0, lambda: noon + 400)
    assert again.left() == -100  # not tomorrow's 12:05
    assert Allowance("8h", 0, run.saved["budget"], lambda: 0.0).left() == 8 * 3600 - run.saved["budget"]["used"]


@pytest.mark.parametrize(
    "text, now, then",
    [("07:00", (1, 22, 30), (2, 7, 0)), ("7:00", (1, 6, 59), (1, 7, 0)), ("23:59", (1, 23, 59), (2, 23, 59))],
)
def test_time_of_day_budget_means_its_next_occurrence(text, now, then):
    assert next_time(text, datetime(2026, 3, *now).timestamp()) == datetime(2026, 3, *then).timestamp()


def test_error_for_too_short_budget_suggests_a_sufficient_budget(config):
    for machine, most in (({}, 25), ({"update": 3.0}, 240), ({"update": 60.0}, 80 * 60)):
        run = Run(config("15s"), World(**machine))
        with pytest.raises(Stopped):
            run.go()
        with refused(ConfigError, "-budget", "15s"):
            raise run.budget.refusal
        fits = re.search(r"about (\w+)", str(run.budget.refusal))[1]
        assert to_seconds(fits) <= most
        fitting = Run(config(fits), World(**machine)).go()
        assert fitting.world.now <= to_seconds(fits) and fitting.last_rate == pytest.approx(END_LR, abs=1e-7)
    run = Run(config("15s"), World())
    run.budget.times.update = 60.0
    for given, least in (((), 26), ((False,), 13)):  # updates until one is measured, and for the end of the schedule
        with pytest.raises(ConfigError) as refusal:
            run.budget.refuse_too_short(0, *given)
        assert least <= int(re.search(r"about (\d+)m", str(refusal.value))[1]) <= least + 3


@pytest.mark.parametrize("options", ["", "TRAIN.LR_SCHEDULER.PER_EPOCH=true", "TRAIN.LR_SCHEDULER.NAME=wsd"])
def test_run_shorter_than_budget_keeps_its_usual_learning_rates(config, options):
    settings = config("5m", "TRAIN.NUM_EPOCHS=20", "TRAIN.WARMUP_EPOCHS=3", *options.split())
    run, rate = Run(settings, World()).go(), Schedule(settings.TRAIN, PER_EPOCH, 64)
    assert run.trainer.rates == {step: rate(step) for step in range(20 * PER_EPOCH)}
    assert "20 epochs" in run.lines[0] and run.world.now < 100


@pytest.mark.parametrize(
    "options, last",
    [
        ("NAME=cosine", END_LR),
        ("NAME=cosine PER_EPOCH=true", END_LR),
        ("NAME=cosine COOLDOWN_EPOCHS=300", END_LR),
        ("NAME=cosine AFTER_WARMUP=false", END_LR),
        ("NAME=wsd", END_LR),
        ("NAME=paddlevit", END_LR),
        ("NAME=constant", 3e-3),
        ("NAME=step DECAY_EPOCHS=1000", 3e-5),
        ("NAME=step MILESTONES=[500,1000,2900]", 3e-6),
    ],
)
def test_every_learning_rate_schedule_stays_smooth_under_a_budget(config, options, last):
    """Load changes the number of updates twice. The rate must have only the jumps of its schedule."""
    settings = config("5m", *(f"TRAIN.LR_SCHEDULER.{each}" for each in options.split()))
    run = Run(settings, World(load=comes_and_goes(60, 3))).go()
    rates = [run.trainer.rates[step] for step in range(run.trainer.step)]
    assert len(run.trainer.schedule.choices) > 5 and rates[-1] == pytest.approx(last, rel=0.2)
    top = rates.index(max(rates))
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[:top] == sorted(rates[:top])
    assert top < 0.25 * len(rates) or last == 3e-3


@pytest.mark.parametrize("text", ["8h", "90m", "20s", "07:00", "7:05", "5400", "1-12"])
def test_valid_budget_texts_are_accepted(config, text):
    assert config(text).TRAIN.BUDGET == text
