"""Augmentation of images at their own aspect ratio: a policy shifts an image by a fraction of its own width or height."""

import numpy as np

from configs.schema import Config
from datasets.transforms.augment import Augmentation, parse_policy
from datasets.transforms.pixels import DrawnOperations, Operation


class SequenceAugmentation(Augmentation):
    """The usual augmentation, with shifts that are scaled from DATA.IMAGE_SIZE to the size of each image."""

    def __init__(self, config: Config):
        super().__init__(config)
        policy = parse_policy(config.TRAIN)
        self.side = config.DATA.IMAGE_SIZE
        # TrivialAugment shifts every image by up to 32 pixels, whatever its size.
        self.has_fractions = policy is not None and policy.name != "ta_wide"

    def apply(self, drawn: DrawnOperations, pixels: np.ndarray) -> np.ndarray:
        if self.has_fractions:
            height, width, _ = pixels.shape
            factors = {"translate_x": width / self.side, "translate_y": height / self.side}
            chains = tuple(_scaled(each, factors) for each in drawn.chains)
            drawn = drawn._replace(operations=_scaled(drawn.operations, factors), chains=chains)
        return super().apply(drawn, pixels)


def _scaled(operations: tuple[Operation, ...], factors: dict[str, float]) -> tuple[Operation, ...]:
    """Return the operations. Values of operations that are named in `factors` are multiplied by their factor."""
    return tuple(each._replace(value=each.value * factors.get(each.name, 1.0)) for each in operations)
