"""The running statistics of batch norms: which modules have them, and a forward that does not change them."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def has_running_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [
        buffer for each in model.modules() if has_running_statistics(each) for buffer in each.buffers(recurse=False)
    ]


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore BatchNorm's statistics afterwards."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])
