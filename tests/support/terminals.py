"""Runs the real programs on a terminal, and returns what a user sees there."""

import fcntl
import os
import pty
import select
import struct
import termios

from tests.support.forks import DEADLINE, ROOT, start_fork


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
