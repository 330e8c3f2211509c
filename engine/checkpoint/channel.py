"""Communication between the writing threads of all processes, independent of the training."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.distributed import Process
from utils.errors import cause_of


class Channel:
    """A process group of its own, so that its messages never mix with those of the training. A collective to create."""

    def __init__(self, process: Process):
        self._rank, self._world_size = process.rank, process.world_size
        # A slow disk may take longer than DIST.TIMEOUT; a process that dies is noticed at once.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self._world_size > 1 else None

    def each(self, task: Callable[[], Any]) -> list:
        """Run the task in every process. Returns all results; raises OSError if it failed in any of them."""
        answers = [self._attempt(task)] * self._world_size
        if self._group:
            dist.all_gather_object(answers, answers[0], group=self._group)
        for _, reason in answers:
            if reason:
                raise OSError(reason)
        return [result for result, _ in answers]

    def first(self, task: Callable[[], Any]) -> Any:
        """Run the task in process 0. Returns its result everywhere; raises OSError if it failed."""
        return self.each(lambda: task() if self._rank == 0 else None)[0]

    def _attempt(self, task: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return task(), ""
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError when a disk is full
            return None, cause_of(error)
