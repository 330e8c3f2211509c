"""Copy batches to the device while it computes."""

import contextlib
from collections.abc import Iterator

import torch

from datasets.types import Batch


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches on the device. A separate stream copies the next batch while the device computes."""
    stream = torch.Stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.Event]:
        with stream:
            images, targets = (each.to(device, non_blocking=True) for each in (batch.images, batch.targets))
        return batch._replace(images=images, targets=targets), stream.record_event()

    def hand_over(batch: Batch, copied: torch.Event) -> Batch:
        now = torch.accelerator.current_stream(device)
        now.wait_event(copied)  # makes the device wait, not the host
        for each in (batch.images, batch.targets):
            each.record_stream(now)  # otherwise the next copy could reuse the memory too early
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
