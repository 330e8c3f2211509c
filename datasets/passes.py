"""Passes over images without a model: threads read ahead, and the results come in order, with a progress bar."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from datasets.pixels.rules import ImageReadError
from utils.host import count_cores
from utils.log import shown

FEWEST_THREADS = 8  # reading waits for the disk, so even few cores have several threads
AHEAD_PER_THREAD = 8
Task = TypeVar("Task")
Found = TypeVar("Found")


def read_ahead(tasks: Iterable[Task], ahead: int) -> Iterator[Task]:
    """Yield tasks in order.

    Taking a task from `tasks` starts it, and `ahead` more are taken before a task is yielded.
    """
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
    num_threads: int | None = None,
    ahead: int = AHEAD_PER_THREAD,
) -> Iterator[tuple[int, Found | ImageReadError]]:
    """Yield each index and what `work` returns for it, or the error if its image cannot be read.

    `title`: the title of the progress bar; "": there is no bar. `num_threads`: by default, one for each core, and at
    least 8. `ahead`: how many results of each thread may wait until they are used. Closing the iterator ends the
    threads.
    """
    num_threads = num_threads or max(FEWEST_THREADS, count_cores())

    def attempt(index: int) -> tuple[int, Found | ImageReadError]:
        try:
            return index, work(index)
        except ImageReadError as error:
            return index, error

    with ThreadPoolExecutor(num_threads, title) as pool:
        try:
            futures = read_ahead((pool.submit(attempt, index) for index in indices), num_threads * ahead)
            if title:
                futures = shown(futures, title, len(indices))
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
