"""Models that are only asked for their parts and shapes."""

from collections.abc import Callable

import torch
from torch import nn

from utils.errors import ConfigError
from utils.seed import unchanged_random_state


def build_without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a model on the meta device, which takes no time and memory, because its tensors have no values.

    timm 1.0.20 reads values while it builds some models. These are built on the CPU.
    """
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, ConfigError):
        with unchanged_random_state(torch.device("cpu")):
            return build()
