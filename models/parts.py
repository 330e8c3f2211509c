"""Parts of a model: modules by name patterns, the classifier, the first layer and running statistics."""

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


def covers(pattern: str, path: str) -> bool:
    """Return whether the pattern matches the path of a module or tensor, or of a part of the model that contains it."""
    parts = path.split(".")
    return bool(path) and any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def classifier_names(model: nn.Module) -> list[str]:
    """Return the name of the classifier's module, or the names of both classifiers for a distilled DeiT."""
    classifier = model.get_classifier()
    classifiers = classifier if isinstance(classifier, tuple) else (classifier,)
    return [name for name, module in model.named_modules() if any(module is each for each in classifiers)]


def has_running_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [
        buffer for each in model.modules() if has_running_statistics(each) for buffer in each.buffers(recurse=False)
    ]


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, such as BatchNorm's statistics, when the `with` block ends."""
    saved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(saved[name])


def starts_with_convolution(model: nn.Module) -> bool:
    """Return whether images go into a single convolution, according to timm's `first_conv`."""
    # A ViT built from our settings has no `first_conv`. If images go into several layers, it is a tuple.
    path = getattr(model, "pretrained_cfg", {}).get("first_conv", "patch_embed.proj")
    with contextlib.suppress(AttributeError):
        return isinstance(path, str) and isinstance(model.get_submodule(path), nn.Conv2d)
    return False
