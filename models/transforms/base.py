"""The base class of model transforms. Most transforms give modules a subclass of their class."""

import functools
from collections.abc import Hashable, Iterable

from torch import nn

from utils.errors import ConfigError


class ModelTransform:
    """A reversible change to how a model computes. Names of weights stay the same.

    Transforms are frozen dataclasses. Equal transforms make the same change, so each can revert the other's change.
    """

    bypasses_modules = False  # true if some modules are not called, so that hooks on them do not run

    def apply(self, model: nn.Module) -> list[str]:
        """Change how the model computes. Return log lines."""
        raise NotImplementedError

    def revert(self, model: nn.Module) -> None:
        """Make the model compute exactly as before. This does nothing if the transform is not applied."""
        unwrap(model, self)

    def subclass(self, cls: type, *variant: Hashable) -> type:
        """Return the subclass of `cls` that wraps a module. `variant` comes from the call of wrap()."""
        raise NotImplementedError


def wrap(module: nn.Module, transform: ModelTransform, *variant: Hashable) -> None:
    """Give the module the transform's subclass of its class.

    This works with copy.deepcopy, DDP, FSDP2 and torch.compile. Rejected: hooks, which leak an autocast context if
    forward raises, and module.forward = ..., which deepcopy binds to the old module.
    """
    module.__class__ = _wrapped(type(module), transform, variant)


def unwrap(model: nn.Module, transform: ModelTransform) -> None:
    """Remove the transform's subclasses, even below subclasses of other transforms."""
    for module in model.modules():
        module.__class__ = _unwrapped(type(module), transform)


def change_class(modules: Iterable[nn.Module], classes: dict[type, type]) -> None:
    """Change the class of modules of exactly these classes. The new classes differ only in how they compute."""
    for module in modules:
        module.__class__ = classes.get(type(module), type(module))


@functools.cache  # similar modules share a class, so that torch.compile compiles it once
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
    """Return the model's blocks. If it has none, raise ConfigError about `setting` that recommends `instead`."""
    if not has_blocks(model):
        raise ConfigError(
            f"{setting}, but this model is not a plain sequence of transformer blocks (it has no .blocks); use "
            f"{instead}"
        )
    return model.blocks
