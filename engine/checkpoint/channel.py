"""What threads of a run's processes do together, one of each, whatever the processes themselves do meanwhile."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.distributed import Process


class Channel:
    """A group of their own, so that nothing they say is taken for something else. All processes make it together."""

    def __init__(self, process: Process):
        self._rank, self._world_size = process.rank, process.world_size
        # A disk may take longer than processes are waited for; one that dies is noticed at once.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if self._world_size > 1 else None

    def each(self, task: Callable[[], Any]) -> list:
        """Everyone does the task. All get the results of all, or an OSError if one of them met one."""
        told = [self._attempt(task)] * self._world_size
        if self._group:
            dist.all_gather_object(told, told[0], group=self._group)
        for _, reason in told:
            if reason:
                raise OSError(reason)
        return [result for result, _ in told]

    def first(self, task: Callable[[], Any]) -> Any:
        """Process 0 does the task; all get its result, or an OSError if it met one."""
        return self.each(lambda: task() if self._rank == 0 else None)[0]

    def _attempt(self, task: Callable[[], Any]) -> tuple[Any, str]:
        try:
            return task(), ""
        except (OSError, RuntimeError) as error:  # torch's words for a full disk are a RuntimeError
            return None, str(error) or type(error).__name__
