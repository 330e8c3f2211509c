"""A disk that is full, fails or is read-only, and a folder that another run writes to."""

import errno
import os
import re
import shutil
import signal
import stat

import pytest
import torch

from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.find import read_checkpoint
from engine.session import lock_folder
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import rows, run_folder, typed
from utils import files
from utils.log import Log

pytestmark = pytest.mark.slow

ENOUGH_FOR_ALL_BUT_CHECKPOINTS = 20_000  # bytes


def no_room(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("gets_space", [True, False])
def test_kept_lines_are_written_at_the_close_if_there_is_space_again(tmp_path, gets_space):
    """A pipe takes the role of the disk. It is full until somebody reads from it."""
    os.mkfifo(tmp_path / "log.txt")
    reader = os.open(tmp_path / "log.txt", os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb", buffering=0) as pipe:
        file, lines = files.LineFile(tmp_path / "log.txt"), []
        with pytest.raises(BlockingIOError):
            while True:
                lines.append(f"{len(lines):8192d}\n")
                file.write(lines[-1])
        if not gets_space:
            with pytest.raises(BlockingIOError):
                file.close()
            return
        content = pipe.read(2**30)
        assert len(content) < len("".join(lines)), "the last line did not fit"
        file.close()
        assert content + pipe.read(2**30) == "".join(lines).encode()


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "link", "replace", "unlink"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failed_save_leaves_whole_checkpoint_and_no_temporary_files(tmp_path, monkeypatch, operation, nth):
    told = []
    saver = AsyncSaver(tmp_path, keep=1, device=torch.device("cpu"), warn=told.append)

    def save(step):
        state = {"epoch": step, "step": step, "progress": {"skips_in_a_row": 0}, "weight": torch.full((9,), step)}
        saver.save(state, [f"checkpoint-{step}.pth"])
        saver.wait()

    save(1)
    with monkeypatch.context() as patched:
        calls = fail_from(patched, operation, nth)
        save(2)
    failed = calls[0] >= nth
    # A failed unlink is harmless.
    assert failed == bool(told) and bool(saver.failure) == (failed and operation != "unlink")
    left = read_checkpoint(tmp_path / "last.pth")
    assert left["step"] == saver.newest["step"] and (left["weight"] == left["step"]).all()
    if failed and operation in ("open", "write"):
        assert left["step"] == 1
    save(3)
    assert not saver.failure and read_checkpoint(tmp_path / "last.pth")["step"] == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def fail_from(patched, operation: str, nth: int) -> list[int]:
    """Let an operation fail with a full disk from its nth call on. Return the list that holds the number of calls."""
    calls = [0]

    def failing(do):
        def attempt(*arguments, **options):
            is_temporary = operation == "unlink" and os.path.basename(arguments[0]).startswith(".")
            calls[0] += not is_temporary  # a full disk allows removing files
            return no_room() if calls[0] >= nth and not is_temporary else do(*arguments, **options)

        return attempt

    if operation == "write":
        patched.setattr(torch, "save", failing(torch.save))
    elif operation == "open":
        patched.setattr(files, "open", failing(open), raising=False)
    else:
        patched.setattr(os, operation, failing(getattr(os, operation)))
    if operation == "link":
        patched.setattr(shutil, "copyfileobj", no_room)
    return calls


def test_training_continues_if_checkpoints_cannot_be_written_and_old_checkpoint_remains(tmp_path, start, unbroken):
    assert start(tmp_path / "o", kill_at=[2, 0]).returncode == -signal.SIGKILL
    folder = run_folder(tmp_path / "o")
    before = (folder / "last.pth").read_bytes()
    full = start(tmp_path / "o", limit_files=[ENOUGH_FOR_ALL_BUT_CHECKPOINTS])
    assert full.returncode == 1 and "warning: " in full.printed and "File too large" in full.printed
    assert "Epoch[002/002], Step[0003/0004]" in full.printed
    assert (folder / "last.pth").read_bytes() == before and not list(folder.glob(".*.tmp"))
    assert start(tmp_path / "o").returncode == 0
    assert run_hash(folder) == unbroken()


@pytest.mark.long
def test_disk_too_small_for_one_checkpoint_is_refused(tmp_path, tiny, monkeypatch):
    usual, room = shutil.disk_usage, []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usual(path)._replace(**room[-1]))

    def start(free: int, *words: str, total: int = 2**40):
        room.append({"total": total, "free": free})
        return typed("main_single_gpu.py", "-cfg", tiny, "-output", tmp_path / "o", "-epochs", "1", *words)

    start(1000).refused("SAVE", "-output", "1,000 bytes")
    start(0).refused("SAVE", "-output")
    assert not (tmp_path / "o").exists()
    assert rows(start(1000, "-check", "-check_images", "10").stdout)["disk"][0] == "WRONG"
    start(0, total=0).done()  # a file system that does not report its size
    folder = run_folder(tmp_path / "o")
    size = (folder / "last.pth").stat().st_size
    before = {path: path.read_bytes() for path in folder.iterdir() if path.name != "log.txt"}
    start(1000, "-resume", "auto", "-epochs", "2").refused("SAVE", folder)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.name != "log.txt"} == before
    start(1000, "-resume", "auto").done()  # the run is finished, so it saves nothing
    start(size, "-resume", "auto", "-epochs", "2").done()


def test_full_disk_does_not_end_a_run(small_disk, start, unbroken):
    full = start(small_disk / "o", "-opts", "SAVE_STEPS=2", fill_disk=[2, str(small_disk / "other")])
    folder, told = run_folder(small_disk / "o"), full.printed
    assert full.returncode == 1 and "Traceback" not in told, told
    for what in ("last.pth", "metrics", "status.json"):
        assert re.search(f"^warning: .*{what}", told, re.M), told
    assert "disk full" in told
    assert read_checkpoint(folder / "last.pth")["step"] == 2 and not list(folder.glob(".*.tmp"))
    assert '"step": 2' in (folder / "status.json").read_text()
    (small_disk / "other").unlink()
    assert start(small_disk / "o").returncode == 0
    assert run_hash(folder) == unbroken()


def test_folders_that_cannot_be_flushed_do_not_stop_a_run(tmp_path, tiny, monkeypatch):
    flushed = []

    def fsync(file: int) -> None:
        flushed.append(stat.S_ISDIR(os.fstat(file).st_mode))
        if flushed[-1]:
            raise OSError(errors.pop(), "some shared folders cannot be flushed")

    monkeypatch.setattr(os, "fsync", fsync)
    errors = [errno.EINVAL, errno.EBADF] * 1000
    typed("main_single_gpu.py", "-cfg", tiny, "-output", tmp_path / "o", "-epochs", "1").done()
    assert any(flushed) and read_checkpoint(run_folder(tmp_path / "o") / "last.pth")["step"]
    errors = [errno.EIO]
    with pytest.raises(OSError, match="shared"):
        files.write_text(tmp_path / "a.txt", "a")


def test_unwritable_log_does_not_end_a_run(tmp_path, capsys):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log = Log(0)
    log.open(tmp_path)
    log.say("seen on the console")
    log.say("and this")
    log.close()
    seen = capsys.readouterr()
    assert seen.out == "seen on the console\nand this\n"
    assert seen.err.count("\n") == 1, "the warning must appear once"
    assert_names(seen.err, tmp_path / "log.txt", "disk full")


@pytest.mark.parametrize("below", ["read-only disk", "file"])
def test_output_that_cannot_be_created_is_refused_before_reading_data(tmp_path, start, below, request):
    (tmp_path / "file").touch()
    output = tmp_path / "file" if below == "file" else request.getfixturevalue("read_only_disk")
    refused = start(output / "o", "-dataset", "imagenet2012", "-data_path", str(tmp_path / "nowhere"))
    refused.refused("error: SAVE", "-output", output)
    assert "nowhere" not in refused.printed


@pytest.mark.long
def test_run_folder_in_use_by_another_run_stays_unchanged(tmp_path, start):
    assert start(tmp_path / "o", kill_at=[2, 0]).returncode == -signal.SIGKILL
    folder = run_folder(tmp_path / "o")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    first, _ = lock_folder(folder)
    refused = start(tmp_path / "o", "-dataset", "imagenet2012", "-data_path", str(tmp_path / "nowhere")).refused()
    assert "nowhere" not in refused.printed
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    first.close()
    assert start(tmp_path / "o").returncode == 0
