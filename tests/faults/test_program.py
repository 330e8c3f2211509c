"""The version of halfstep that runs, exit codes of errors, and signals that stop a run."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.support.cases import cases_of, value_of
from tests.support.configs import SMALL
from tests.support.forks import DEADLINE, start_fork
from tests.support.refusals import refused
from tests.support.runs import ROOT, typed
from utils import VERSION, errors
from utils.errors import ConfigError, cause_of, naming_damage
from utils.program import StopSignal, exit_code, exit_code_and_message
from utils.revision import revision
from utils.seed import make_deterministic

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_revision_names_version_and_commit_without_needing_git(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("error", cases_of("errors"))
def test_each_error_gives_its_exit_code_and_printed_message(error):
    code, message = exit_code_and_message(eval(error, vars(errors)))
    assert repr((int(code), message)) == value_of("errors", error)


def test_cause_of_error_is_the_underlying_system_message():
    failed = RuntimeError("write failed")
    failed.__context__ = ValueError()
    failed.__context__.__context__ = OSError(errno.EACCES, "Permission denied")
    full = OSError(errno.ENOSPC, "No space left on device")
    others = {OSError("no answer"): "no answer", KeyError(): "KeyError", RuntimeError("odd"): "odd"}
    for error, words in {failed: "Permission denied", full: "disk full; free some space", **others}.items():
        assert cause_of(error) == words


@pytest.mark.parametrize("kind", [ZeroDivisionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError])
def test_error_while_reading_is_reported_as_damage_unless_memory_ran_out(kind):
    with refused(ConfigError, "x.pth", kind.__name__, "odd"), naming_damage("x.pth"):
        raise kind("odd\nand more")
    with pytest.raises(kind), naming_damage("x.pth"):
        raise kind("CUDA out of memory")


@pytest.mark.parametrize("typed", cases_of("two_dashes"))
def test_two_dashes_before_a_flag_work_like_one_dash(typed):
    passed = []
    assert exit_code(lambda arguments: passed.extend(arguments) or 0, typed.split()) == 0
    assert " ".join(passed) == value_of("two_dashes", typed)


ENDLESS = "from utils.program import exit_code\nexit(exit_code(lambda _: [print(n) for n in range(10**7)] and 1, []))"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_output_pipe_ends_a_program_quietly(unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", ENDLESS]
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT}
    with subprocess.Popen(command, **options) as program:
        program.stdout.readline()
        program.stdout.close()
        assert (program.wait(), program.stderr.read()) == (0, b"")


@pytest.mark.usefixtures("signal_handlers")
def test_repeated_signal_within_seconds_counts_once(monkeypatch):
    now, codes = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = StopSignal()
    assert stop.number == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert (stop.number, codes) == (signal.SIGTERM, [])
    for now[0], number in ((100.0, signal.SIGTERM), (102.9, signal.SIGINT)):
        os.kill(os.getpid(), number)
    assert (stop.number, codes) == (signal.SIGTERM, []), "Ctrl-C may arrive twice, because torchrun forwards it"
    now[0] = 103.1
    os.kill(os.getpid(), signal.SIGINT)
    assert codes == [128 + signal.SIGINT]


def test_deterministic_runs_disable_autotuning_and_memory_filling():
    filled, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn
    chosen, cudnn.benchmark = cudnn.benchmark, True
    try:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        make_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled() and not cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark = chosen
        torch.utils.deterministic.fill_uninitialized_memory = filled


def test_every_program_handles_flags_and_errors_of_all_programs():
    """exit_code opens closed streams, answers -version and prints errors."""
    for path in [*ROOT.glob("main_*.py"), *ROOT.glob("scripts/*.py")]:
        if '__name__ == "__main__"' in (text := path.read_text()):
            assert "(exit_code(main, " in text, path.name


@pytest.mark.long
def test_run_with_closed_stderr_leaves_lock_file_empty(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    words = [sys.executable, str(ROOT / "main_single_gpu.py"), "-cfg", str(tmp_path / "small.yaml"), "-epochs", "1"]
    words += ["-output", str(tmp_path / "runs"), "-name", "run"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *words], stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == 0
    assert (tmp_path / "runs/run/.lock").read_bytes() == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_child_processes_get_streams_that_were_closed_at_the_start(closed):
    program = "import subprocess; from utils.program import open_closed_streams; open_closed_streams()"
    program += "; subprocess.run(['sh', '-c', 'cat <&0 && echo text && echo text >&2'], check=True)"
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program]
    assert subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=300).returncode == 0


@pytest.mark.slow
def test_console_that_takes_no_lines_fails_a_check_and_an_evaluation(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    words = ["-cfg", tmp_path / "small.yaml", "-output", tmp_path / "output", "-name", "run", "-epochs", "1"]
    typed("main_single_gpu.py", *words).done()
    for more in (["-check", "-check_images", "10"], ["-eval", "-pretrained", str(tmp_path / "output/run")]):
        (tmp_path / "stderr").write_text("")
        words = ["-cfg", str(tmp_path / "small.yaml"), *more]
        outputs = ["/dev/full", str(tmp_path / "stderr")]
        ended = start_fork(str(ROOT / "main_single_gpu.py"), words, outputs, {}, tmp_path)
        ended.join(DEADLINE)
        (line,) = (tmp_path / "stderr").read_text().splitlines()
        assert ended.exitcode == 1 and line.startswith("error: ") and "disk full" in line


@pytest.mark.slow
def test_list_of_commands_without_a_reader_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, ROOT / "halfstep/__main__.py"]
    ended = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
