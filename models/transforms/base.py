"""What a model transform is, and how most of them work: a module gets a subclass of its class."""

import functools
from collections.abc import Hashable

from torch import nn

from utils.errors import ConfigError


class ModelTransform:
    """Changes how a model computes, and can be taken off again; the names of its weights stay.

    A frozen dataclass: transforms that are equal change a model alike, so that one reverts what the other applied.
    """

    lowers_precision = False  # computes some of the model in a smaller type
    bypasses_modules = False  # computes what modules would without calling them, so that hooks on them miss it

    def apply(self, model: nn.Module) -> list[str]:
        """Change how the model computes. Returns lines for the log."""
        raise NotImplementedError

    def revert(self, model: nn.Module) -> None:
        """Afterwards the model computes exactly as before; does nothing where this was not applied."""
        unwrap(model, self)

    def subclass(self, cls: type, *variant: Hashable) -> type:
        """For transforms that wrap modules: the class that does what is asked for with `variant`."""
        raise NotImplementedError


def wrap(module: nn.Module, transform: ModelTransform, *variant: Hashable) -> None:
    """Give the module a subclass of its class, as the transform makes it.

    That goes along with copy.deepcopy, DDP, FSDP2 and torch.compile. Rejected: hooks, which cannot hold an autocast open
    around forward without leaking it when forward raises, and module.forward = ..., which deepcopy ties to the old module.
    """
    module.__class__ = _wrapped(type(module), transform, variant)


def unwrap(model: nn.Module, transform: ModelTransform) -> None:
    """Take off every class that the transform gave, also from below those of others."""
    for module in model.modules():
        module.__class__ = _unwrapped(type(module), transform)


@functools.cache  # modules that are alike share a class, so that torch.compile compiles it once
def _wrapped(cls: type, transform: ModelTransform, variant: tuple[Hashable, ...]) -> type:
    wrapped = transform.subclass(cls, *variant)
    wrapped.wrapped_by = (transform, variant, cls)
    return wrapped


def _unwrapped(cls: type, transform: ModelTransform) -> type:
    if "wrapped_by" not in vars(cls):
        return cls
    owner, variant, inner = cls.wrapped_by
    return inner if owner == transform else _wrapped(_unwrapped(inner, transform), owner, variant)


def has_blocks(model: nn.Module) -> bool:
    return isinstance(getattr(model, "blocks", None), nn.Sequential | nn.ModuleList)


def blocks_of(model: nn.Module, setting: str, instead: str) -> nn.Sequential | nn.ModuleList:
    """The model's blocks, for a setting that is about them; `instead`: what to use where there are none."""
    if not has_blocks(model):
        raise ConfigError(
            f"{setting}, but this model is no plain row of transformer blocks (it has no .blocks); use {instead}"
        )
    return model.blocks
