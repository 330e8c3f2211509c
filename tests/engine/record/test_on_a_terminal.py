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
