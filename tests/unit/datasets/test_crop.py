"""Crops, flips, resizing and normalization, compared with torchvision's, timm's and DeiT III's transforms."""

import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import InterpolationMode, RandomResizedCrop, functional

from configs.schema import Config, Data, Shape
from datasets.pixels import Pixels
from datasets.pixels.decode import to_array
from datasets.pixels.rules import ImageReadError
from datasets.transforms.crop import EvalTransform, Normalize, TrainTransform, crop_box
from tests.support.image_sets import noise
from tests.support.properties import examples
from tests.support.refusals import refused

SIDE = 48
SIZES = [(500, 375), (375, 500), (40, 30), (224, 224), (333, 257), (9, 61), (300, 7)]


def augmented(data: Data, image: Image.Image, seed: int) -> torch.Tensor:
    channels = len(image.getbands())
    out = torch.empty(*data.shape, channels, dtype=torch.uint8).permute(2, 0, 1)
    TrainTransform(Config(DATA=data))(to_array(image, Pixels(channels)), random.Random(seed), out)
    return out


def assert_alike(got: torch.Tensor, wanted: torch.Tensor, interpolation: str) -> None:
    """Assert equality where Pillow resizes too. torch's kernels have 16-bit weights, which can change a rounding."""
    difference = (got.float() - wanted.float()).abs()
    if interpolation in ("nearest", "lanczos"):
        assert not difference.any()
    else:  # of a photo's values, 0.3% differ by 1, and one in a million by 2
        number = difference.numel()
        assert difference.max() <= 2 and (difference > 1).sum() <= 2 + 0.001 * number
        # Drawn images may have equal rows, and thus equal roundings. Without rounding, half of all values would differ.
        assert difference.sum() <= 10 + 0.4 * number


@st.composite
def pictures(draw) -> Image.Image:
    """Draw an image. Bicubic interpolation overshoots at the edges of black and white pixels."""
    width, height, seed = (draw(st.integers(1, most)) for most in (160, 160, 1000))
    mode, is_black_and_white = draw(st.sampled_from(["RGB", "L"])), draw(st.booleans())
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels // 128 * 255 if is_black_and_white else pixels).convert(mode)


INTERPOLATIONS = st.sampled_from(["bicubic", "bicubic", "bilinear", "lanczos", "nearest"])


SHAPES = st.integers(2, 80).map(lambda side: Shape(side, side)) | st.builds(Shape, *[st.integers(2, 80)] * 2)


def has_a_tie(image: Image.Image, shape: Shape, crop_pct: float) -> bool:
    """Return whether a side of the resized image ends in one half, which timm's division of floats may round up."""
    height, width = (math.floor(side / crop_pct) for side in shape)
    scale = max(Fraction(height, image.height), Fraction(width, image.width))
    return any((side * scale).denominator == 2 for side in image.size)


# timm 1.0.20 resizes images of other shapes with bilinear interpolation, whatever it was asked for.
RECTANGLE = create_transform((3, 2, 3), interpolation="nearest").transforms[0]
TIMM_INTERPOLATES_RECTANGLES = RECTANGLE.interpolation == InterpolationMode.NEAREST


@given(pictures(), SHAPES, INTERPOLATIONS, st.integers(0, 1000))
@examples(100)
def test_training_crops_match_torchvision(image, shape, interpolation, seed):
    data, rng = Data(INTERPOLATION=interpolation, IMAGE_SIZE=shape.size), random.Random(seed)
    left, top, width, height = crop_box(*image.size, data.CROP_SCALE, data.CROP_RATIO, rng)
    wanted = functional.resized_crop(image, top, left, height, width, [*shape], InterpolationMode(interpolation))
    wanted = functional.hflip(wanted) if rng.random() < data.HFLIP else wanted
    assert_alike(augmented(data, image, seed), functional.pil_to_tensor(wanted), interpolation)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@given(pictures(), SHAPES, INTERPOLATIONS, st.floats(0.5, 1.2) | st.sampled_from([0.875, 1.0]))
@examples(60)
def test_evaluation_pixels_match_timm(mode, image, shape, interpolation, crop_pct):
    channels, mean = len(image.mode), (0.4,) * len(image.mode)
    assume(mode != "border" or min(shape) * min(image.size) > max(image.size))  # timm fails if a side becomes 0
    assume(mode != "center" or not has_a_tie(image, shape, crop_pct))
    assume(mode != "center" or shape.height == shape.width or TIMM_INTERPOLATES_RECTANGLES)
    chosen = {"interpolation": interpolation, "crop_mode": mode, "crop_pct": crop_pct, "mean": mean}
    wanted = create_transform((channels, *shape), use_prefetcher=True, **chosen)(image)
    chosen = {"INTERPOLATION": interpolation, "CROP_MODE": mode, "CROP_PCT": crop_pct, "IMAGENET_MEAN": mean}
    out = torch.full((*shape, channels), 77, dtype=torch.uint8).permute(2, 0, 1)
    EvalTransform(Data(IMAGE_SIZE=shape.size, **chosen))(to_array(image, Pixels(channels)), out)
    assert_alike(out, torch.as_tensor(wanted), interpolation)


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
