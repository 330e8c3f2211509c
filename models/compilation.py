"""torch.compile of a model (COMPILE, COMPILE_SCOPE, COMPILE_MODE)."""

from torch import nn

from configs.schema import Config
from models.transforms.base import blocks_of


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile in place, so that names of weights stay the same."""
    for part in parts_to_compile(model, config):
        part.compile(mode=config.COMPILE_MODE)


def parts_to_compile(model: nn.Module, config: Config) -> list[nn.Module]:
    """The model, or its blocks: they are alike, so that one compilation serves all of them."""
    if config.COMPILE_SCOPE == "model":
        return [model]
    return list(blocks_of(model, "COMPILE_SCOPE is blocks", "COMPILE_SCOPE model"))
