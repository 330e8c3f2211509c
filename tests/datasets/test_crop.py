"""Crops, resizing and normalization, compared with torchvision's."""

import math
import random

import numpy as np
import pytest
import torch
from torchvision.transforms import (
    CenterCrop,
    Compose,
    InterpolationMode,
    PILToTensor,
    RandomResizedCrop,
    Resize,
    functional,
)

from configs.schema import Data
from datasets.transforms.crop import EvalTransform, Normalize, crop_box
from datasets.transforms.decode import PixelRules, to_array
from datasets.types import ImageReadError
from tests.support.crops import SIZES, assert_alike, augmented
from tests.support.image_sets import noise
from tests.support.refusals import refused


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_training_images_are_torchvisions(interpolation):
    data = Data(INTERPOLATION=interpolation, IMAGE_SIZE=64)
    for seed, size in enumerate(SIZES):
        image, rng = noise(*size), random.Random(seed)
        left, top, width, height = crop_box(*size, (0.08, 1.0), (3 / 4, 4 / 3), rng)
        wanted = functional.resized_crop(image, top, left, height, width, [64, 64], InterpolationMode(interpolation))
        wanted = functional.hflip(wanted) if rng.random() < 0.5 else wanted
        assert_alike(augmented(data, image, seed), functional.pil_to_tensor(wanted), interpolation)


@pytest.mark.parametrize(("side", "crop_pct"), [(64, 0.875), (65, 0.9), (64, 1.0)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_evaluation_images_are_torchvisions(side, crop_pct, mode):
    resize = Resize(math.floor(side / crop_pct), InterpolationMode.BICUBIC)
    chain = Compose([resize, CenterCrop(side), PILToTensor()])
    transform = EvalTransform(Data(IMAGE_SIZE=side, CROP_PCT=crop_pct))
    for size in SIZES:
        image = noise(*size, mode)
        out = torch.empty(side, side, len(mode), dtype=torch.uint8).permute(2, 0, 1)
        transform(to_array(image, PixelRules(len(mode))), out)
        assert_alike(out, chain(image), "bicubic")


def test_crops_have_the_areas_and_shapes_that_were_asked_for():
    assert crop_box(500, 375, (0.08, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (29, 1, 432, 372)  # in every Python
    rng = random.Random(0)
    boxes = [crop_box(400, 300, (0.25, 0.5), (0.5, 2.0), rng) for _ in range(2000)]
    areas = np.array([width * height / 120_000 for _, _, width, height in boxes])
    logs = np.array([math.log(width / height) for _, _, width, height in boxes])
    assert 0.24 < areas.min() < 0.26 and 0.49 < areas.max() < 0.51
    assert abs(logs.mean()) < 0.05 and -0.71 < logs.min() < -0.66
    assert all(left >= 0 and top >= 0 and left + w <= 400 and top + h <= 300 for left, top, w, h in boxes)
    assert {left == 0 for left, _, _, _ in boxes} == {True, False}


def test_where_no_crop_fits_the_largest_in_the_centre_is_taken_as_in_torchvision():
    for size in [(1000, 10), (10, 1000), (1, 1), (7, 300)]:
        top, left, height, width = RandomResizedCrop.get_params(noise(*size), [0.9, 1.0], [3 / 4, 4 / 3])
        assert crop_box(*size, (0.9, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (left, top, width, height)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalize_equals_torchvisions(dtype):
    data = Data(IMAGENET_MEAN=(0.485, 0.456, 0.406), IMAGENET_STD=(0.229, 0.224, 0.225))
    images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(torch.uint8)
    wanted = functional.normalize(images.double() / 255, data.IMAGENET_MEAN, data.IMAGENET_STD)
    got = Normalize(data, dtype)(images)
    assert got.dtype == dtype and not Normalize(data).state_dict()
    torch.testing.assert_close(got, wanted.to(dtype))


def test_a_line_of_pixels_that_would_be_enlarged_to_gigabytes_cannot_be_read():
    with refused(ImageReadError, "DATA.MAX_PIXELS"):
        EvalTransform(Data())(np.zeros((1, 1_000_000, 3), np.uint8), torch.empty(3, 224, 224))
