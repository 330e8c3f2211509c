"""Loader processes and threads that die, full shared memory, and unreadable images with every kind of reader."""

import shutil
import signal
import subprocess

import pytest

from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder, status_of

pytestmark = pytest.mark.slow

DIGITS = ["-dataset", "digits", "-batch_size", "25", "-opts", "DATA.IMAGE_CHANNELS=1", "MODEL.NUM_CLASSES=10"]
PROCESSES = ["DATA.WORKERS=processes", "DATA.NUM_WORKERS=2"]


def failure(output) -> str:
    told = status_of(run_folder(output))
    assert told["state"] == "failed"
    return told["reason"]


@pytest.mark.long
def test_killed_loader_process_is_named_and_ends_run(tmp_path, start):
    ended = start(tmp_path / "o", *DIGITS, *PROCESSES, kill_worker=[3])
    assert ended.returncode == 1
    assert_names(ended.printed, "error: loader process", "DATA.NUM_WORKERS")
    assert "Traceback" not in ended.printed
    assert_names(failure(tmp_path / "o"), "exit code -9")


@pytest.mark.long
def test_killed_loader_process_on_one_rank_ends_both_ranks(tmp_path, start):
    ended = start(tmp_path / "o", *DIGITS, *PROCESSES, processes=2, kill_worker=[3, 1])
    assert ended.codes == [1, 1]
    assert_names(ended.printed, "error: loader process")
    assert "Traceback" not in ended.printed
    assert_names(failure(tmp_path / "o"), "process 1")


def test_too_many_open_files_are_reported_without_a_traceback(tmp_path, start):
    ended = start(tmp_path / "o", *DIGITS, *PROCESSES, limit_open_files=[3])
    assert ended.returncode == 2 and "Traceback" not in ended.printed, ended.printed
    assert_names(ended.stderr, "error: too many open files", "ulimit -n 4096", "-num_workers")


@pytest.mark.long
def test_orphaned_loader_processes_do_not_lock_run_folder(tmp_path, start):
    killed = start(tmp_path / "o", *DIGITS, *PROCESSES, "SAVE_STEPS=1", signal_at=[3, signal.SIGKILL, [0]])
    assert killed.returncode == -signal.SIGKILL
    start(tmp_path / "o", *DIGITS, *PROCESSES).done()


def test_dead_loader_thread_ends_the_run(tmp_path, start):
    ended = start(tmp_path / "o", *DIGITS, "DATA.NUM_WORKERS=2", end_thread=[3])
    assert ended.returncode == 1 and "is told to end" in ended.printed
    assert "is told to end" in failure(tmp_path / "o")


@pytest.mark.parametrize(("size", "what"), [("128k", "batch"), ("4k", "loader processes")])
def test_full_shared_memory_causes_a_warning_and_then_an_error(tmp_path, start, size, what):
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a separate /dev/shm needs root")
    digits = [word.replace("25", "160") for word in DIGITS]
    ended = start(tmp_path / "o", *digits, *PROCESSES, "DATA.IMAGE_SIZE=32", limit_shared_memory=[size])
    said = ended.printed
    assert ended.returncode == 2 and "Traceback" not in said, said
    warned, named = said.index("check: shared memory: "), said.index("error: DATA.WORKERS: ")
    assert warned < named
    assert_names(said[named:], what, "DATA.WORKERS=threads")


@pytest.mark.long
def test_run_with_unreadable_images_has_equal_hash_for_any_worker_settings(tmp_path, start, photos):
    flags = ["-dataset", "imagefolder", "-data_path", str(photos), "-opts"]
    hashes = set()
    for kind, count in (("threads", 0), ("threads", 1), ("threads", 3), ("processes", 1), ("processes", 2)):
        output = tmp_path / f"{kind}-{count}"
        done = start(output, *flags, f"DATA.WORKERS={kind}", f"DATA.NUM_WORKERS={count}").done()
        for name in ("train/ant/07.JPEG", "train/bee/42.JPEG"):
            assert done.printed.count(f"warning: cannot read {photos / name} (") == 1
        assert_names(done.printed, "2 of 200")
        hashes.add(run_hash(run_folder(output)))
    assert len(hashes) == 1
