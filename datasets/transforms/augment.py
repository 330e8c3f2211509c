"""Augmentation policies and colour jitter, distributed as in timm's policies and torchvision's TrivialAugment.

All random numbers come from the caller's generator, and only from methods with equal results in every Python version.
"""

import functools
import math
import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from configs.schema import Config, Shape, Train
from datasets.transforms.operations import (
    MAX_MAGNITUDE,
    DrawnOperations,
    Operation,
    Options,
    RandomOperation,
    apply_operations,
    choose,
    trivial_augment,
)
from utils.errors import ConfigError, did_you_mean

SHIFT, SHIFT_AUGMIX = 0.45, 0.3  # largest shifts at magnitude 10, as fractions of the width or height
RESAMPLE = {  # Pillow's interpolation numbers for rotations and shifts, which do not support lanczos
    "nearest": (int(Image.Resampling.NEAREST),),
    "bilinear": (int(Image.Resampling.BILINEAR),),
    "bicubic": (int(Image.Resampling.BICUBIC),),
    "lanczos": (int(Image.Resampling.BICUBIC),),
    "random": (int(Image.Resampling.BILINEAR), int(Image.Resampling.BICUBIC)),
}
# {name of a policy: {parameter: (default, minimum, maximum)}}. Far larger values would take too long per image.
POLICIES: dict[str, dict[str, tuple[float, float, float]]] = {
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), {"mstd": (0, 0, math.inf)}),
    "rand": {
        **{"m": (10, 0, 1000), "n": (2, 1, 100), "p": (0.5, 0, 1)},
        **{"mstd": (0, 0, math.inf), "mmax": (10, 0, 1000), "inc": (0, 0, 1)},
    },
    "augmix": {
        **{"m": (3, 0, 1000), "w": (3, 1, 100), "d": (0, 0, 100), "a": (1, 0.01, 1000)},
        **{"mstd": (math.inf, 0, math.inf)},
    },
    "ta_wide": {},
}
WHOLE = ("n", "w", "d", "inc")  # parameters that are whole numbers
# {set of operations (3a in rand-m9-t3a): its largest n}. Weighted operations are drawn without replacement, so n cannot
# exceed their number.
CHOICES = {"weights": 15, "3a": 100, "3aw": 14}


class Policy(NamedTuple):
    """An augmentation policy with its parameters."""

    name: str  # a key of POLICIES
    numbers: dict[str, float]
    choice: str = ""  # a key of CHOICES


def parse_policy(train: Train) -> Policy | None:
    """Return the policy in the settings, or None. For example, rand-m9-n3 is rand with {"m": 9, "n": 3, ...}."""
    if not train.AUTO_AUGMENT:
        return None
    name, *parts = train.AUTO_AUGMENT.lower().split("-")
    if name not in POLICIES:
        raise ConfigError(
            f"TRAIN.AUTO_AUGMENT: unknown policy {train.AUTO_AUGMENT!r} (known: {', '.join(POLICIES)})"
            f"{did_you_mean(name, POLICIES)}"
        )
    known, choice = POLICIES[name], ""
    numbers = {key: float(default) for key, (default, _, _) in known.items()}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+\.?\d*)", part)
        if name == "rand" and part[:1] == "t" and part[1:] in CHOICES:
            choice = choice or part[1:]
        elif match and match[1] in known:
            numbers[match[1]] = float(match[2])
        else:
            takes = f"takes {', '.join(known)}, each with a number" if known else "takes no parameters"
            also = f", or t with {', '.join(CHOICES)}" if name == "rand" else ""
            raise ConfigError(
                f"TRAIN.AUTO_AUGMENT: {part!r} in {train.AUTO_AUGMENT!r} is invalid; {name} {takes}{also}"
            )
    for key, (_, low, high) in known.items():
        high = CHOICES[choice] if choice and key == "n" else high
        if not low <= numbers[key] <= high or (key in WHOLE and numbers[key] % 1):
            kind = "a whole number" if key in WHOLE else "a number"
            raise ConfigError(
                f"TRAIN.AUTO_AUGMENT: {key} in {train.AUTO_AUGMENT!r} must be {kind} from {low:g} to {high:g}"
            )
    return Policy(name, numbers, choice)


DrawPolicy = Callable[[Random], DrawnOperations]


def shifts_of(shape: Shape, share: float) -> dict[str, float]:
    """Return the pixels of shifts by this share of the width and of the height."""
    return {"translate_x": share * shape.width, "translate_y": share * shape.height}


def build_policy(policy: Policy, shape: Shape, resamples: tuple[int, ...]) -> DrawPolicy:
    """Return the function that draws from the policy, for images of this shape, with these interpolations."""
    if policy.name == "ta_wide":
        return functools.partial(draw_sequence, trivial_augment(resamples))
    from timm.data import auto_augment as timm  # imported here: the import takes a second, and most runs do not need it

    numbers = policy.numbers
    deviation = numbers["mstd"]
    if policy.name == "augmix":
        options = Options(resamples, shifts_of(shape, SHIFT_AUGMIX), deviation)
        operations = [RandomOperation(each.name, 1.0, numbers["m"], options) for each in timm.augmix_ops()]
        return functools.partial(draw_augmix, operations, int(numbers["w"]), int(numbers["d"]), numbers["a"])
    if policy.name == "rand":
        deviation = math.inf if deviation > 100 else deviation  # in timm, more than 100 means a uniform magnitude
        options = Options(resamples, shifts_of(shape, SHIFT), deviation, numbers["mmax"] or MAX_MAGNITUDE)
        names = timm.rand_augment_choices(policy.choice, increasing=bool(numbers["inc"]))
        operations = [RandomOperation(name, numbers["p"], numbers["m"], options) for name in names]
        weights = [*names.values()] if isinstance(names, dict) else None
        return functools.partial(draw_rand_augment, operations, weights, int(numbers["n"]))
    options = Options(resamples, shifts_of(shape, SHIFT), deviation)
    sequences = [
        [RandomOperation(each.name, each.prob, each.magnitude, options) for each in sequence]
        for sequence in timm.auto_augment_policy(policy.name)
    ]
    return functools.partial(draw_sequence, sequences)


def draw_sequence(sequences: list[list], rng: Random) -> DrawnOperations:
    """Draw one of several sequences of operations, as AutoAugment does."""
    return DrawnOperations(_draw_each(choose(sequences, rng), rng))


def draw_rand_augment(operations: list, weights: list[float] | None, count: int, rng: Random) -> DrawnOperations:
    """Draw `count` random operations. With weights, no operation is drawn twice."""
    if weights is None:
        return DrawnOperations(_draw_each([choose(operations, rng) for _ in range(count)], rng))
    weights, chosen = list(weights), []
    for _ in range(count):
        index = _choose_weighted(weights, rng)
        weights[index] = 0.0
        chosen.append(operations[index])
    return DrawnOperations(_draw_each(chosen, rng))


def _choose_weighted(weights: list[float], rng: Random) -> int:
    place = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        place -= weight
        if place < 0:
            return index
    return max(range(len(weights)), key=weights.__getitem__)  # reached only through rounding


def draw_augmix(operations: list, width: int, depth: int, alpha: float, rng: Random) -> DrawnOperations:
    """Draw chains of operations to mix with each other and with the image. A `depth` of 0 means from 1 to 3."""
    shares = [rng.gammavariate(alpha, 1.0) for _ in range(width)]  # divided by their sum, a Dirichlet distribution
    if sum(shares) == 0:  # with a small alpha all shares can underflow; one of them would be almost the sum
        shares = [1.0] + [0.0] * (width - 1)
    total = sum(shares)
    blend, chains = rng.betavariate(alpha, alpha), []
    for _ in range(width):
        chain = [choose(operations, rng) for _ in range(depth or 1 + int(rng.random() * 3))]
        chains.append(_draw_each(chain, rng))
    return DrawnOperations(chains=tuple(chains), weights=tuple(share / total for share in shares), blend=blend)


def _draw_each(operations: list, rng: Random) -> tuple[Operation, ...]:
    return tuple(drawn for operation in operations for drawn in operation.draw(rng))


class Augmentation:
    """An augmentation policy followed by colour jitter. Several threads may use it at once."""

    def __init__(self, config: Config):
        train, data = config.TRAIN, config.DATA
        policy = parse_policy(train)
        resamples = RESAMPLE[data.train_interpolation]
        self.draw_policy = build_policy(policy, data.shape, resamples) if policy else None
        strength = train.COLOR_JITTER
        if policy and "3a" not in (policy.name, policy.choice[:2]):
            strength = 0.0  # as in timm, jitter is only used without a policy or with 3-Augment's operations
        factors = max(0.0, 1 - strength), 1 + strength  # smallest and largest
        self.jitter = dict.fromkeys(("brightness", "contrast", "color"), factors) if strength else {}
        colour = tuple(min(max(round(255 * mean), 0), 255) for mean in data.IMAGENET_MEAN[: data.IMAGE_CHANNELS])
        self.fill = colour if len(colour) > 1 else colour[0]  # for pixels that a rotation or shift uncovers, as in timm

    def draw(self, rng: Random) -> DrawnOperations:
        """Draw the operations for one image. All random numbers come from `rng`."""
        drawn = self.draw_policy(rng) if self.draw_policy else DrawnOperations()
        return drawn._replace(operations=(*drawn.operations, *self._draw_jitter(rng)))

    def apply(self, drawn: DrawnOperations, pixels: np.ndarray) -> np.ndarray:
        """Apply drawn operations to an image, uint8 [H, W, C]. Return `pixels` itself or a new array."""
        return apply_operations(drawn, pixels, self.fill)

    def __call__(self, image: Tensor, rng: Random) -> None:
        """Augment an image, uint8 [C, H, W], in place."""
        pixels = image.permute(1, 2, 0).numpy()
        changed = self.apply(self.draw(rng), pixels)
        if changed is not pixels:
            pixels[...] = changed

    def _draw_jitter(self, rng: Random) -> list[Operation]:
        """Draw colour changes as torchvision's ColorJitter does: in random order, each with a random factor."""
        names = list(self.jitter)
        operations = []
        while names:
            name = names.pop(int(rng.random() * len(names)))
            operations.append(Operation(name, rng.uniform(*self.jitter[name])))
        return operations
