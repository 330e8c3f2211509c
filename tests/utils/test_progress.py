"""Progress bars: only on a terminal, removed at the end, and below the lines of the log."""

import io
import sys
from unittest.mock import Mock

from tqdm import tqdm

from tests.support.terminals import visible
from utils.log import Log
from utils.progress import is_terminal, shown


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


def test_progress_bar_shows_images_and_metrics_then_disappears(monkeypatch):
    terminal, log = make_terminal(monkeypatch), Log(rank=0)
    monkeypatch.setattr(tqdm, "update", draw_at_once)
    log.start_bar(1408, 128, "epoch 2/3")
    log.describe_bar(lambda: "3:12 left, loss 0.831")
    log.move_bar(576)
    assert visible(terminal.getvalue())[-1].startswith("epoch 2/3:  50%|")
    assert visible(terminal.getvalue())[-1].endswith("| 704/1408 images, 3:12 left, loss 0.831")
    log.end_bar()
    assert visible(terminal.getvalue()) == [""]


def draw_at_once(bar: tqdm, count: int) -> None:
    bar.n += count
    bar.refresh()


def test_log_line_appears_above_the_progress_bar(monkeypatch):
    terminal, log = make_terminal(monkeypatch), Log(rank=0)
    log.start_bar(10, 0, "epoch 1/3")
    log.say("a line")
    line, bar = visible(terminal.getvalue())
    assert line == "a line" and bar.startswith("epoch 1/3:   0%|")
    log.close()
    assert visible(terminal.getvalue()) == ["a line", ""]


def test_items_advance_the_progress_bar_by_their_size(monkeypatch):
    terminal, log = make_terminal(monkeypatch), Log(rank=0)
    monkeypatch.setattr(tqdm, "update", draw_at_once)
    seen = []
    for item in shown([1, 2], "reading", 6, size=lambda each: each, unit="rows"):
        log.say(f"item {item}")
        seen.append(visible(terminal.getvalue())[-1])
    assert seen[0].startswith("reading:   0%|") and seen[1].startswith("reading:  17%|") and " 1/6 " in seen[1]
    assert visible(terminal.getvalue()) == ["item 1", "item 2", ""], "the bar must be gone, even within two seconds"


def test_instant_work_draws_no_progress_bar(monkeypatch):
    terminal = make_terminal(monkeypatch)
    assert list(shown(range(3), "reading", 3)) == [0, 1, 2]
    assert terminal.getvalue().strip("\r ") == ""


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
