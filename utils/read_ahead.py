"""Reads ahead: starts later tasks before the result of a task is used."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

Task = TypeVar("Task")


def read_ahead(tasks: Iterable[Task], ahead: int) -> Iterator[Task]:
    """Yield tasks in order. Taking a task from `tasks` starts it, and `ahead` more are taken before a task is yielded."""
    started = iter(tasks)
    waiting = deque(itertools.islice(started, ahead))
    while True:
        waiting.extend(itertools.islice(started, 1))
        if not waiting:
            return
        yield waiting.popleft()
