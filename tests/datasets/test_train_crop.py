"""How training images are cropped, flipped and interpolated, compared with timm's and DeiT III's transforms."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torchvision.transforms import InterpolationMode, functional

from configs.schema import Data
from tests.support.crops import SIZES, assert_alike, augmented
from tests.support.image_sets import noise

SIDE = 48


def as_timm_draws(rng: random.Random) -> SimpleNamespace:
    """What timm takes from the module random, from one generator and by `random` alone, as here."""
    return SimpleNamespace(
        random=rng.random,
        uniform=lambda low, high: low + (high - low) * rng.random(),
        randint=lambda low, high: low + int(rng.random() * (high - low + 1)),
        choice=lambda both: both[0] if rng.random() < 0.5 else both[1],
    )


@pytest.mark.parametrize(("mode", "interpolation"), [("rkrc", "bicubic"), ("rkrr", "bicubic"), ("rkrr", "random")])
def test_an_image_that_keeps_its_ratio_is_timms(mode, interpolation, monkeypatch):
    from timm.data import transforms
    from timm.data.transforms_factory import transforms_imagenet_train

    scale, ratio = (0.4, 2.0), (0.5, 2.0)
    data = Data(
        IMAGE_SIZE=SIDE, HFLIP=0, TRAIN_CROP=mode, TRAIN_INTERPOLATION=interpolation, CROP_SCALE=scale, CROP_RATIO=ratio
    )
    options = {"train_crop_mode": mode, "interpolation": interpolation, "scale": scale, "ratio": ratio}
    resize, crop = transforms_imagenet_train(SIDE, **options).transforms[:2]
    padded = 0
    for seed, size in enumerate([*SIZES, *SIZES[:3]] * 2):
        image = noise(*size)
        monkeypatch.setattr(transforms, "random", as_timm_draws(random.Random(seed)))
        resized = resize(image)
        padded += min(resized.size) < SIDE
        wanted = functional.pil_to_tensor(crop(resized))
        assert_alike(augmented(data, image, seed), wanted, "bicubic")
    assert 2 < padded < 18


def test_the_simple_crop_is_deit_iiis():
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


@pytest.mark.parametrize("mode", ["rkrr", "simple"])
def test_an_image_that_would_become_enormous_is_cropped_first(mode):
    data = Data(IMAGE_SIZE=SIDE, HFLIP=0, TRAIN_CROP=mode, MAX_PIXELS=2 * SIDE**2)
    image = noise(2000, 2)
    wanted = augmented(dataclasses.replace(data, TRAIN_CROP="rrc"), image, 0)
    assert torch.equal(augmented(data, image, 0), wanted) and wanted.float().std() > 10


@pytest.mark.parametrize(("name", "dim"), [("HFLIP", 2), ("VFLIP", 1)])
def test_flips_have_their_probability_and_change_no_other_draw(name, dim):
    image = noise(40, 30)
    given = [Data(IMAGE_SIZE=8, **{"HFLIP": 0.0} | {name: chance}) for chance in (0.0, 0.3)]
    both = [[augmented(data, image, seed) for seed in range(200)] for data in given]
    flipped = [torch.equal(plain.flip(dim), other) for plain, other in zip(*both, strict=True)]
    unchanged = [torch.equal(*pair) for pair in zip(*both, strict=True)]
    assert sum(flipped) + sum(unchanged) == 200 and abs(sum(flipped) / 200 - 0.3) < 0.1


def test_a_random_interpolation_is_bilinear_or_bicubic_half_of_the_time():
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
