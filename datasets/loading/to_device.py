"""Copies batches to the device ahead of time, while it computes."""

import contextlib
from collections.abc import Iterator

import torch

from datasets.types import Batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on a CUDA device. A separate stream copies the next one while the device computes on this one."""
    stream = torch.cuda.Stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            images, targets = (each.to(device, non_blocking=True) for each in (batch.images, batch.targets))
        return batch._replace(images=images, targets=targets), stream.record_event()

    def hand_over(batch: Batch, copied: torch.cuda.Event) -> Batch:
        now = torch.cuda.current_stream(device)
        now.wait_event(copied)  # the device waits, not the host
        for each in (batch.images, batch.targets):
            each.record_stream(now)  # or the next copy could reuse its memory too early
        return batch

    with contextlib.closing(batches):
        ahead = None
        for batch in batches:
            started = start_copy(batch)
            if ahead:
                yield hand_over(*ahead)
            ahead = started
        if ahead:
            yield hand_over(*ahead)
