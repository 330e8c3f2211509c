"""A run whose folder is moved, replaced or deleted ends with a message, and writes nothing to the folder in its place."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.checkpoint.format import keep_as, remove_old
from tests.support.planted import OF_ANOTHER_RUN
from tests.support.refusals import assert_names, refused
from tests.support.runs import Ended, status_of
from utils.files import LineFile, replacing, write_text
from utils.held_folders import FolderMoved, HeldFolder, check_in_place

pytestmark = pytest.mark.slow

FAST = ("-name", "exp", "-opts", "VALIDATE_FREQ=1", "SAVE_STEPS=2")
SHARDED = ("-batch_size", "4", *FAST, "DIST.STRATEGY=fsdp2")


def assert_ended(output: Path, ended: Ended, where: str = "moved") -> None:
    """Assert that the run ended with code 1 and one line, and that the run in its place is unchanged."""
    assert set(ended.codes) == {1} and "Traceback" not in ended.printed, ended.printed
    found = {path.relative_to(output / "exp").as_posix() for path in (output / "exp").rglob("*")}
    assert found == set(OF_ANOTHER_RUN)
    assert {(output / "exp" / name).read_text() for name in OF_ANOTHER_RUN} == {"of another run"}
    assert_names(ended.stderr, "error: SAVE: ", output / "exp", output / where)
    assert "\n  continue" not in ended.stdout, "this command would continue the other run"


@pytest.mark.parametrize("moment", ["a save", "a rename", "a sign of life"])
def test_moved_run_reports_a_failed_save_in_its_own_folder(tmp_path, start, moment):
    ended = start(tmp_path, *FAST, move_folder=[str(tmp_path), moment], keep_statuses=[str(tmp_path) + ".kept"])
    assert_ended(tmp_path, ended)
    status = status_of(tmp_path / "moved")
    assert (status["state"], status["exit_code"]) == ("save_failed", 1)
    assert_names(status["reason"], tmp_path / "exp", tmp_path / "moved")
    assert str(tmp_path / "moved") in (tmp_path / "moved/log.txt").read_text()


@pytest.mark.parametrize(
    ("moment", "flags"),
    [
        ("the figures", []),
        ("the pictures", []),
        ("the trackers", ["TRACK=tensorboard"]),
        ("the report", ["REPORT=true"]),
        ("a trace", ["PROFILE=1"]),
    ],
)
def test_moved_run_never_writes_to_the_folder_replacing_it(tmp_path, start, moment, flags):
    ended = start(tmp_path, *FAST, *flags, draw_nothing=[], move_folder=[str(tmp_path), moment])
    assert_ended(tmp_path, ended)


@pytest.mark.parametrize(("flags", "moment", "rank"), [(FAST, "a save", 0), (SHARDED, "a sharded save", 1)])
def test_moving_the_folder_of_a_run_ends_all_its_processes(tmp_path, start, flags, moment, rank):
    ended = start(tmp_path, *flags, processes=2, move_folder=[str(tmp_path), moment, rank])
    assert_ended(tmp_path, ended)
    assert status_of(tmp_path / "moved")["state"] == "save_failed"


@pytest.mark.parametrize("processes", [1, 2])
def test_run_moved_before_first_update_reports_failed_save(tmp_path, start, processes):
    move = [str(tmp_path), "the start", 0, False]
    ended = start(tmp_path, "-name", "exp", processes=processes, move_folder=move)
    assert set(ended.codes) == {1}, ended.printed
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    assert status_of(tmp_path / "moved")["state"] == "save_failed"


@pytest.fixture
def held(tmp_path) -> Iterator[HeldFolder]:
    """Return the folder of a run."""
    (tmp_path / "o/exp").mkdir(parents=True)
    (tmp_path / "o/exp/.lock").touch()
    held = HeldFolder(tmp_path / "o/exp")
    yield held
    held.release()


def replace_lock(folder: Path) -> None:
    (folder / ".lock.new").touch()
    (folder / ".lock.new").rename(folder / ".lock")


CHANGES = {
    "deleted": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "its path leads nowhere": lambda folder: folder.parent.rename(folder.parent.with_name("p")),
    "taken by another run": replace_lock,
}


@pytest.mark.parametrize("change", CHANGES)
def test_writes_to_a_moved_folder_are_refused(held, change):
    check_in_place(held.path / "shards/x.pth")
    CHANGES[change](held.path)
    for write in (write_text, lambda path, text: keep_as(path, path), lambda path, text: remove_old(path.parent, 0)):
        with refused(FolderMoved, "SAVE", held.path):
            write(held.path / "last.pth", "")
    check_in_place(held.path.with_name("other"))


def test_folder_moved_during_a_write_receives_no_file(held):
    with refused(FolderMoved, "SAVE", held.path), replacing(held.path / "last.pth") as file:
        file.write(b"weights")
        CHANGES["moved"](held.path)
        held.path.mkdir()
        (held.path / ".last.pth.tmp").write_text("of another run")
    assert [path.name for path in held.path.iterdir()] == [".last.pth.tmp"]


@pytest.mark.parametrize("change", CHANGES)
def test_log_of_a_moved_folder_stays_linked_to_its_snapshot(held, change):
    log, snapshot = LineFile(held.path / "log.txt"), held.path.parents[1] / "snapshot.txt"
    snapshot.hardlink_to(held.path / "log.txt")
    CHANGES[change](held.path)
    log.write("a line\n")
    log.close()
    assert snapshot.read_text() == "a line\n"


def test_deleted_lock_file_does_not_end_a_run(held):
    (held.path / ".lock").unlink()
    check_in_place(held.path / "last.pth")
