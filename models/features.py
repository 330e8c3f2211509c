"""The features of an image: what a model's classifier reads."""

import torch
from torch import Tensor, nn

from configs.schema import Shape
from utils.errors import ConfigError


def features_of(model: nn.Module, images: Tensor, with_logits: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return features [B, D] and logits [B, classes] of images [B, C, H, W] that are normalized as the model expects.

    Without `with_logits`, the classifier is not used, and the logits are None.
    """
    tokens = model.forward_features(images)
    logits = model.forward_head(tokens) if with_logits else None
    return model.forward_head(tokens, pre_logits=True), logits


@torch.no_grad()
def width_of(model: nn.Module, channels: int, shape: Shape) -> int:
    """Return the number of features of an image of this shape.

    Raise ConfigError if the model cannot return features. Its message names neither a setting nor a file.
    """
    was_training, parameter = model.training, next(model.parameters())
    try:
        features, _ = features_of(model.eval(), parameter.new_zeros(1, channels, *shape))
        if features.ndim != 2:
            raise ValueError(f"the features have shape {list(features.shape)}")
    except Exception as error:  # the type depends on the model
        raise ConfigError(
            f"{type(model).__name__} cannot return features of images of {shape} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); use a model with "
            "timm's forward_features and forward_head, such as a ViT or a ResNet"
        ) from None
    finally:
        model.train(was_training)
    return features.shape[1]
