"""Progress bars of tqdm on stderr, shown only on a terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

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
