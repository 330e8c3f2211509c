"""The log of a run: the console, log.txt, log_{rank}.txt for each of several processes, and a progress bar.

A terminal shows one line per epoch and the progress bar. Files and pipes get every line in PaddleViT's format.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from utils.errors import cause_of
from utils.files import LineFile
from utils.text import printable, warning

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} images{postfix}"


class Log:
    """A log to the console and the run folder. Only rank 0 prints. With several ranks, each has its own file."""

    def __init__(self, rank: int, world_size: int = 1, part: str = ""):
        """`part`: the title of the progress bar of a run that is a part of another run, and prints nothing else."""
        self._rank, self._world_size, self._part = rank, world_size, part
        self._early: list[str] = []  # lines that were logged before the folder existed
        self._files: list[LineFile] = []
        self._has_failed = False
        self.unprinted: OSError | None = None  # why lines are missing on the console, unless nobody reads it
        self._bar: tqdm | None = None
        self.on_terminal = rank == 0 and is_terminal()
        self._lock = threading.RLock()  # the thread that saves checkpoints also logs

    def open(self, folder: Path) -> None:
        """Write the lines logged so far, and all further lines, to files in this folder."""
        names = ["log.txt"] if self._rank == 0 else []
        if self._world_size > 1:
            names.insert(0, f"log_{self._rank}.txt")
        self._files = [LineFile(folder / name) for name in names]
        for text in self._early:
            self._write_stamped(text)
        self._early = []

    def say(self, *lines: str) -> None:
        """Print lines on rank 0 and write them to every rank's file."""
        for line in lines:
            with self._lock:
                if self._rank == 0 and not self._part:
                    self._print(line)
                self.note(line)

    def _print(self, line: str) -> None:
        with tqdm.external_write_mode() if self.on_terminal else contextlib.nullcontext():  # print above the bar
            # Escape characters that stdout's encoding lacks, for example on a terminal without UTF-8.
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            try:
                print(printable(line).encode(encoding, "backslashreplace").decode(encoding), flush=True)
            except OSError as error:  # `| head` has ended or the terminal is closed; the run continues
                if error.errno not in (errno.EPIPE, errno.EIO):
                    self.unprinted = error
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def detail(self, line: str) -> None:
        """Write a detailed line to the files. On a terminal it is not printed, because `show` prints a short line."""
        (self.note if self.on_terminal else self.say)(line)

    def show(self, line: str) -> None:
        """Print a short line if the console is a terminal. `detail` writes the full line to the files."""
        if self.on_terminal and not self._part:
            self._print(line)

    def warn(self, line: str) -> None:
        """Print a warning from any rank."""
        if self._rank == 0:
            self.say(warning(line))
        else:
            print(f"warning (process {self._rank}): {printable(line)}", file=sys.stderr, flush=True)
            self.note(warning(line))

    def note(self, line: str) -> None:
        """Write text to this rank's files only, with date and time before each line, as in PaddleViT's logs."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        self._write_stamped("".join(f"{stamp}{each}\n" for each in printable(line).split("\n")))

    def _write_stamped(self, text: str) -> None:
        with self._lock:
            if not self._files:
                self._early.append(text)
            for file in self._files:
                with self._warn_once(file.path):  # if the disk is full, the line is kept for the next write
                    file.write(text)

    @contextlib.contextmanager
    def _warn_once(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                text = warning(f"cannot write {path} ({cause_of(error)}); lines may be missing from this file")
                print(text, file=sys.stderr)
            self._has_failed = True

    def start_bar(self, total: int, initial: int, title: str) -> None:
        """Show a progress bar that counts images, if the console is a terminal."""
        if self.on_terminal:
            whole_title = f"{self._part}, {title}" if self._part else title
            self._bar = progress_bar(whole_title, total, initial=initial, bar_format=BAR)

    def move_bar(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def describe_bar(self, describe: Callable[[], str]) -> None:
        """Set the text shown at the end of the bar when it is next drawn. Without a bar, `describe` is not called."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(), refresh=False)

    def end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        self.end_bar()
        for file in self._files:
            with self._warn_once(file.path):
                file.close()
        self._files = []


# --- progress bars ---


T = TypeVar("T")


def is_terminal() -> bool:
    """Return whether stdout and stderr are terminals that can overwrite the current line."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def progress_bar(title: str, total: int, unit: str = "images", **options) -> tqdm:
    """Return a bar that is as wide as the terminal and disappears at its end. `options` are passed to tqdm."""
    return tqdm(desc=title, total=total, unit=f" {unit}", leave=False, dynamic_ncols=True, **options)


def shown(
    items: Iterable[T], title: str, total: int, size: Callable[[T], int] = lambda item: 1, unit: str = "images"
) -> Iterator[T]:
    """Yield the items. On a terminal, show a progress bar after two seconds.

    `size` returns how much an item adds to the progress, in the unit of `total`.
    """
    if not is_terminal():
        yield from items
        return
    with progress_bar(title, total, unit, delay=2.0) as bar:
        try:
            for item in items:
                yield item
                bar.update(size(item))
        finally:
            bar.clear()  # tqdm does not clear a bar that a log line drew before the two seconds were over
