"""Saving in the background: each file has the state of its save, saves keep their order, and no failure is silent."""

import errno
import os
import threading
import time
from unittest.mock import Mock

import pytest
import torch

from configs.schema import Config, Data, Model, Train
from engine.checkpoint import format as checkpoint
from engine.checkpoint.async_saver import AsyncSaver, HostCopy
from engine.checkpoint.find import read_checkpoint
from engine.checkpoint.sharded_saver import ShardedSaver
from models.weights.sharded import PIECES
from tests.support.configs import CPU
from tests.support.loading import order
from tests.support.run_hash import state_hash
from tests.support.trainers import make_trainer, update
from utils.distributed import Process

pytestmark = pytest.mark.slow

CONFIG = Config(
    DATA=Data(DATASET="synthetic", SYNTHETIC_SIZE=64, IMAGE_SIZE=8, BATCH_SIZE=8),
    MODEL=Model(PATCH_SIZE=4, EMBED_DIM=8, DEPTH=1, NUM_HEADS=1, NUM_CLASSES=4),
    TRAIN=Train(MODEL_EMA=True),
)


@pytest.fixture
def trainer():
    return make_trainer(CONFIG)


@pytest.fixture
def saver(tmp_path):
    return AsyncSaver(tmp_path, keep=1, device=CPU, warn=pytest.fail)


@pytest.fixture
def slow(monkeypatch) -> threading.Event:
    """An event; nothing is written until it is set."""
    release, save = threading.Event(), torch.save

    def slow_save(state, file):
        assert release.wait(60)
        save(state, file)

    monkeypatch.setattr(checkpoint.torch, "save", slow_save)
    return release


def small_state(step: int) -> dict:
    progress = {"skips_in_a_row": 0, "best": []}
    return {"epoch": 0, "step": step, "weight": torch.full((3,), float(step)), "progress": progress}


def test_background_save_is_unaffected_by_later_training(tmp_path, trainer, saver, slow):
    update(trainer, 3)
    state = trainer.state_dict()
    saved = state_hash(state)
    saver.save(state, ["best.pth"])
    update(trainer, 3)
    trainer.end_epoch()
    assert state_hash(trainer.state_dict()) != saved and not (tmp_path / "last.pth").exists()
    slow.set()
    saver.wait()
    assert state_hash(read_checkpoint(tmp_path / "last.pth")) == saved
    assert state_hash(read_checkpoint(tmp_path / "best.pth")) == saved
    assert saver.newest == {"epoch": 0, "step": 3}


def test_second_save_waits_for_the_first_before_copying(tmp_path, saver, monkeypatch):
    events, copied_again, save, take = [], threading.Event(), checkpoint.torch.save, HostCopy.take

    def slow_save(state, file):
        copied_again.wait(0.2)  # times out in the first save, because the second copy would overwrite the first
        save(state, file)
        events.append(f"written {state['step']}")

    def noted_take(self, state):
        events.append(f"copied {state['step']}")
        if state["step"] == 2:
            copied_again.set()
        return take(self, state)

    monkeypatch.setattr(checkpoint.torch, "save", slow_save)
    monkeypatch.setattr(HostCopy, "take", noted_take)
    saver.save(small_state(1), [])
    saver.save(small_state(2), [])
    saver.wait()
    assert events == ["copied 1", "written 1", "copied 2", "written 2"]
    assert read_checkpoint(tmp_path / "previous.pth")["step"] == 1


@pytest.fixture
def operations(monkeypatch) -> list[tuple[str, str, tuple]]:
    """Return a list to which each sync and rename adds (rename target or "", path, inode and size of the file)."""
    done, fsync, replace = [], os.fsync, os.replace

    def identity(status: os.stat_result) -> tuple[int, int]:
        return status.st_ino, status.st_size

    def noted_fsync(file):
        number = file if isinstance(file, int) else file.fileno()
        done.append(("", os.path.realpath(f"/proc/self/fd/{number}"), identity(os.fstat(number))))
        fsync(file)

    def noted_replace(source, target):
        done.append((str(target), str(source), identity(os.stat(source))))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return done


@pytest.mark.parametrize("links", [True, False], ids=["", "without hard links"])
def test_checkpoint_is_synced_before_rename_and_its_folder_afterwards(tmp_path, monkeypatch, saver, operations, links):
    """Check the order of syncs instead of a power cut: after `kill -9` the system still writes everything."""
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no hard links here")))
    for step in (1, 2):
        saver.save(small_state(step), ["best.pth", f"checkpoint-{step}.pth"])
        saver.wait()
    renames = [(place, each) for place, each in enumerate(operations) if each[0]]
    names = ["best.pth", "checkpoint-2.pth", "previous.pth", "last.pth"]
    assert [target for _, (target, _, _) in renames[3:]] == [str(tmp_path / name) for name in names]
    for place, (target, _, file) in renames:
        synced = [each for renamed, _, each in operations[:place] if not renamed]
        assert file in synced, f"{target} was renamed before its content was synced"
    assert any(path == str(tmp_path) for _, path, _ in operations[renames[-1][0] :]), "the folder must be synced last"


def test_saver_records_the_longest_save_time(saver, monkeypatch):
    save = torch.save
    monkeypatch.setattr(checkpoint.torch, "save", lambda state, file: [time.sleep(state["seconds"]), save(state, file)])
    for step, seconds in enumerate((0.5, 0.0)):
        saver.save(small_state(step) | {"seconds": seconds}, [])
        saver.wait()
    assert saver.longest >= 0.5


def test_saver_thread_error_is_raised_by_wait(saver):
    saver.save(small_state(1) | {"not plain": lambda: None}, [])
    with pytest.raises(Exception, match="pickle"):
        saver.wait()


def test_host_copy_equals_training_state_and_reuses_host_memory(trainer):
    update(trainer)
    state = trainer.state_dict() | {
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "view": torch.arange(6.0).reshape(2, 3).T,
        "every_other": torch.arange(6.0)[::2],
        "types": [torch.ones(3, dtype=torch.bfloat16), torch.tensor(3), torch.zeros(0), torch.tensor([True])],
    }
    host_copy = HostCopy(CPU)
    copy = host_copy.take(state)
    assert state_hash(copy) == state_hash(state)
    assert copy["state_dict"]._metadata == state["state_dict"]._metadata
    assert copy["channels_last"].stride() == state["channels_last"].stride() and copy["view"].stride() == (1, 3)
    places = {name: tensor.data_ptr() for name, tensor in copy["state_dict"].items()}
    state["state_dict"]["cls_token"].add_(1)
    assert state_hash(copy) != state_hash(state)
    again = host_copy.take(state)
    assert state_hash(again) == state_hash(state)
    assert {name: tensor.data_ptr() for name, tensor in again["state_dict"].items()} == places


def test_host_copy_equals_state_after_number_of_tensors_changes(monkeypatch):
    monkeypatch.setattr("engine.checkpoint.async_saver.CHUNK", 30_000)
    host_copy = HostCopy(CPU)
    for count in (1, 9, 2):
        state = {str(number): torch.randn(number * 600 + 1) for number in range(count)}
        assert state_hash(host_copy.take(state)) == state_hash(state)


def test_saved_host_copy_is_no_larger_than_state(tmp_path, trainer):
    """A copied tensor must not include memory that it shares with other tensors."""
    for name, state in (("state", trainer.state_dict()), ("copy", HostCopy(CPU).take(trainer.state_dict()))):
        torch.save(state, tmp_path / name)
    assert abs((tmp_path / "copy").stat().st_size - (tmp_path / "state").stat().st_size) < 2000


def test_sharded_save_syncs_shards_and_folders_before_renaming_the_checkpoint(tmp_path, operations):
    saver = ShardedSaver(tmp_path, 1, Process(CPU), pytest.fail)
    state = {"epoch": 0, "step": 3, "progress": {"skips_in_a_row": 0, "best": []}}
    saver.save(state | {PIECES: {"weight": torch.ones(3)}}, [])
    saver.wait()
    targets = [target for target, _, _ in operations]
    before = {path for _, path, _ in operations[: targets.index(str(tmp_path / "last.pth"))]}
    assert {str(tmp_path), str(tmp_path / "shards")} <= before


def test_shard_is_not_written_if_copying_fails_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(Process, "all_true", lambda self, one: False)
    saver = ShardedSaver(tmp_path, 1, Process(CPU), pytest.fail)
    saver.save(small_state(1) | {PIECES: {}}, [])
    assert saver.failure and not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"NUM_IMAGES": 99}, {"GLOBAL_BATCH": 4}, {"DATA.DROP_LAST": False}])
def test_changing_image_count_batch_size_or_drop_last_changes_the_updates(change):
    same = order()
    saved = {"NUM_IMAGES": 100, "GLOBAL_BATCH": 8, "DATA.DROP_LAST": True}
    assert same.has_updates_of(saved) and not same.has_updates_of(saved | change)


def test_changed_image_count_restarts_the_epoch_and_its_counters(trainer):
    state = update(trainer, 3).state_dict() | {"config": {"NUM_IMAGES": 99}}
    other = make_trainer(CONFIG)
    other.load_state_dict(state)
    assert (other.step, other.epoch, other.counters.totals.any()) == (0, 0, False)
