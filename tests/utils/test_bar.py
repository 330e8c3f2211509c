"""The progress bar: what it says at which width, and that it moves without being told."""

import io
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import utils.bar
from tests.support.runs import wait_until
from utils.bar import Bar, is_terminal, shown, without_bar


def make_terminal(monkeypatch) -> io.StringIO:
    """What is written to a terminal on which a bar is drawn every hundredth of a second.

    Not a fixture: between set-up and test pytest puts its own streams in their place.
    """
    monkeypatch.setattr(utils.bar, "SECONDS", 0.01)
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        stream.isatty = lambda: True
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return sys.stderr


def test_it_is_drawn_again_and_again_also_when_nothing_moves(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with Bar("reading", 10, delay=0.0) as bar:
        bar.describe = lambda: f"drawn {terminal.getvalue().count('reading')} times before"
        wait_until(lambda: "drawn 3 times before" in terminal.getvalue())
        bar.move(4)
        wait_until(lambda: "4/10 images" in terminal.getvalue())
    assert terminal.getvalue().endswith("\r"), "it is gone in the end"
    assert terminal.getvalue().rpartition("\r")[0].rpartition("\r")[2].isspace()
    for thread in [each for each in threading.enumerate() if each.name == "bar"]:
        thread.join(5)
        assert not thread.is_alive(), "it would draw what is over"


def test_what_is_printed_stands_on_a_line_of_its_own_with_the_bar_below(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with Bar("reading", 10, delay=0.0):
        wait_until(lambda: terminal.getvalue())
        with without_bar():
            assert terminal.getvalue().endswith(" \r")
        assert "reading" in terminal.getvalue().rpartition("\r")[2]


@pytest.mark.parametrize("width", range(4, 120, 5))
def test_it_is_never_wider_than_the_terminal(width):
    bar = Bar("epoch 12/40", 1_281_167, 640_000)
    bar.describe = lambda: "3:12 left, loss 0.831, acc 71.2%, scale 65536"
    line = bar.line(width)
    assert len(line) <= width
    assert ("[" in line) == (width > 100) or 86 < width <= 100, "where there is no room, the picture goes first"
    assert width < 46 or "640,000/1,281,167 images" in line


def test_the_picture_is_as_full_as_its_share_and_items_count_what_they_are_of_the_whole(monkeypatch):
    for done, picture in ((0, f"[>{' ' * 23}]"), (2, f"[{'=' * 12}>{' ' * 11}]"), (9, f"[{'=' * 24}]")):
        assert picture in Bar("a", 4, done).line(100)
    bar, make = Bar("reading", 6, unit="rows"), Mock()
    make.return_value = bar
    monkeypatch.setattr(utils.bar, "Bar", make)
    assert list(shown([1, 2], "reading", 6, size=lambda each: each, unit="rows")) == [1, 2]
    assert " 50%" in bar.line(100) and " 3/6 rows" in bar.line(100)
    make.assert_called_once_with("reading", 6, unit="rows", delay=2.0)


def test_the_time_left_is_that_of_what_was_done_since_the_start(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(utils.bar, "time", clock)
    bar = Bar("epoch 2/3", 100, done=50)  # of a resumed run
    bar.move(10)
    clock.monotonic = lambda: 20.0
    assert "0:20 so far, 1:20 left" in bar.line(100)


def test_without_a_terminal_nothing_is_written(monkeypatch):
    terminal = make_terminal(monkeypatch)
    sys.stdout.isatty = lambda: False  # `| tee`
    assert not is_terminal()
    with Bar("reading", 10, delay=0.0) as bar:
        bar.move(10)
    assert list(shown(range(3), "reading", 3)) == [0, 1, 2]
    sys.stdout.isatty = lambda: True
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal()
    assert terminal.getvalue() == ""


def test_a_terminal_that_has_gone_ends_the_drawing_alone(monkeypatch):
    terminal = make_terminal(monkeypatch)
    terminal.write = Mock(side_effect=OSError(5, "Input/output error"))
    with Bar("reading", 2, delay=0.0) as bar:
        bar.draw()
        bar.move(2)
