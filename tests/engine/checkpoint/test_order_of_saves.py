"""What previous.pth is, what is on the disk before last.pth names it, and which checkpoints have other updates."""

import os

import pytest
import torch

from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.format import read_checkpoint
from engine.checkpoint.sharded_saver import PIECES, ShardedSaver
from tests.support.configs import CPU
from tests.support.loading import order
from utils.distributed import Process


def state(step: int, skips_in_a_row: int = 0) -> dict:
    return {"epoch": 0, "step": step, "progress": {"skips_in_a_row": skips_in_a_row, "best": []}}


@pytest.mark.parametrize(("skips", "previous"), [(5, 10), (6, 5)])
def test_the_save_right_before_a_streak_of_skipped_updates_becomes_the_previous_one(tmp_path, skips, previous):
    saver = AsyncSaver(tmp_path, keep=1, device=CPU, warn=pytest.fail)
    for each in (state(5), state(10), state(15, skips)):
        saver.save(each, [])
    saver.wait()
    assert read_checkpoint(tmp_path / "previous.pth")["step"] == previous


def test_the_parts_of_a_sharded_save_and_their_folders_are_on_the_disk_before_it_is_named(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(file):
        done.append(os.path.realpath(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
        fsync(file)

    def noted_replace(source, target):
        done.append(f"becomes {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    saver = ShardedSaver(tmp_path, 1, Process(CPU), pytest.fail)
    saver.save(state(3) | {PIECES: {"weight": torch.ones(3)}}, [])
    saver.wait()
    before = done[: done.index(f"becomes {tmp_path / 'last.pth'}")]
    assert {str(tmp_path), str(tmp_path / "shards")} <= set(before)


@pytest.mark.parametrize("change", [{"NUM_IMAGES": 99}, {"GLOBAL_BATCH": 4}, {"DATA.DROP_LAST": False}])
def test_other_images_batches_or_remainders_are_other_updates(change):
    same = order()
    saved = {"NUM_IMAGES": 100, "GLOBAL_BATCH": 8, "DATA.DROP_LAST": True}
    assert same.has_updates_of(saved) and not same.has_updates_of(saved | change)
