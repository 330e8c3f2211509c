"""Models for images of another shape, to learn how their weights depend on it."""

from torch import nn

from configs.schema import Config, Shape
from models import build_model
from models.weights.grids import Sized


def sized(config: Config, num_classes: int) -> Sized:
    """Return the shape of the images of these settings, and the function that builds the model for another shape."""

    def build(shape: Shape) -> nn.Module:
        return build_model(config.changed("DATA", IMAGE_SIZE=shape.size), num_classes)

    return Sized(config.DATA.shape, build)
