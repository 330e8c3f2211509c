"""Pretrained weights for a model whose images may have another shape than those of the weights."""

from collections.abc import Sequence

from torch import nn

from configs.schema import Config, Shape
from configs.values import flatten
from models import build_model
from models.weights.grids import Sized
from models.weights.load import load_pretrained


def sized(config: Config, num_classes: int) -> Sized:
    """Return the shape of the images of these settings, and the function that builds the model for another shape."""

    def build(shape: Shape) -> nn.Module:
        return build_model(config.changed("DATA", IMAGE_SIZE=shape.size), num_classes)

    return Sized(config.DATA.shape, build)


def load_for(
    config: Config, model: nn.Module, source: str, setting: str, needs_head: bool, classes: Sequence[str]
) -> list[str]:
    """Load pretrained weights as load_pretrained does, into the model of these settings."""
    images = sized(config, model.num_classes)
    return load_pretrained(model, source, setting, needs_head, classes, flatten(config), images)
