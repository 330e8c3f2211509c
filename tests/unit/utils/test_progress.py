"""Progress bars: only on a terminal, removed at the end, and below the lines of the log."""

import io
import sys
from unittest.mock import Mock

from utils.log import Log, is_terminal, shown


def make_terminal(monkeypatch) -> io.StringIO:
    """Return a stream that receives everything written to a terminal on stdout and stderr.

    Not a fixture, because pytest sets its own streams between setup and test.
    """
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "90")
    return terminal


def test_progress_bar_writes_nothing_without_a_terminal(monkeypatch):
    terminal, file = make_terminal(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)  # like `| tee`
    assert not is_terminal() and not Log(rank=0).on_terminal
    assert list(shown(range(3), "reading", 3)) == [0, 1, 2]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal()
    assert terminal.getvalue() == file.getvalue() == ""


def test_lost_terminal_ends_only_the_progress_bar(monkeypatch):
    terminal, log = make_terminal(monkeypatch), Log(rank=0)
    log.start_bar(10, 0, "epoch 1/3")
    monkeypatch.setattr(terminal, "write", Mock(side_effect=OSError(5, "Input/output error")))
    for _ in range(3):
        log.move_bar(1)
        log.say("a line")
    log.end_bar()
    assert list(shown(range(3), "reading", 3)) == [0, 1, 2]
