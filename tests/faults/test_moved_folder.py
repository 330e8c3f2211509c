"""A run whose folder is moved, replaced or deleted ends with a message and saves nothing to the folder in its place."""

import shutil
from pathlib import Path

import pytest

from tests.support.planted import OF_ANOTHER_RUN
from tests.support.refusals import assert_names, refused
from tests.support.runs import Ended
from utils.files import FolderLock, FolderMoved

pytestmark = pytest.mark.slow

FAST = ("-name", "exp", "-opts", "VALIDATE_FREQ=1", "SAVE_STEPS=2", "REPORT=false")
SHARDED = ("-batch_size", "4", *FAST, "DIST.STRATEGY=fsdp2")


def assert_ended(output: Path, ended: Ended) -> None:
    """Assert that the run ended with code 1 and one line, and the other run's checkpoints and status are unchanged."""
    assert set(ended.codes) == {1} and "Traceback" not in ended.printed, ended.printed
    assert {(output / "exp" / name).read_text() for name in OF_ANOTHER_RUN} == {"of another run"}
    assert not {*(output / "exp").rglob("*.pth")} - {output / "exp" / name for name in OF_ANOTHER_RUN}
    assert_names(ended.stderr, "error: SAVE: ", output / "exp")
    assert "\n  continue" not in ended.stdout, "this command would continue the other run"


@pytest.mark.parametrize("moment", ["a save", "a write", "a sign of life", "the figures"])
def test_moved_run_never_saves_to_the_folder_replacing_it(tmp_path, start, moment):
    ended = start(tmp_path, *FAST, move_folder=[str(tmp_path), moment], keep_statuses=[str(tmp_path) + ".kept"])
    assert_ended(tmp_path, ended)


@pytest.mark.long
@pytest.mark.parametrize(("flags", "moment", "rank"), [(FAST, "a save", 0), (SHARDED, "a sharded save", 1)])
def test_moving_the_folder_of_a_run_ends_all_its_processes(tmp_path, start, flags, moment, rank):
    assert_ended(tmp_path, start(tmp_path, *flags, processes=2, move_folder=[str(tmp_path), moment, rank]))


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_run_moved_before_first_update_creates_no_folder_at_old_path(tmp_path, start, processes):
    ended = start(tmp_path, "-name", "exp", processes=processes, move_folder=[str(tmp_path), "the start", 0, False])
    assert set(ended.codes) == {1}, ended.printed
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


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
def test_lock_of_a_moved_folder_is_recognised(tmp_path, change):
    folder = tmp_path / "o/exp"
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    lock = FolderLock(folder)
    lock.check()
    CHANGES[change](folder)
    with refused(FolderMoved, "SAVE", folder):
        lock.check()
