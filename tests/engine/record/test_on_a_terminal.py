"""A run as a user sees it on a terminal, and the suggested commands at its end."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.configs import SMALL
from tests.support.forks import ROOT
from tests.support.runs import run
from tests.support.terminals import run_on_terminal, visible

pytestmark = pytest.mark.slow

ODD = 'it\'s a "folder" of $HOME'


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> tuple[Path, str]:
    """Return the folder of a run of two epochs on a terminal, and everything that it printed."""
    folder = tmp_path_factory.mktemp("seen") / ODD
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL)
    flags = ["-cfg", str(folder / "small.yaml"), "-output", str(folder), "-name", "mine", "-epochs", "2", "-amp"]
    code, written = run_on_terminal("main_single_gpu.py", *flags, faults={"draw_each_update": [], "draw_no_curves": []})
    assert code == 0, written
    return folder / "mine", written


def test_terminal_shows_one_line_per_epoch(seen):
    lines = [line for line in visible(seen[1]) if line]
    epochs = [line for line in lines if re.match(r" *[12]/2 ", line)]
    assert [line.split()[0] for line in epochs] == ["1/2", "2/2"]
    assert len(lines) - len(epochs) <= 25
    assert len(set(lines)) == len(lines), "no line may be printed twice"
    assert not [line for line in lines if "Epoch[" in line or " left, loss" in line]
    passing = {part for line in seen[1].split("\n") for part in line.split("\r")[:-1]}
    assert {part.strip().split(" ")[0] for part in passing} <= {"", "epoch", "evaluating:"}


def test_progress_bar_shows_images_and_metrics_per_update(seen):
    drawn = re.findall(r"\repoch 1/2: +(\d+)%\|.*?\| (\d+)/1408 images, ([^\r\n]*)", seen[1])
    assert sorted({int(done) for _, done, _ in drawn} - {0}) == list(range(32, 1409, 32))
    percent, _, figures = drawn[-1]
    assert percent == "100" and "loss" in figures and "acc" in figures and "scale" not in figures


def test_log_file_has_paddlevit_lines_instead_of_the_table(seen):
    log = (seen[0] / "log.txt").read_text()
    assert "----- Epoch[002/002], Validation Loss: " in log and "Epoch[002/002], Step[0000/0044], Lr: " in log
    assert "images/s, " in log and "val loss" not in log and "%|" not in log
    assert "0 skipped" not in log and "loss scale" not in log and " 0.0%" not in log


def test_evaluation_prints_one_line_and_logs_paddlevit_lines(seen, tmp_path):
    words = ["-eval", "-pretrained", str(seen[0]), "-output", str(tmp_path), "-name", "mine"]
    code, written = run_on_terminal("main_single_gpu.py", *words, faults={"draw_no_curves": []})
    assert code == 0, written
    (line,) = [line for line in visible(written) if "top-1" in line]
    assert re.search(r"top-5 [\d.]+%, loss \d\.\d{4} of 359 images", line) and "Acc@5" not in written
    log = (tmp_path / "mine" / "log.txt").read_text()
    assert "Validation Acc@5: " in log and line in log


def test_suggested_next_commands_work_in_a_shell(seen):
    folder, written = seen
    lines = visible(written)
    commands = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines[lines.index("next:") + 1 :] if line)
    assert set(commands) >= {"export", "train longer"}
    assert shlex.split(commands["train longer"])[-4:] == ["-resume", str(folder), "-epochs", "4"]
    words = ["sh", "-c", f"printf '%s\\0' {commands['export']}"]
    python, script, *arguments = subprocess.check_output(words, cwd=ROOT, text=True).split("\0")[:-1]
    assert shutil.which(python) and (ROOT / script).is_file()
    assert run(script, *arguments).returncode == 0 and (folder / "best.safetensors").is_file()
