"""After many skipped updates in a row a run goes back once and leaves them out; RUN.MAX_TIME ends it in time."""

import gc
import json
import os
import signal
from functools import partial

import pytest
import torch

import main_single_gpu
from configs.duration import to_seconds
from configs.load import load, to_yaml
from engine.checkpoint.async_saver import Saver
from engine.checkpoint.format import save_checkpoint
from engine.checkpoint.rollback import find_before, write_bad_batches
from engine.train.stop_conditions import TIME_IS_UP, NonFinite, Stopped, TimeLimit
from engine.train.trainer import Trainer
from tests.support.configs import SMALL, small_config
from tests.support.processes import launch
from tests.support.refusals import assert_names, refused
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder
from tests.support.trainers import make_trainer
from utils.errors import ConfigError
from utils.program import exit_code

STREAKS = ["PRECISION.MAX_CONSECUTIVE_SKIPS=5", "PRECISION.DOCTOR_SKIPS=null", "REPORT_FREQ=1"]
RANDOM = ["MODEL.DROPOUT=0.1", "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.9", "TRAIN.MIXUP_ALPHA=0.8"]


@pytest.fixture
def train(tmp_path, capsys):
    """A small run of 44 updates an epoch; returns its exit code, its folder and what it printed."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}

    def start(name, *options):
        gc.collect()  # the lock on the folder goes with the run before
        (tmp_path / "small.yaml").write_text(SMALL)
        flags = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / name), "-resume", "auto"]
        code = exit_code(main_single_gpu.main, [*flags, "-opts", *STREAKS, *RANDOM, *options])
        return code, run_folder(tmp_path / name), capsys.readouterr().out

    yield start
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.fixture
def poison(monkeypatch):
    """Makes the images of some updates NaN, and sends SIGTERM when an update is made for the second time."""
    place = Trainer._place

    def start(steps, stop_at=None):
        visits = []

        def poisoned(trainer, batch):
            visits.append(batch.piece.step)
            if batch.piece.step == stop_at and visits.count(stop_at) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            images, targets = place(trainer, batch)
            return (images * float("nan") if batch.piece.step in steps else images), targets

        monkeypatch.setattr(Trainer, "_place", poisoned)
        return visits

    return start


def status(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def bad_steps(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "bad_batches.jsonl").read_text().splitlines()]


def test_it_goes_back_over_an_epochs_end_and_a_stop_after_that_changes_nothing(train, poison):
    made = poison(range(42, 47))
    code, unbroken, said = train("unbroken", "SAVE_STEPS=20")
    assert code == 0 and said.count("going back to") == 1
    assert_names(said, unbroken / "previous.pth", "step 40", "41 to 46")
    assert made == [*range(47), 40, *range(47, 88)]
    assert bad_steps(unbroken) == [41, 42, 43, 44, 45, 46]
    assert len((unbroken / "metrics.jsonl").read_text().splitlines()) == 2, "the first epoch ended twice"
    poison(range(42, 47), stop_at=40)
    code, stopped, _ = train("stopped", "SAVE_STEPS=20")
    assert code == 128 + signal.SIGTERM
    assert status(stopped)["step"] == 41 and status(stopped)["left_out"] == [[41, 46]]
    code, stopped, said = train("stopped", "SAVE_STEPS=20")
    assert code == 0 and "going back to" not in said
    assert run_hash(stopped) == run_hash(unbroken)


def test_a_second_streak_ends_the_run_and_so_does_each_resume(train, poison):
    poison(range(21, 88))
    code, folder, said = train("o", "SAVE_STEPS=2")
    assert code == 3 and said.count("going back to") == 1 and bad_steps(folder) == [20, 21, 22, 23, 24, 25]
    assert "up to step 31" in status(folder)["reason"] and status(folder)["left_out"] == [[20, 25]]
    state = torch.load(folder / "last.pth", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())
    code, folder, said = train("o", "SAVE_STEPS=2")
    assert code == 3 and "going back to" not in said and "up to step 31" in status(folder)["reason"]
    code, folder, said = train("o", "SAVE_STEPS=2", "PRECISION.ROLLBACKS=2")
    assert code == 3 and said.count("going back to") == 1 and len(status(folder)["left_out"]) == 2


@pytest.mark.parametrize(("steps", "options"), [(range(8), []), (range(21, 30), ["PRECISION.ROLLBACKS=0"])])
def test_it_stops_at_once_where_nothing_good_was_saved_or_going_back_is_off(train, poison, steps, options):
    poison(steps)
    code, folder, said = train("o", "SAVE_STEPS=2", *options)
    assert code == 3 and "going back to" not in said and not (folder / "bad_batches.jsonl").exists()


@pytest.mark.parametrize("options", [(), ("DIST.STRATEGY=fsdp2", "DIST.CHECKPOINT=sharded")], ids=["ddp", "fsdp2"])
def test_nan_on_one_of_two_processes_takes_both_back(tmp_path, options):
    (tmp_path / "small.yaml").write_text(SMALL)
    flags = ["-output", str(tmp_path / "o"), "-batch_size", "16", "-epochs", "1", "-opts", *STREAKS, "SAVE_STEPS=4"]
    flags += options
    assert launch("tests.support.programs.poisoned", 2, tmp_path / "small.yaml", tmp_path / "code.pth", *flags) == 0
    folder = run_folder(tmp_path / "o")
    assert all("going back to" in (folder / f"log_{rank}.txt").read_text() for rank in (0, 1))
    rows = [json.loads(line) for line in (folder / "bad_batches.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rank"]) for row in rows] == [(step, rank) for step in range(20, 26) for rank in (0, 1)]
    assert all(len(row["names"]) == 16 for row in rows) and not set(rows[0]["names"]) & set(rows[1]["names"])
    last = torch.load(folder / "last.pth", weights_only=True)
    assert last["step"] == 44 and last["progress"]["left_out"] == [[20, 26]]


def test_what_is_left_out_counts_as_attempted_and_moves_nothing(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "SAVE_STEPS=1", "TRAIN.NUM_EPOCHS=1"))
    trainer.left_out = [range(40, 44)]
    windows = trainer.data.windows(0, 44, trainer.left_out)
    weights, saves = [], []

    def keep():
        saves.append(trainer.step)
        weights.append(trainer.model.head.weight.clone())
        if trainer.step == 40:
            trainer.skips_in_a_row += 3

    report = trainer.train_epoch(windows, keep)
    assert saves == list(range(1, 44)) and trainer.step == 44 and report.skipped == 4
    assert not torch.equal(weights[38], weights[39]) and torch.equal(weights[39], weights[-1])
    assert trainer.lr == trainer.schedule(44) and int(trainer.skips_in_a_row) == 0


def test_going_back_leaves_out_the_streak_and_the_update_before_it_unless_that_is_saved(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    for window in trainer.data.windows(0, 3):
        trainer.update(window)
    state = trainer.state_dict()
    trainer.roll_back(state, range(7, 9))
    assert trainer.step == 3 and trainer.left_out == [range(6, 9)]
    trainer.roll_back(state, range(3, 5))
    assert trainer.left_out == [range(6, 9), range(3, 5)]
    other = make_trainer(small_config(tmp_path))
    other.load_state_dict(trainer.state_dict())
    assert other.left_out == trainer.left_out


def test_windows_that_are_left_out_are_not_read(tmp_path):
    data = make_trainer(small_config(tmp_path)).data
    asked = []
    load_all = data._load
    data._load = lambda pieces: load_all(asked.append(piece.step) or piece for piece in pieces)
    assert [window.step for window in data.windows(2, 9, [range(3, 5), range(6, 7)])] == [2, 5, 7, 8]
    assert asked == [2, 5, 7, 8]


def test_the_streak_that_is_told_is_that_of_the_skipped_updates(tmp_path):
    trainer = make_trainer(small_config(tmp_path, *STREAKS))
    windows = trainer.data.windows(0, 44)
    trainer.update(next(windows))
    trainer.model.norm.register_forward_hook(lambda module, args, output: output * float("inf"))
    with pytest.raises(NonFinite) as stopped:
        trainer.train_epoch(windows, save=lambda: None)
    assert stopped.value.streak == range(1, 6)


def saved(step: int, skips: int) -> dict:
    return {"epoch": 0, "step": step, "progress": {"skips_in_a_row": torch.tensor(float(skips))}}


def test_saves_amid_a_streak_leave_the_checkpoint_before_it_as_previous(tmp_path):
    saver = Saver(tmp_path, keep=1, device=torch.device("cpu"), warn=pytest.fail)
    found = []
    for state in (saved(10, 0), saved(20, 5), saved(30, 15), saved(40, 0), saved(50, 2)):
        saver.save(state, [])
        saver.wait()
        path = find_before(tmp_path, int(state["step"] - state["progress"]["skips_in_a_row"]), pytest.fail)
        found.append((path.name, torch.load(path, weights_only=True)["step"]))
    assert found == [
        ("last.pth", 10),
        ("previous.pth", 10),
        ("previous.pth", 10),
        ("last.pth", 40),
        ("previous.pth", 40),
    ]
    assert saver.longest > 0


def test_a_damaged_checkpoint_is_passed_over_and_none_is_no_error(tmp_path):
    assert find_before(tmp_path, 100, pytest.fail) is None
    save_checkpoint(tmp_path / "last.pth", saved(10, 0))
    save_checkpoint(tmp_path / "last.pth", saved(20, 0))
    (tmp_path / "last.pth").write_bytes(b"PK\x03\x04 nothing whole")
    said = []
    assert find_before(tmp_path, 30, said.append).name == "previous.pth"
    assert_names(said[0], tmp_path / "last.pth")
    assert find_before(tmp_path, 9, said.append) is None


def test_bad_batches_name_every_image_once_and_stay_the_same_when_written_again(tmp_path):
    data = make_trainer(small_config(tmp_path, "TRAIN.REPEATED_AUG=2")).data
    for _ in range(2):
        write_bad_batches(tmp_path, data, [range(1, 3), range(5, 6)])
    rows = [json.loads(line) for line in (tmp_path / "bad_batches.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rank"]) for row in rows] == [(1, 0), (2, 0), (5, 0)]
    for row in rows:
        window = dict.fromkeys(data.order.window(row["step"]).tolist())
        assert len(window) == 16 and row["names"] == [data.image_set.name(index) for index in window]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h30m", 12600), ("90m", 5400), ("5400", 5400), ("1.5H", 5400), ("1d", 86400), ("2m 5s", None), ("30m3h", None)]
    + [("", None), ("-5", None), ("soon", None), ("10s", 10), ("3h30", None)],
)
def test_lengths_of_time(text, seconds):
    assert to_seconds(text) == seconds


@pytest.mark.parametrize("text", ["soon", "0", "3:30"])
def test_a_limit_that_is_no_time_is_refused_with_its_name_and_an_example(tmp_path, text):
    with refused(ConfigError, "RUN.MAX_TIME", "-opts", "3h30m"):
        small_config(tmp_path, f"RUN.MAX_TIME={text}")


def test_a_number_of_seconds_comes_back_from_the_runs_own_settings(tmp_path):
    (tmp_path / "again.yaml").write_text(to_yaml(small_config(tmp_path, "RUN.MAX_TIME=5400"), {}))
    assert load(["-cfg", str(tmp_path / "again.yaml")]).config.RUN.MAX_TIME == "5400"


class Clock:
    """Shows what it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_is_left_for_two_updates_and_two_saves():
    clock = Clock()
    limit = TimeLimit(seconds=100, start=10, clock=clock)
    answers = {}
    for clock.now in range(20, 111, 5):
        answers[clock.now] = limit.is_near(num_left=50, save=2)
    assert min(now for now, is_near in answers.items() if is_near) == 100  # from 110 - 2 x (5 + 2) on


def test_the_longest_update_so_far_is_reckoned_with():
    clock = Clock()
    limit = TimeLimit(seconds=100, start=0, clock=clock)
    answers = []
    for clock.now in (0, 30, 31, 39, 40):
        answers.append(limit.is_near(num_left=50, save=0))
    assert answers == [False, False, False, False, True]


def test_the_evaluation_is_reckoned_with_where_an_epoch_ends_soon():
    clock = Clock()
    limit = TimeLimit(seconds=60, start=0, clock=clock)
    answers = []
    for clock.now, num_left in ((0, 2), (1, 1), (31, 3), (32, 2)):  # the last update and the evaluation took 30
        answers.append(limit.is_near(num_left, save=0))
    assert answers == [False, False, False, True]


def test_a_run_that_is_out_of_time_saves_ends_with_0_and_goes_on_to_the_same_end(train, monkeypatch):
    code, unbroken, _ = train("unbroken")
    assert code == 0
    ticks = iter(range(1, 1000))
    limited = partial(TimeLimit, clock=lambda: next(ticks))
    with monkeypatch.context() as patched:
        patched.setattr("engine.epochs.TimeLimit", lambda seconds, start: limited(seconds, 0))
        code, folder, said = train("limited", "RUN.MAX_TIME=30s")
    assert code == 0
    assert_names(said, "RUN.MAX_TIME", "30s")
    told = status(folder)
    assert (told["state"], told["reason"]) == ("stopped", "time limit") and 0 < told["step"] <= 27
    code, folder, _ = train("limited")
    assert code == 0 and status(folder)["state"] == "done" and run_hash(folder) == run_hash(unbroken)


def test_a_signal_goes_before_the_end_of_the_time(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    trainer.is_time_up = lambda num_left: True
    trainer.stop.number = signal.SIGINT
    with pytest.raises(Stopped) as stopped:
        trainer.train_epoch(trainer.data.windows(0, 44), save=lambda: None)
    assert stopped.value.number == signal.SIGINT
    # Of what several processes ask for, the largest number is agreed on.
    assert min(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) > TIME_IS_UP
