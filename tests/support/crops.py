"""Training images of one picture, and how near they come to those of another library."""

import random

import torch
from PIL import Image

from configs.schema import Data
from datasets.transforms.crop import TrainTransform
from datasets.transforms.decode import PixelRules, to_array

SIZES = [(500, 375), (375, 500), (40, 30), (224, 224), (333, 257), (9, 61), (300, 7)]


def augmented(data: Data, image: Image.Image, seed: int) -> torch.Tensor:
    channels = len(image.getbands())
    out = torch.empty(data.IMAGE_SIZE, data.IMAGE_SIZE, channels, dtype=torch.uint8).permute(2, 0, 1)
    TrainTransform(data)(to_array(image, PixelRules(channels)), random.Random(seed), out)
    return out


def assert_alike(got: torch.Tensor, wanted: torch.Tensor, interpolation: str) -> None:
    """Equal where Pillow resizes here too. torch's kernels take weights of 16 bits: a little noise, and no bias."""
    difference = got.float() - wanted.float()
    most = 0 if interpolation in ("nearest", "lanczos") else 3
    assert difference.abs().max() <= most and difference.abs().mean() < 0.3 and difference.mean().abs() < 0.05
