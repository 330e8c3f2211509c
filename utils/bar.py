"""A progress bar on a terminal, drawn anew each second, however long the work between two steps takes."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from utils.text import format_time

T = TypeVar("T")

SECONDS = 1.0  # between two drawings
WIDEST = 24  # characters within the brackets
NARROWEST = 5

_lock = threading.RLock()  # of the terminal: lines and the bar are written by several threads
_bar: "Bar | None" = None  # the one that is shown


def is_terminal() -> bool:
    """Whether a person sees both streams, on a terminal that can go back to the start of a line."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class Bar:
    """How much of something that takes time is done, on stderr; nothing where there is no terminal. A thread draws it:
    counting costs the training nothing, and a slow update does not look like a stopped program."""

    def __init__(self, title: str, total: int, done: int = 0, unit: str = "images", delay: float = 0.5):
        """`delay`: seconds before it appears; what is over by then needs none."""
        self.title, self.total, self.unit = title, total, unit
        self.describe: Callable[[], str] = self._time_left  # what stands at its end, most important first
        self._done = self._first = done
        self._start, self._delay, self._length = time.monotonic(), delay, 0
        self._ended = threading.Event()
        if is_terminal():
            threading.Thread(target=self._draw_until_the_end, name="bar", daemon=True).start()

    def move(self, count: int) -> None:
        self._done += count

    def close(self) -> None:
        """Take it off the terminal."""
        global _bar
        with _lock:
            self._ended.set()
            self.clear()
            _bar = None if _bar is self else _bar

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _draw_until_the_end(self) -> None:
        global _bar
        wait = self._delay
        while not self._ended.wait(wait):
            with _lock:
                if not self._ended.is_set():
                    _bar = self
                    self.draw()
            wait = SECONDS

    def draw(self) -> None:
        text = self.line(shutil.get_terminal_size().columns - 1)
        self._write(f"\r{text}{' ' * (self._length - len(text))}")
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            self._write(f"\r{' ' * self._length}\r")
            self._length = 0

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone; the program goes on
            sys.stderr.write(text)
            sys.stderr.flush()

    def line(self, width: int) -> str:
        """The bar in at most `width` characters; where that is few, without the picture of a bar."""
        share = self._done / max(self.total, 1)
        head = f"{self.title} {share:4.0%}"
        tail = f" {self._done:,}/{self.total:,} {self.unit}, {self.describe()}"
        length = min(WIDEST, width - len(head) - len(tail) - 3)
        if length >= NARROWEST:
            full = min(length, int(length * share))
            head += f" [{'=' * full}{'>' * (full < length)}{' ' * (length - full - 1)}]"
        return (head + tail)[:width]

    def _time_left(self) -> str:
        passed, count = time.monotonic() - self._start, self._done - self._first
        left = f", {format_time(passed / count * (self.total - self._done))} left" if count else ""
        return f"{format_time(passed)} so far{left}"


@contextlib.contextmanager
def without_bar() -> Iterator[None]:
    """Print inside this on lines of its own, with the bar below them."""
    with _lock:
        if _bar:
            _bar.clear()
        try:
            yield
        finally:
            if _bar:
                _bar.draw()


def shown(
    items: Iterable[T], title: str, total: int, size: Callable[[T], int] = lambda item: 1, unit: str = "images"
) -> Iterator[T]:
    """The items, with a bar where that takes more than two seconds. `size`: how much of the total one of them is."""
    with Bar(title, total, unit=unit, delay=2.0) as bar:
        for item in items:
            yield item
            bar.move(size(item))
