"""Running a model without leaving a trace in it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """BatchNorm's statistics are afterwards what they were."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])
