"""Which halfstep runs, and the exit code of what went wrong."""

import shutil
import signal
import subprocess

import pytest

from utils import VERSION
from utils.errors import AlreadyReportedError, ConfigError, LostProcess, StoppedBySignal
from utils.program import judge, revision


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_revision_names_version_and_commit_and_needs_no_git(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert revision(tmp_path) == VERSION
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    version, _, found = revision(tmp_path).partition(", commit ")
    assert version == VERSION and len(found) >= 7 and commit.startswith(found)
    (tmp_path / "file").write_text("2")
    assert revision(tmp_path).endswith(f"{found}-dirty")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert VERSION in revision(tmp_path)


@pytest.mark.parametrize(
    ("error", "code", "is_told"),
    [
        (ConfigError("TRAIN.BASE_LR"), 2, True),
        (AlreadyReportedError("by process 0", 3), 3, False),
        (StoppedBySignal(signal.SIGTERM, "early"), 143, True),
        (LostProcess("process 1"), 1, True),
        (KeyboardInterrupt(), 130, False),
        (MemoryError(), 2, True),
        (RuntimeError("C++ compile error ... final link failed: No space left on device"), 2, True),
        (RuntimeError("C++ compile error ... unknown type"), 1, False),
    ],
)
def test_the_exit_code_of_an_error_and_whether_a_line_tells_of_it(error, code, is_told):
    found, message = judge(error)
    assert (found, bool(message)) == (code, is_told)


def test_a_mistake_of_ours_ends_with_1_and_needs_a_traceback():
    assert judge(AssertionError("ours")) == (1, None)
