"""Measures the memory of CPU tensors while something runs, with torch's profiler."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator


def passing_bytes(task: Callable[[], None]) -> int:
    """Return the peak memory of CPU tensors while the task runs, above the memory that they used before."""
    from torch.profiler import ProfilerActivity, profile

    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        task()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hide stderr: the profiler's libraries print that there is no GPU, and when they start and stop."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
