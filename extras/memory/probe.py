"""Finds out whether forward and backward passes fit into the memory of this process."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from extras.memory.guard import shortage
from models.parts import unchanged_buffers


def probe_memory(model: nn.Module, compute: Callable[[], Tensor], passes: int) -> str | None:
    """Run forward and backward `passes` times without changing the model. Return the out-of-memory message, if any."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kept = []
    try:
        with unchanged_buffers(model):
            for _ in range(passes):
                # Not backward(): that would trigger DDP's gradient hooks.
                kept.append(torch.autograd.grad(compute(), trained, allow_unused=True))
    except RuntimeError as error:
        reason = shortage(error)
        if not reason:
            raise
        return reason
    return None
