"""Crops, flips, resizing and normalization, compared with torchvision's, timm's and DeiT III's transforms."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
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
from datasets.transforms.crop import EvalTransform, Normalize, TrainTransform, crop_box
from datasets.transforms.pixel_rules import PixelRules, to_array
from datasets.types import ImageReadError
from tests.support.image_sets import noise
from tests.support.refusals import refused

SIDE = 48
SIZES = [(500, 375), (375, 500), (40, 30), (224, 224), (333, 257), (9, 61), (300, 7)]


def augmented(data: Data, image: Image.Image, seed: int) -> torch.Tensor:
    channels = len(image.getbands())
    out = torch.empty(data.IMAGE_SIZE, data.IMAGE_SIZE, channels, dtype=torch.uint8).permute(2, 0, 1)
    TrainTransform(data)(to_array(image, PixelRules(channels)), random.Random(seed), out)
    return out


def assert_alike(got: torch.Tensor, wanted: torch.Tensor, interpolation: str) -> None:
    """Assert equality where Pillow resizes too. torch's kernels use 16-bit weights: small noise, no bias."""
    difference = got.float() - wanted.float()
    most = 0 if interpolation in ("nearest", "lanczos") else 3
    assert difference.abs().max() <= most and difference.abs().mean() < 0.3 and difference.mean().abs() < 0.05


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_training_crops_match_torchvision(interpolation):
    data = Data(INTERPOLATION=interpolation, IMAGE_SIZE=64)
    for seed, size in enumerate(SIZES):
        image, rng = noise(*size), random.Random(seed)
        left, top, width, height = crop_box(*size, (0.08, 1.0), (3 / 4, 4 / 3), rng)
        wanted = functional.resized_crop(image, top, left, height, width, [64, 64], InterpolationMode(interpolation))
        wanted = functional.hflip(wanted) if rng.random() < 0.5 else wanted
        assert_alike(augmented(data, image, seed), functional.pil_to_tensor(wanted), interpolation)


@pytest.mark.parametrize(("side", "crop_pct"), [(64, 0.875), (61, 0.9), (64, 1.0)])  # 67.8 pixels are truncated to 67
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_evaluation_crops_match_torchvision(side, crop_pct, mode):
    resize = Resize(math.floor(side / crop_pct), InterpolationMode.BICUBIC)
    chain = Compose([resize, CenterCrop(side), PILToTensor()])
    transform = EvalTransform(Data(IMAGE_SIZE=side, CROP_PCT=crop_pct))
    for size in SIZES:
        image = noise(*size, mode)
        out = torch.empty(side, side, len(mode), dtype=torch.uint8).permute(2, 0, 1)
        transform(to_array(image, PixelRules(len(mode))), out)
        assert_alike(out, chain(image), "bicubic")


def test_random_crops_respect_area_and_aspect_ratio_limits():
    assert crop_box(500, 375, (0.08, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (29, 1, 432, 372)  # for any Python
    rng = random.Random(0)
    boxes = [crop_box(400, 300, (0.25, 0.5), (0.5, 2.0), rng) for _ in range(2000)]
    areas = np.array([width * height / 120_000 for _, _, width, height in boxes])
    logs = np.array([math.log(width / height) for _, _, width, height in boxes])
    assert 0.24 < areas.min() < 0.26 and 0.49 < areas.max() < 0.51
    assert abs(logs.mean()) < 0.05 and -0.71 < logs.min() < -0.66
    assert all(left >= 0 and top >= 0 and left + w <= 400 and top + h <= 300 for left, top, w, h in boxes)
    assert {left == 0 for left, _, _, _ in boxes} == {True, False}


def test_impossible_crop_falls_back_to_torchvision_center_crop():
    for size in [(1000, 10), (10, 1000), (1, 1), (7, 300)]:
        top, left, height, width = RandomResizedCrop.get_params(noise(*size), [0.9, 1.0], [3 / 4, 4 / 3])
        assert crop_box(*size, (0.9, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (left, top, width, height)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalization_matches_torchvision(dtype):
    data = Data(IMAGENET_MEAN=(0.485, 0.456, 0.406), IMAGENET_STD=(0.229, 0.224, 0.225))
    images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(torch.uint8)
    wanted = functional.normalize(images.double() / 255, data.IMAGENET_MEAN, data.IMAGENET_STD)
    got, std = Normalize(data, dtype)(images), torch.tensor(data.IMAGENET_STD, dtype=torch.float64)
    assert torch.equal(Normalize(data).scale.flatten(), (1 / (255 * std)).float()), "rounded only once"
    assert got.dtype == dtype and not Normalize(data).state_dict()
    torch.testing.assert_close(got, wanted.to(dtype))


def test_image_needing_gigabytes_to_resize_is_refused():
    with refused(ImageReadError, "DATA.MAX_PIXELS"):
        EvalTransform(Data())(np.zeros((1, 1_000_000, 3), np.uint8), torch.empty(3, 224, 224))


def test_simple_crop_matches_deit_iii():
    data, starts = Data(IMAGE_SIZE=SIDE, HFLIP=0, TRAIN_CROP="simple"), set()
    for seed, size in enumerate(SIZES * 3):
        image, rng = noise(*size), random.Random(seed)
        resized = functional.resize(image, SIDE, InterpolationMode.BICUBIC)
        padded = functional.pad(resized, 4, padding_mode="reflect")
        top, left = (int(rng.random() * (length - SIDE + 1)) for length in (padded.height, padded.width))
        starts |= {top, left}
        wanted = functional.pil_to_tensor(functional.crop(padded, top, left, SIDE, SIDE))
        assert_alike(augmented(data, image, seed), wanted, "bicubic")
    assert {0, 8} <= starts and max(starts) > 30


def test_image_too_large_after_resize_is_cropped_first():
    data = Data(IMAGE_SIZE=SIDE, HFLIP=0, TRAIN_CROP="simple", MAX_PIXELS=2 * SIDE**2)
    image = noise(2000, 2)
    wanted = augmented(dataclasses.replace(data, TRAIN_CROP="rrc"), image, 0)
    assert torch.equal(augmented(data, image, 0), wanted) and wanted.float().std() > 10


@pytest.mark.parametrize(("name", "dim"), [("HFLIP", 2), ("VFLIP", 1)])
def test_images_are_flipped_with_given_probability_without_changing_other_draws(name, dim):
    image = noise(40, 30)
    given = [Data(IMAGE_SIZE=8, **{"HFLIP": 0.0} | {name: chance}) for chance in (0.0, 0.3)]
    both = [[augmented(data, image, seed) for seed in range(200)] for data in given]
    flipped = [torch.equal(plain.flip(dim), other) for plain, other in zip(*both, strict=True)]
    unchanged = [torch.equal(*pair) for pair in zip(*both, strict=True)]
    assert sum(flipped) + sum(unchanged) == 200 and abs(sum(flipped) / 200 - 0.3) < 0.1


def test_random_interpolation_picks_bilinear_and_bicubic_equally_often():
    image, found = noise(40, 30), []
    for seed in range(100):
        one, other, drawn = (
            augmented(Data(IMAGE_SIZE=8, HFLIP=0, TRAIN_INTERPOLATION=name), image, seed)
            for name in ("bilinear", "bicubic", "random")
        )
        assert torch.equal(drawn, one) != torch.equal(drawn, other)
        found.append(torch.equal(drawn, one))
    assert abs(sum(found) - 50) < 4 * math.sqrt(25)
    assert Data(INTERPOLATION="lanczos").train_interpolation == "lanczos"
