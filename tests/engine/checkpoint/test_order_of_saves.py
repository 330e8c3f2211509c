"""What is on the disk before last.pth names it, and which checkpoints have other updates."""

import os

import pytest
import torch

from engine.checkpoint.sharded_saver import PIECES, ShardedSaver
from tests.support.configs import CPU
from tests.support.loading import order
from utils.distributed import Process


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
    state = {"epoch": 0, "step": 3, "progress": {"skips_in_a_row": 0, "best": []}}
    saver.save(state | {PIECES: {"weight": torch.ones(3)}}, [])
    saver.wait()
    before = done[: done.index(f"becomes {tmp_path / 'last.pth'}")]
    assert {str(tmp_path), str(tmp_path / "shards")} <= set(before)


@pytest.mark.parametrize("change", [{"NUM_IMAGES": 99}, {"GLOBAL_BATCH": 4}, {"DATA.DROP_LAST": False}])
def test_other_images_batches_or_remainders_are_other_updates(change):
    same = order()
    saved = {"NUM_IMAGES": 100, "GLOBAL_BATCH": 8, "DATA.DROP_LAST": True}
    assert same.has_updates_of(saved) and not same.has_updates_of(saved | change)
