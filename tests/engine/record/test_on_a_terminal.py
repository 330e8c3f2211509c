"""A run as a user sees it on a terminal, and the suggested commands at its end."""

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.support.configs import SMALL
from tests.support.forks import DEADLINE, ROOT, start_fork
from tests.support.runs import run


def run_on_terminal(script: str, *arguments: str, columns: int = 80, **options) -> tuple[int, str]:
    """Run a program. Return its exit code and everything that it wrote. For the options see start_fork."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    options.setdefault("environment", {"TERM": "xterm"})
    process = start_fork(str(ROOT / script), arguments, [os.ttyname(terminal)] * 2, **options)
    written = b""
    while (is_there := select.select([controller], [], [], 0.05)[0]) or process.is_alive():
        if is_there:
            written += os.read(controller, 2**16)
    process.join(DEADLINE)
    os.close(controller)
    os.close(terminal)
    return process.exitcode, written.decode().replace("\r\n", "\n")


def visible(written: str) -> list[str]:
    """Return the lines that stay on a terminal: text after a carriage return overwrites the text before it."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for text in line.split("\r"):
            shown = text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines


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
