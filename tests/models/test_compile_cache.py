"""Kernels of torch.compile lie in a folder of the user's own, and a run's processes share its cores to make them."""

import contextlib
import errno
import fcntl
import os
import stat
from unittest import mock

import pytest

from models.compilation import FOLDER, NUM_WORKERS, prepare_compiler
from tests.support.refusals import assert_names
from tests.support.runs import run
from utils.text import counted


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_the_users_own_also_where_it_was_open_to_others(tmp_path):
    for _ in range(2):
        environment = {"XDG_CACHE_HOME": str(tmp_path)}
        (line,) = prepare_compiler(environment, 4)
        folder = tmp_path / "halfstep" / "compile"
        assert environment[FOLDER] == str(folder)
        assert_names(line, folder)
        assert mode(folder) == mode(folder.parent) == 0o700
        folder.chmod(0o777)
        folder.parent.chmod(0o755)


def test_without_a_cache_folder_in_the_environment_it_lies_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for others in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        prepare_compiler(others, 4)
        assert others[FOLDER] == str(tmp_path / ".cache/halfstep/compile")


def test_what_the_user_set_stays(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), FOLDER: "mine", NUM_WORKERS: "1"}
    assert prepare_compiler(environment, 4) == []
    assert environment == {"XDG_CACHE_HOME": str(tmp_path), FOLDER: "mine", NUM_WORKERS: "1"}
    assert not list(tmp_path.iterdir())


UNUSABLE = {
    "of another user": mock.patch("os.geteuid", return_value=os.geteuid() + 1),
    "without locks": mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOSYS, "not implemented")),
    "read-only": mock.patch("tempfile.TemporaryFile", side_effect=OSError(errno.EROFS, "read-only")),
    "in a home that nobody knows": mock.patch("pathlib.Path.home", side_effect=RuntimeError("no home")),
    "below a file": contextlib.nullcontext(),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_folder_that_cannot_be_trusted_or_used_is_left_to_torch_in_one_line(tmp_path, case):
    (tmp_path / "file").touch()
    place = {"in a home that nobody knows": "", "below a file": str(tmp_path / "file")}.get(case, str(tmp_path))
    environment = {"XDG_CACHE_HOME": place}
    with UNUSABLE[case]:
        (line,) = prepare_compiler(environment, 4)
    assert FOLDER not in environment
    assert_names(line, FOLDER)


@pytest.mark.parametrize(("num_cores", "num_workers"), [(1, "1"), (12, "12"), (192, "32")])
def test_a_process_starts_no_more_compilers_than_its_share_of_the_cores(tmp_path, num_cores, num_workers):
    environment = {FOLDER: "mine"}
    prepare_compiler(environment, num_cores)
    assert environment[NUM_WORKERS] == num_workers


def test_processes_of_one_machine_share_its_cores_and_the_folder(small_yaml, tmp_path, monkeypatch):
    for name in (FOLDER, NUM_WORKERS):  # torch sets the first when it compiles, in other tests of this process
        monkeypatch.delenv(name, raising=False)
    flags = ["-cfg", str(small_yaml), "-compile", "-dataset", "imagefolder", "-data_path", "nowhere"]  # ends there
    flags += ["-output", str(tmp_path / "output")]
    ended = run("main_multi_gpu.py", *flags, processes=2, environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert ended.codes == [2, 2]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert_names(ended.stdout, tmp_path / "halfstep" / "compile", counted(share, "process"))


def test_without_a_compiler_on_this_machine_a_line_says_what_to_install(small_yaml, tmp_path):
    flags = ["-cfg", str(small_yaml), "-compile", "-output", str(tmp_path / "output")]
    ended = run("main_single_gpu.py", *flags, environment={"PATH": str(tmp_path), "CXX": "g++", FOLDER: str(tmp_path)})
    assert ended.returncode == 2
    assert_names(ended.stderr, "-compile", "g++", "CXX")
    assert "Traceback" not in ended.stderr
