"""Passes over images without a model: threads read ahead, and the results come in order, with a progress bar."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from datasets.pixels.rules import ImageReadError
from utils.log import shown

NUM_THREADS, AHEAD_PER_THREAD = 8, 8
Task = TypeVar("Task")
Found = TypeVar("Found")


def read_ahead(tasks: Iterable[Task], ahead: int) -> Iterator[Task]:
    """Yield tasks in order. Taking a task from `tasks` starts it, and `ahead` more are taken before a task is yielded."""
    started = iter(tasks)
    waiting = deque(itertools.islice(started, ahead))
    while True:
        waiting.extend(itertools.islice(started, 1))
        if not waiting:
            return
        yield waiting.popleft()


def read_each(
    indices: Sequence[int],
    work: Callable[[int], Found],
    title: str,
    num_threads: int = NUM_THREADS,
    ahead: int = AHEAD_PER_THREAD,
) -> Iterator[tuple[int, Found | ImageReadError]]:
    """Yield each index and what `work` returns for it, or the error if its image cannot be read.

    `title`: of the progress bar; "": none. `ahead`: the number of results for each thread that may wait until they are used. Closing the iterator ends the threads.
    """

    def attempt(index: int) -> tuple[int, Found | ImageReadError]:
        try:
            return index, work(index)
        except ImageReadError as error:
            return index, error

    with ThreadPoolExecutor(num_threads, title) as pool:
        try:
            futures = read_ahead((pool.submit(attempt, index) for index in indices), num_threads * ahead)
            yield from (future.result() for future in (shown(futures, title, len(indices)) if title else futures))
        finally:
            pool.shutdown(cancel_futures=True)
