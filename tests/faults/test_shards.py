"""Sharded checkpoints that are damaged, incomplete or from a killed save are never loaded, and no shards remain."""

import json
import signal

import pytest
import torch

from engine.checkpoint.find import find_newest
from models.weights.torch_files import named_shards, read_torch
from scripts.export import main
from tests.support.run_hash import run_hash, state_hash
from tests.support.runs import run_folder

pytestmark = pytest.mark.slow

SHARDED = ("-batch_size", "4", "-opts", "DIST.STRATEGY=fsdp2")
FIRST_EPOCH, SECOND_EPOCH = 4, 8  # updates at the end of each epoch
# The file operations of the second save, in order: open and rename a shard, rename last.pth, delete old shards.
KINDS = ("open .1-of-2", "replace .1-of-2", "replace .last.pth.tmp last.pth", "unlink checkpoint-1")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, start):
    """Return the folder of an uninterrupted run, and the file operations of its saving thread."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert start(folder / "o", *SHARDED, processes=2, list_operations=[str(folder / "operations")]).returncode == 0
    return run_folder(folder / "o"), [json.loads(line) for line in (folder / "operations").read_text().splitlines()]


def assert_tidy(folder) -> None:
    """Assert that every shard that a checkpoint names exists, and no other."""
    there = {path.relative_to(folder).as_posix() for path in folder.glob("shards/*/*")}
    assert there == {name for path in folder.glob("*.pth") for name in named_shards(path)}


def test_sharded_checkpoint_has_no_unused_shards_and_exports_to_one_file(tmp_path, unbroken):
    folder, _ = unbroken
    assert_tidy(folder)
    assert sorted(each.name for each in (folder / "shards").iterdir()) == [
        f"step-{step}" for step in (FIRST_EPOCH, SECOND_EPOCH)
    ]
    main([str(folder / "last.pth"), "-output", str(tmp_path / "one.pth")])
    assert state_hash(torch.load(tmp_path / "one.pth", weights_only=True)) == state_hash(
        read_torch(folder / "last.pth")
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_resume_after_kill_during_sharded_save_matches_unbroken_run(tmp_path, start, unbroken, kind):
    folder, operations = unbroken
    save, number, _ = [each for each in operations if kind in each[2]][-1]
    assert start(tmp_path, *SHARDED, processes=2, kill_at=[save, number]).returncode == -signal.SIGKILL
    killed = run_folder(tmp_path)
    has_new = kind == KINDS[-1]
    assert read_torch(killed / "last.pth")["step"] == (SECOND_EPOCH if has_new else FIRST_EPOCH)
    assert start(tmp_path, *SHARDED, processes=2).returncode == 0
    assert run_hash(killed) == run_hash(folder)
    if not has_new:  # otherwise the resumed run had nothing to save
        assert_tidy(killed)


@pytest.mark.long
def test_unsharded_resume_leaves_no_unused_shards(tmp_path, start):
    assert start(tmp_path, "-epochs", "1", *SHARDED, processes=2).returncode == 0
    start(tmp_path).done()
    folder = run_folder(tmp_path)
    assert [named_shards(folder / name) for name in ("last.pth", "checkpoint-2.pth")] == [[], []]
    assert_tidy(folder)


@pytest.mark.long
def test_resume_auto_takes_previous_if_shard_is_damaged_or_missing(tmp_path, start):
    assert start(tmp_path, *SHARDED, processes=2).returncode == 0
    folder, warned = run_folder(tmp_path), []
    shard = named_shards(folder / "last.pth")[1]
    content = bytearray((folder / shard).read_bytes())
    for damaged in (content[: len(content) // 2], content[:2000] + bytes([content[2000] ^ 1]) + content[2001:], None):
        (folder / shard).unlink()
        if damaged:
            (folder / shard).write_bytes(damaged)
        assert find_newest(str(tmp_path), warned.append) == folder / "previous.pth"
        assert shard in warned.pop(0)
        warned.clear()
