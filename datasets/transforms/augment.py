"""Augmentation policies and colour jitter for one training image, with torchvision's operations."""

import random
import re
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from configs.schema import Config, Train
from utils.errors import ConfigError, did_you_mean

NUM_LEVELS = 31  # torchvision's magnitudes 0 to 30: three for each of timm's 0 to 10
SOLARIZE_FROM = 128
BLUR_SIGMA = (0.1, 2.0)  # pixels
BLUR_REACH = 6  # pixels to each side, three times the largest sigma

# {name: its parameters with their defaults}
POLICIES: dict[str, dict[str, float]] = {
    "original": {},
    "cifar10": {},
    "svhn": {},
    "rand": {"m": 10, "n": 2, "p": 0.5, "mstd": 0, "inc": 1},  # inc: for timm's strings; torchvision always does that
    "augmix": {"m": 3, "w": 3, "d": -1, "a": 1.0},
    "ta_wide": {},
    "3a": {},
}
# Minimum and maximum: far larger values would take for ever per image. d: -1 means 1, 2 or 3.
LIMITS = {
    "rand": {"m": (0, 10), "n": (1, 100), "p": (0, 1)},
    "augmix": {"m": (1, 10), "w": (1, 100), "d": (-1, 100), "a": (0.001, 1000)},
}
RANDOM_FUNCTIONS = frozenset(
    "bernoulli bernoulli_ exponential_ log_normal_ multinomial normal normal_ poisson rand randint randn randperm "
    "random_ uniform_ _sample_dirichlet".split()
)


class UseGenerator(TorchFunctionMode):
    """Inside this context this thread's random numbers come from one generator; the global ones do not advance."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.__name__
        if name in RANDOM_FUNCTIONS:
            return function(*args, **{**kwargs, "generator": self.generator})
        if name == "mean":  # over an image: in float32 the last digits depend on the number of threads
            return function(*args, **{**kwargs, "dtype": torch.float64}).float()
        return function(*args, **kwargs)


class Augmentation:
    """A policy, then colour jitter. Several threads may call it at once."""

    def __init__(self, steps: list[Callable[[Tensor], Tensor]]):
        self.steps = steps

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        """uint8 [C, H, W] to an augmented copy. Its randomness depends on the next number of `rng` alone."""
        image = image.contiguous()
        with UseGenerator(torch.Generator().manual_seed(int(rng.random() * 2**53))):
            for step in self.steps:
                image = step(image)
        return image


def build_augmentation(config: Config) -> Augmentation | None:
    """The augmentation that the settings ask for, or None."""
    if not changes_pixels(config.TRAIN):
        return None
    train = config.TRAIN
    name, numbers = parse_policy(train)
    from torchvision.transforms import v2  # imported here: it takes a second, and most runs do not need it

    steps = [build_policy(name, numbers, config, v2)] if name else []
    if train.COLOR_JITTER and name in ("", "3a"):
        steps.append(v2.ColorJitter(*[train.COLOR_JITTER] * 3))
    return Augmentation(steps)


def changes_pixels(train: Train) -> bool:
    """Whether there is any augmentation by operations on the pixels, beyond crop and flip."""
    return bool(train.AUTO_AUGMENT or train.RAND_AUGMENT or train.COLOR_JITTER)


def parse_policy(train: Train) -> tuple[str, dict[str, float]]:
    """The policy's name, "" for none, and its parameters: rand-m9-n3 gives rand and {"m": 9, "n": 3, "p": 0.5, ...}."""
    if train.RAND_AUGMENT:
        given = {"m": train.RAND_AUGMENT_MAGNITUDE, "n": train.RAND_AUGMENT_LAYERS, "mstd": 0.5}
        return "rand", POLICIES["rand"] | given
    name, *parts = (train.AUTO_AUGMENT or "").lower().split("-")
    if name and name not in POLICIES:
        raise ConfigError(
            f"TRAIN.AUTO_AUGMENT: unknown policy {train.AUTO_AUGMENT!r} (known: {', '.join(POLICIES)})"
            f"{did_you_mean(name, POLICIES)}"
        )
    numbers = dict(POLICIES.get(name, {}))
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+\.?\d*)", part)
        if not match or match[1] not in numbers:
            known = f"takes {', '.join(numbers)}, each with a number" if numbers else "takes no parameters"
            raise ConfigError(f"TRAIN.AUTO_AUGMENT: {part!r} in {train.AUTO_AUGMENT!r} is invalid; {name} {known}")
        numbers[match[1]] = float(match[2])
    limits = LIMITS.get(name, {})
    if any(not low <= numbers[key] <= high for key, (low, high) in limits.items()):
        allowed = ", ".join(f"{key} from {low:g} to {high:g}" for key, (low, high) in limits.items())
        raise ConfigError(f"TRAIN.AUTO_AUGMENT: {train.AUTO_AUGMENT!r} must have {allowed}")
    return name, numbers


def build_policy(name: str, numbers: dict[str, float], config: Config, v2: ModuleType) -> Callable[[Tensor], Tensor]:
    """The policy as a function of an image."""
    # Rotations and shifts fill uncovered pixels with the mean colour, as in timm.
    data = config.DATA
    fill = [round(255 * value) for value in data.IMAGENET_MEAN[: data.IMAGE_CHANNELS]]
    options = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": fill}
    if name == "rand":
        return RandomOperations([v2.RandAugment(1, level, **options) for level in range(NUM_LEVELS)], numbers)
    if name == "augmix":
        severity, width, depth = (int(numbers[key]) for key in "mwd")
        return v2.AugMix(severity, width, depth, numbers["a"], **options)
    if name == "ta_wide":
        return v2.TrivialAugmentWide(**options)
    if name == "3a":
        blur = v2.GaussianBlur(2 * min(BLUR_REACH, data.IMAGE_SIZE - 1) + 1, BLUR_SIGMA)
        return v2.RandomChoice([v2.Grayscale(data.IMAGE_CHANNELS), v2.RandomSolarize(SOLARIZE_FROM, 1.0), blur])
    policy = v2.AutoAugmentPolicy.IMAGENET if name == "original" else v2.AutoAugmentPolicy(name)
    return v2.AutoAugment(policy, **options)


class RandomOperations:
    """RandAugment as in timm: each operation is applied with a probability, and its magnitude varies."""

    def __init__(self, levels: list[Callable[[Tensor], Tensor]], numbers: dict[str, float]):
        self.levels = levels  # one random operation each, with magnitude 0 to 30
        self.num_layers, self.probability = int(numbers["n"]), numbers["p"]
        self.magnitude, self.deviation = numbers["m"], numbers["mstd"]

    def __call__(self, image: Tensor) -> Tensor:
        for _ in range(self.num_layers):
            if float(torch.rand(())) < self.probability:
                image = self.levels[self._level()](image)
        return image

    def _level(self) -> int:
        if self.deviation > 100:  # timm's way to ask for a uniform magnitude up to the given one
            magnitude = self.magnitude * float(torch.rand(()))
        else:
            magnitude = self.magnitude + self.deviation * float(torch.randn(()))
        return round(3 * min(max(magnitude, 0.0), 10.0))
