"""Which layer of a model sees the images."""

import contextlib

from torch import nn


def starts_with_convolution(model: nn.Module) -> bool:
    """Whether images go into one convolution and nowhere else, as timm says for all of its models."""
    # A ViT that timm's class made of our settings has no such entry. Where images take several ways, it is a tuple.
    path = getattr(model, "pretrained_cfg", {}).get("first_conv", "patch_embed.proj")
    with contextlib.suppress(AttributeError):
        return isinstance(path, str) and isinstance(model.get_submodule(path), nn.Conv2d)
    return False
