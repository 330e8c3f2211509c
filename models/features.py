"""Features of a model: the pooled features of an image, and one vector for each of its patches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from utils.errors import ConfigError


class Features(NamedTuple):
    """The features of a batch of images: what the model's classifier reads, and the last layer's patch tokens."""

    pooled: Tensor  # [B, D]
    patches: Tensor | None  # [B, N, D], row by row; None if the model has no square grid of patches
    logits: Tensor | None = None  # [B, classes], if they were asked for


class Widths(NamedTuple):
    """The sizes of a model's features."""

    pooled: int
    patches: int | None  # None if the model has no square grid of patches
    grid: int | None  # patches along one side of an image


def features_of(model: nn.Module, images: Tensor, with_logits: bool = False) -> Features:
    """Return the features of images [B, C, H, W] that are normalized as the model expects.

    The classifier is used only for the logits.
    """
    tokens = model.forward_features(images)
    logits = model.forward_head(tokens) if with_logits else None
    return Features(model.forward_head(tokens, pre_logits=True), _patch_tokens(model, tokens), logits)


def _patch_tokens(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Return the patch tokens [B, N, D] in the output of `forward_features`, without class and register tokens."""
    if tokens.ndim == 4:  # a feature map: [B, D, H, W] in convolutional networks, [B, H, W, D] in a Swin
        tokens = tokens.movedim(1, -1) if tokens.shape[1] == model.num_features else tokens
        tokens = tokens.flatten(1, 2)
    elif tokens.ndim == 3:
        tokens = tokens[:, getattr(model, "num_prefix_tokens", 0) :]
    # Images are square. If the number of tokens is not a square, some of the tokens are not patches.
    return tokens if tokens.ndim == 3 and math.isqrt(tokens.shape[1]) ** 2 == tokens.shape[1] else None


@torch.no_grad()
def widths_of(model: nn.Module, channels: int, side: int) -> Widths:
    """Return the sizes of the model's features for images of this side.

    Raise ConfigError if the model cannot return features. Its message names neither a setting nor a file.
    """
    was_training, parameter = model.training, next(model.parameters())
    try:
        pooled, patches, _ = features_of(model.eval(), parameter.new_zeros(1, channels, side, side))
        if pooled.ndim != 2:
            raise ValueError(f"the pooled features have shape {list(pooled.shape)}")
    except Exception as error:  # the type depends on the model
        raise ConfigError(
            f"{type(model).__name__} cannot return features of images of {side} x {side} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); use a model with "
            "timm's forward_features and forward_head, such as a ViT or a ResNet"
        ) from None
    finally:
        model.train(was_training)
    if patches is None:
        return Widths(pooled.shape[1], None, None)
    return Widths(pooled.shape[1], patches.shape[2], math.isqrt(patches.shape[1]))
