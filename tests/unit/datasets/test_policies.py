"""Policies compared with timm's: equal pixels from equal random numbers, and equal distributions of the draws."""

import inspect
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision.transforms import InterpolationMode, TrivialAugmentWide
from torchvision.transforms import functional as tv

from configs.schema import Config, Shape
from datasets.transforms.augment import Augmentation
from datasets.transforms.operations import DrawnOperations, Operation
from tests.support.configs import replaced

SIDE = 32
FILL = (124, 116, 104)
MEAN = (0.485, 0.456, 0.406)
TIMM = """original original-mstd0.5 originalr originalr-mstd2 v0 v0-mstd0.5 v0r v0r-mstd101 3a 3a-mstd0.5
rand rand-m9 rand-m9-mstd0.5-inc1 rand-m9-n3-mstd1 rand-m7-n4-p0.3-inc1 rand-m9-mstd101-inc1 rand-m15-mstd0.5-inc1
rand-m10-n1-p1-mstd101-inc1 rand-m15-mmax20-mstd0.5-inc1 rand-m30-mmax40-n3-p1 rand-m5-mmax0 rand-m9-n4-p1-tweights
rand-t3a-n3 rand-m8-inc1-t3aw-n5
augmix augmix-m3-w3 augmix-m9-w2-d3 augmix-m5-w4-d2-mstd0 augmix-m3-w1-a0.3 augmix-m5-mstd0.5""".split()


def augmentation(channels: int = 3, interpolation: str = "bicubic", size: int | str = SIDE, **train) -> Augmentation:
    data = {"IMAGE_SIZE": size, "IMAGE_CHANNELS": channels, "IMAGENET_MEAN": MEAN[:channels]}
    data["TRAIN_INTERPOLATION"] = interpolation
    return Augmentation(replaced(Config(), DATA=data, TRAIN=train))


def picture(mode: str = "RGB", size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Return a smooth picture with noise, in a range that autocontrast and equalize change."""
    noise = np.random.RandomState(0).randint(20, 220, (6, 6, 3)).astype(np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    return image.convert(mode)


def changed(augment: Augmentation, drawn: DrawnOperations, image: Image.Image) -> np.ndarray:
    pixels = np.array(image)
    return augment.apply(drawn, np.atleast_3d(pixels)).reshape(pixels.shape)


def timms(policy: str, interpolation: str = "bicubic", size: int | tuple[int, int] = SIDE, **options):
    """Return the part of timm's transform between crop and conversion."""
    options = {"color_jitter": None, "auto_augment": policy, "interpolation": interpolation, "mean": MEAN} | options
    return transforms_imagenet_train(size, separate=True, **options)[1]


class OneStream(random.Random):
    """A generator that gives timm the same numbers as our policy, in place of random and np.random."""

    def choice(self, items):
        return items[int(self.random() * len(items))]

    def several(self, items, count, replace=True, p=None):
        if replace:
            return [self.choice(items) for _ in range(count)]
        left, chosen = list(p), []
        for _ in range(count):
            place = self.random() * sum(left)
            chosen.append(next(index for index in range(len(left)) if sum(left[: index + 1]) > place))
            left[chosen[-1]] = 0.0
        return [items[index] for index in chosen]

    def dirichlet(self, alphas):
        shares = [self.gammavariate(alpha, 1.0) for alpha in alphas]
        return np.array(shares) / sum(shares)

    def put_into_timm(self, monkeypatch):
        monkeypatch.setattr(auto_augment, "random", self)
        monkeypatch.setattr(np.random, "choice", self.several)
        monkeypatch.setattr(np.random, "dirichlet", self.dirichlet)
        monkeypatch.setattr(np.random, "beta", self.betavariate)
        monkeypatch.setattr(np.random, "randint", lambda low, high: low + int(self.random() * (high - low)))


@pytest.fixture
def with_black_posterize(monkeypatch):
    """Make timm's posterize to 0 bits work as before Pillow 13, which refuses it."""
    posterize = auto_augment.ImageOps.posterize
    black = lambda image, bits: posterize(image, bits) if bits >= 1 else Image.new(image.mode, image.size)  # noqa: E731
    monkeypatch.setattr(auto_augment.ImageOps, "posterize", black)


CASES = [(policy, "bicubic", "RGB") for policy in TIMM]
CASES += [("rand-m9-mstd0.5-inc1", kind, "RGB") for kind in ("random", "bilinear", "nearest")]
CASES += [(policy, "random", mode) for policy in ("original", "3a", "rand-m9-p1-n5") for mode in ("RGB", "L")]
CASES += [("augmix", "random", "RGB")]  # timm 1.0.20 cannot mix single-channel images
CASES = [(*case, Shape(SIDE, SIDE)) for case in CASES]
CASES += [(policy, "bicubic", "RGB", Shape(24, 64)) for policy in ("original", "rand-m9-p1-n5", "augmix")]


@pytest.mark.parametrize(("policy", "interpolation", "mode", "shape"), CASES)
def test_same_random_draws_give_pixels_of_timm_policies(
    policy, interpolation, mode, shape, monkeypatch, with_black_posterize
):
    if policy == "augmix" and shape.height != shape.width and "zeros_like" not in inspect.getsource(auto_augment):
        pytest.skip("this timm mixes squares only")
    image = picture(mode, shape[::-1])
    num_channels = len(image.getbands())
    ours = augmentation(num_channels, interpolation, shape.size, AUTO_AUGMENT=policy)
    theirs, num_changed = timms(policy, interpolation, tuple(shape), mean=MEAN[:num_channels]), 0
    for seed in range(20):
        mine = changed(ours, ours.draw(random.Random(seed)), image)
        with monkeypatch.context() as patched:
            OneStream(seed).put_into_timm(patched)
            wanted = np.asarray(theirs(image))
        assert np.array_equal(mine, wanted), seed
        num_changed += (mine != np.asarray(image)).any()
    assert num_changed > 10


def test_weighted_augment_operations_occur_as_often_as_drawn_by_numpy():
    weights = auto_augment.rand_augment_choices("weights")
    shares = np.array([*weights.values()]) / sum(weights.values())
    state, count = np.random.RandomState(0), 2000
    wanted = Counter(name for _ in range(count) for name in state.choice([*weights], 3, replace=False, p=shares))
    augment = augmentation(AUTO_AUGMENT="rand-m9-n3-p1-tweights")
    drawn = Counter(each.name for seed in range(count) for each in augment.draw(random.Random(seed)).operations)
    names = {"Rotate": "rotate", "ShearX": "shear_x", "TranslateYRel": "translate_y", "Invert": "invert"}
    for name, ours in names.items():
        assert abs(drawn[ours] - wanted[name]) < 0.03 * count, name
    assert drawn["rotate"] > 0.7 * count and drawn.total() == 3 * count


class Scripted(random.Random):
    """Returns these numbers in turn, then repeats the last one."""

    def __init__(self, *numbers: float):
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]


@pytest.mark.slow
def test_every_trivialaugment_operation_and_level_matches_torchvision(monkeypatch):
    ours, image = augmentation(AUTO_AUGMENT="ta_wide"), picture()
    theirs = TrivialAugmentWide(31, InterpolationMode.BICUBIC, fill=list(FILL))
    for index in range(14):
        for level in range(31):
            for sign in (0, 1):
                drawn = ours.draw(Scripted((index + 0.5) / 14, (level + 0.5) / 31, sign * 0.9))
                numbers = iter((index, level, sign))
                monkeypatch.setattr(torch, "randint", lambda *_, n=numbers, **__: torch.tensor(next(n)))
                assert np.array_equal(changed(ours, drawn, image), theirs(image)), (index, level, sign, drawn)


# Single operations: the result of timm or torchvision for the same value.
REFERENCES = {
    "autocontrast": lambda image, _: auto_augment.auto_contrast(image),
    "equalize": lambda image, _: auto_augment.equalize(image),
    "invert": lambda image, _: auto_augment.invert(image),
    "brightness": tv.adjust_brightness,
    "contrast": tv.adjust_contrast,
    "color": tv.adjust_saturation,
    "sharpness": tv.adjust_sharpness,
    "posterize": lambda image, bits: image.point(lambda value: value & -(256 >> min(max(bits, 0), 8))),
    "solarize": auto_augment.solarize,
    "solarize_add": auto_augment.solarize_add,
    "gaussian_blur": auto_augment.gaussian_blur,
    "rotate": auto_augment.rotate,
    "shear_x": auto_augment.shear_x,
    "shear_y": auto_augment.shear_y,
    "translate_x": auto_augment.translate_x_abs,
    "translate_y": auto_augment.translate_y_abs,
}
VALUES = {"posterize": range(-2, 10), "solarize": (0, 1, 128, 255, 256), "solarize_add": (0, 1, 60, 128)}
VALUES |= {"rotate": (-135, -30, 0.5, 90, 400)}
FEW = (0.0, 0.1, 0.3, 0.7, 0.9, 1.0, 1.1, 1.37, 1.9, 4.6)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_augment_operations_match_reference_pixels_for_any_image_shape(name, mode):
    image = picture(mode, (40, 27))
    fill = FILL[: len(image.getbands())]
    augment = augmentation(len(fill), AUTO_AUGMENT="rand")
    for value in VALUES.get(name, FEW):
        for resample in (0, 2, 3) if name.startswith(("rotate", "shear", "translate")) else (None,):
            options = {} if resample is None else {"resample": resample, "fillcolor": fill}
            mine = changed(augment, DrawnOperations((Operation(name, value, resample or 0),)), image)
            assert np.array_equal(mine, np.asarray(REFERENCES[name](image, value, **options))), (value, resample)


def test_color_jitter_draws_match_torchvision():
    """Compare with torchvision's ColorJitter after the policy."""
    augment = augmentation(COLOR_JITTER=0.4, AUTO_AUGMENT="3a")
    jitters = [augment.draw(random.Random(seed)).operations[1:] for seed in range(2000)]
    orders = Counter(tuple(each.name for each in jitter) for jitter in jitters)
    assert len(orders) == 6 and min(orders.values()) > 0.8 * len(jitters) / 6
    for name in ("brightness", "contrast", "color"):
        values = np.array([each.value for jitter in jitters for each in jitter if each.name == name])
        assert 0.6 <= values.min() < values.max() <= 1.4 and len(values) == len(jitters)
        assert abs(values.mean() - 1) < 0.02 and abs(values.std() - 0.8 / 12**0.5) < 0.02


def test_augmix_chain_weights_always_sum_to_one():
    augment = augmentation(AUTO_AUGMENT="augmix-w1-d1-a0.01")
    assert {sum(augment.draw(random.Random(seed)).weights) for seed in range(4000)} == {1.0}
