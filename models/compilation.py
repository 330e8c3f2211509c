"""torch.compile of a model (COMPILE, COMPILE_SCOPE, COMPILE_MODE)."""

from torch import nn

from configs.schema import Config
from models.transforms.base import blocks_of
from utils.torch_internals import allow_graphs

# Of each block: training, its last batch, evaluation; each anew for micro-batches that were halved for lack of memory.
MAX_GRAPHS = 64


def compile_model(model: nn.Module, config: Config) -> None:
    """Compile in place, so that names of weights stay the same.

    A graph for each batch size: the one for all sizes that torch makes of the second is slower for the first, too.
    """
    allow_graphs(MAX_GRAPHS)
    for part in parts_to_compile(model, config):
        part.compile(mode=config.COMPILE_MODE, dynamic=False)


def parts_to_compile(model: nn.Module, config: Config) -> list[nn.Module]:
    """The model, or its blocks: they are alike, so that one compilation serves all of them."""
    if config.COMPILE_SCOPE == "model":
        return [model]
    return list(blocks_of(model, "COMPILE_SCOPE is blocks", "COMPILE_SCOPE model"))
