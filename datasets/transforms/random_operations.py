"""Operations with a probability and a random magnitude, as in timm, and torchvision's TrivialAugment operations."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import torch

from datasets.transforms.pixels import Operation

MOST = 10.0  # timm's largest magnitude by default; the smallest is 0
GEOMETRIC = frozenset("rotate shear_x shear_y translate_x translate_y".split())


class Options(NamedTuple):
    """The options that all operations of a policy share."""

    resamples: tuple[int, ...]  # Pillow's interpolation numbers; one is drawn for each rotation or shift
    shift: float  # pixels of a translation with magnitude 10
    deviation: float  # standard deviation of a magnitude; infinite: uniform from 0 to the magnitude
    highest: float = MOST  # the upper limit of magnitudes


def choose(items: Sequence, rng: Random):
    return items[int(rng.random() * len(items))] if len(items) > 1 else items[0]


class RandomOperation(NamedTuple):
    """An operation, by timm's name, with its probability and magnitude."""

    name: str
    probability: float
    magnitude: float
    options: Options

    def draw(self, rng: Random) -> tuple[Operation, ...]:
        """Return the operation with a random value as a tuple, or () with probability 1 - `probability`."""
        if self.probability < 1 and rng.random() > self.probability:
            return ()
        name, value_of = TIMM_OPERATIONS[self.name]
        level = self._level(rng)  # drawn even for an operation without a value, as in timm
        value = value_of(level / MOST, rng) if value_of else 0.0
        if name not in GEOMETRIC:
            return (Operation(name, value),)
        if name.startswith("translate"):
            value *= self.options.shift
        return (Operation(name, value, choose(self.options.resamples, rng)),)

    def _level(self, rng: Random) -> float:
        level, deviation = self.magnitude, self.options.deviation
        if deviation == math.inf:
            level *= rng.random()
        elif deviation > 0:
            level = rng.gauss(level, deviation)
        return max(0.0, min(level, self.options.highest))


def negate(value: float, rng: Random) -> float:
    """Return the value or its negative, with equal probability."""
    return -value if rng.random() > 0.5 else value


def _enhance(share: float, rng: Random) -> float:
    return share * 1.8 + 0.1


def _enhance_increasing(share: float, rng: Random) -> float:
    return max(0.1, 1.0 + negate(share * 0.9, rng))


def _up_to(limit: float) -> Callable[[float, Random], float]:
    return lambda share, rng: negate(share * limit, rng)


# {timm's name: (our name, function that returns the value for magnitude / 10, or None if there is no value)}
TIMM_OPERATIONS: dict[str, tuple[str, Callable[[float, Random], float] | None]] = {
    "AutoContrast": ("autocontrast", None),
    "Equalize": ("equalize", None),
    "Invert": ("invert", None),
    "Rotate": ("rotate", _up_to(30.0)),
    "ShearX": ("shear_x", _up_to(0.3)),
    "ShearY": ("shear_y", _up_to(0.3)),
    "TranslateXRel": ("translate_x", _up_to(1.0)),
    "TranslateYRel": ("translate_y", _up_to(1.0)),
    "Posterize": ("posterize", lambda share, rng: int(share * 4)),
    "PosterizeIncreasing": ("posterize", lambda share, rng: 4 - int(share * 4)),
    "PosterizeOriginal": ("posterize", lambda share, rng: int(share * 4) + 4),
    "Solarize": ("solarize", lambda share, rng: min(256, int(share * 256))),
    "SolarizeIncreasing": ("solarize", lambda share, rng: 256 - min(256, int(share * 256))),
    "SolarizeAdd": ("solarize_add", lambda share, rng: min(128, int(share * 110))),
    "Color": ("color", _enhance),
    "Contrast": ("contrast", _enhance),
    "Brightness": ("brightness", _enhance),
    "Sharpness": ("sharpness", _enhance),
    "ColorIncreasing": ("color", _enhance_increasing),
    "ContrastIncreasing": ("contrast", _enhance_increasing),
    "BrightnessIncreasing": ("brightness", _enhance_increasing),
    "SharpnessIncreasing": ("sharpness", _enhance_increasing),
    "Desaturate": ("color", lambda share, rng: 1.0 - min(1.0, 0.5 + 0.5 * share)),
    "GaussianBlur": ("gaussian_blur", lambda share, rng: min(2.0, 0.1 + 1.9 * share)),
    "GaussianBlurRand": ("gaussian_blur", lambda share, rng: rng.uniform(0.1, 2.0 * min(1.0, share))),
}


class OneOfMany(NamedTuple):
    """An operation of TrivialAugment, with a value that is drawn from a list."""

    name: str
    values: Sequence[float]
    is_signed: bool
    resamples: tuple[int, ...]

    def draw(self, rng: Random) -> tuple[Operation, ...]:
        value = choose(self.values, rng)
        if self.is_signed:
            value = negate(value, rng)
        if self.name in ("brightness", "contrast", "color", "sharpness"):
            value += 1.0
        return (Operation(self.name, value, choose(self.resamples, rng) if self.name in GEOMETRIC else 0),)


class Nothing:
    """An operation that leaves the image unchanged."""

    def draw(self, rng: Random) -> tuple[Operation, ...]:
        return ()


def trivial_augment(resamples: tuple[int, ...]) -> list[OneOfMany | Nothing]:
    """Return the 14 operations of torchvision's TrivialAugmentWide."""

    def up_to(limit: float) -> list[float]:
        return torch.linspace(0.0, limit, 31).tolist()  # in float32, as in torchvision

    # Shifts are negative, because positive values move the image right or down in torchvision, but left or up here.
    shifts = [-int(value) for value in up_to(32.0)]
    signed = {
        **dict.fromkeys(("shear_x", "shear_y"), up_to(0.99)),
        **dict.fromkeys(("translate_x", "translate_y"), shifts),
        "rotate": up_to(135.0),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), up_to(0.99)),
    }
    unsigned = {
        "posterize": [8 - round(level / 5) for level in range(31)],
        "solarize": up_to(255.0)[::-1],
        **dict.fromkeys(("autocontrast", "equalize"), [0.0]),
    }
    return [
        Nothing(),
        *(OneOfMany(name, values, True, resamples) for name, values in signed.items()),
        *(OneOfMany(name, values, False, resamples) for name, values in unsigned.items()),
    ]
