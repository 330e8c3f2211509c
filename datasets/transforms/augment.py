"""Random operations of augmentation policies, distributed as in timm's policies and torchvision's TrivialAugment.

All random numbers come from the caller's generator, and only from methods with equal results in every Python version.
"""

import math
import re
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from configs.schema import Config, Train
from datasets.transforms.pixels import DrawnOperations, Operation, apply_operations
from datasets.transforms.random_operations import MOST, Options, RandomOperation, choose, trivial_augment
from utils.errors import ConfigError, did_you_mean

# {name of a policy: its parameters with their defaults}
POLICIES: dict[str, dict[str, float]] = {
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), {"mstd": 0.0}),
    "rand": {"m": 10, "n": 2, "p": 0.5, "mstd": 0, "mmax": 10, "inc": 0},
    "augmix": {"m": 3, "w": 3, "d": 0, "a": 1.0, "mstd": math.inf},
    "ta_wide": {},
}
# {name of a policy in papers, without underscores: our name}
PAPERS = {
    "autoaugment": "original",
    "randaugment": "rand",
    "trivialaugment": "ta_wide",
    "trivialaugmentwide": "ta_wide",
}
# {set of operations (3a in rand-m9-t3a): its largest n}. Weighted operations are drawn without replacement, so n cannot
# exceed their number.
CHOICES = {"weights": 15, "3a": 100, "3aw": 14}
# Minimum and maximum of each parameter. Far larger values would take too long per image.
LIMITS = {
    "rand": {"m": (0, 1000), "n": (1, 100), "p": (0, 1), "mmax": (0, 1000), "inc": (0, 1)},
    "augmix": {"m": (0, 1000), "w": (1, 100), "d": (0, 100), "a": (0.01, 1000)},
}
WHOLE = ("n", "w", "d", "inc")  # parameters that are whole numbers
SHIFT, SHIFT_AUGMIX = 0.45, 0.3  # largest shifts at magnitude 10, as fractions of the side
RESAMPLE = {  # Pillow's interpolation numbers for rotations and shifts, which do not support lanczos
    "nearest": (int(Image.Resampling.NEAREST),),
    "bilinear": (int(Image.Resampling.BILINEAR),),
    "bicubic": (int(Image.Resampling.BICUBIC),),
    "lanczos": (int(Image.Resampling.BICUBIC),),
    "random": (int(Image.Resampling.BILINEAR), int(Image.Resampling.BICUBIC)),
}


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
        plain = name.replace("_", "")
        raise ConfigError(
            f"TRAIN.AUTO_AUGMENT: unknown policy {train.AUTO_AUGMENT!r} (known: {', '.join(POLICIES)})"
            f"{f'; did you mean {PAPERS[plain]}?' if plain in PAPERS else did_you_mean(name, POLICIES)}"
        )
    sets = {f"t{choice}": choice for choice in CHOICES} if name == "rand" else {}
    choices = [sets[part] for part in parts if part in sets]
    numbers = [_number(name, part, train.AUTO_AUGMENT) for part in parts if part not in sets]
    policy = Policy(name, POLICIES[name] | dict(numbers), "".join(choices[:1]))
    _check_limits(policy, train.AUTO_AUGMENT)
    return policy


def _number(name: str, part: str, text: str) -> tuple[str, float]:
    """Return the name and value of a parameter: m9 gives ("m", 9.0)."""
    known = POLICIES[name]
    match = re.fullmatch(r"([a-z]+)(\d+\.?\d*)", part)
    if not match or match[1] not in known or (match[1] in WHOLE and float(match[2]) % 1):
        takes = f"takes {', '.join(known)}, each with a number" if known else "takes no parameters"
        also = f", or t with {', '.join(CHOICES)}" if name == "rand" else ""
        whole = ", ".join(key for key in WHOLE if key in known)
        also += f"; {whole} are whole numbers" if whole else ""
        raise ConfigError(f"TRAIN.AUTO_AUGMENT: {part!r} in {text!r} is invalid; {name} {takes}{also}")
    return match[1], float(match[2])


def _check_limits(policy: Policy, text: str) -> None:
    limits = LIMITS.get(policy.name, {})
    if policy.choice:
        limits = limits | {"n": (1, CHOICES[policy.choice])}
    if any(not low <= policy.numbers[key] <= high for key, (low, high) in limits.items()):
        allowed = ", ".join(f"{key} from {low:g} to {high:g}" for key, (low, high) in limits.items())
        raise ConfigError(f"TRAIN.AUTO_AUGMENT: {text!r} must have {allowed}")


class SubPolicies(NamedTuple):
    """A policy that draws one of several sequences of operations, as AutoAugment does."""

    sequences: list[list]

    def draw(self, rng: Random) -> DrawnOperations:
        return _draw_each(choose(self.sequences, rng), rng)


class RandAugment(NamedTuple):
    """A policy that draws a number of random operations. With weights, no operation is drawn twice."""

    operations: list
    weights: list[float] | None
    count: int

    def draw(self, rng: Random) -> DrawnOperations:
        if self.weights is None:
            return _draw_each([choose(self.operations, rng) for _ in range(self.count)], rng)
        weights, chosen = list(self.weights), []
        for _ in range(self.count):
            index = _choose_weighted(weights, rng)
            weights[index] = 0.0
            chosen.append(self.operations[index])
        return _draw_each(chosen, rng)


class AugMix(NamedTuple):
    """A policy that mixes several chains of operations with each other and with the image."""

    operations: list
    width: int
    depth: int  # the length of each chain; 0: drawn from 1 to 3
    alpha: float

    def draw(self, rng: Random) -> DrawnOperations:
        weights, blend = _dirichlet(self.alpha, self.width, rng), rng.betavariate(self.alpha, self.alpha)
        chains = []
        for _ in range(self.width):
            chain = [choose(self.operations, rng) for _ in range(self.depth or 1 + int(rng.random() * 3))]
            chains.append(_draw_each(chain, rng).operations)
        return DrawnOperations(chains=tuple(chains), weights=tuple(weights), blend=blend)


def build_policy(policy: Policy, side: int, resamples: tuple[int, ...]) -> SubPolicies | RandAugment | AugMix:
    """Return the policy for square images of this side, with these interpolations."""
    if policy.name == "ta_wide":
        return SubPolicies([[operation] for operation in trivial_augment(resamples)])
    from timm.data import auto_augment as timm  # imported here: the import takes a second, and most runs do not need it

    numbers = policy.numbers
    deviation = numbers["mstd"]
    if policy.name == "augmix":
        options = Options(resamples, SHIFT_AUGMIX * side, deviation)
        operations = [RandomOperation(each.name, 1.0, numbers["m"], options) for each in timm.augmix_ops()]
        return AugMix(operations, int(numbers["w"]), int(numbers["d"]), numbers["a"])
    if policy.name == "rand":
        deviation = math.inf if deviation > 100 else deviation  # in timm, more than 100 means a uniform magnitude
        options = Options(resamples, SHIFT * side, deviation, numbers["mmax"] or MOST)
        names = timm.rand_augment_choices(policy.choice, increasing=bool(numbers["inc"]))
        operations = [RandomOperation(name, numbers["p"], numbers["m"], options) for name in names]
        return RandAugment(operations, [*names.values()] if isinstance(names, dict) else None, int(numbers["n"]))
    options = Options(resamples, SHIFT * side, deviation)
    sequences = timm.auto_augment_policy(policy.name)
    return SubPolicies(
        [
            [RandomOperation(each.name, each.prob, each.magnitude, options) for each in sequence]
            for sequence in sequences
        ]
    )


def _draw_each(operations: list, rng: Random) -> DrawnOperations:
    return DrawnOperations(tuple(drawn for operation in operations for drawn in operation.draw(rng)))


def _choose_weighted(weights: list[float], rng: Random) -> int:
    place = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        place -= weight
        if place < 0:
            return index
    return max(range(len(weights)), key=weights.__getitem__)  # reached only through rounding


def _dirichlet(alpha: float, count: int, rng: Random) -> list[float]:
    shares = [rng.gammavariate(alpha, 1.0) for _ in range(count)]
    total = sum(shares)
    if total == 0:  # with a small alpha all shares can underflow; one of them would be almost 1
        return [1.0] + [0.0] * (count - 1)
    return [share / total for share in shares]


class Augmentation:
    """An augmentation policy followed by colour jitter. Several threads may use it at once."""

    def __init__(self, config: Config):
        train, data = config.TRAIN, config.DATA
        policy = parse_policy(train)
        self.policy = build_policy(policy, data.IMAGE_SIZE, RESAMPLE[data.train_interpolation]) if policy else None
        self.jitter = _jitter(train.COLOR_JITTER, policy)
        colour = tuple(min(max(round(255 * mean), 0), 255) for mean in data.IMAGENET_MEAN[: data.IMAGE_CHANNELS])
        self.fill = colour if len(colour) > 1 else colour[0]  # for pixels that a rotation or shift uncovers, as in timm

    def draw(self, rng: Random) -> DrawnOperations:
        """Draw the operations for one image. All random numbers come from `rng`."""
        drawn = self.policy.draw(rng) if self.policy else DrawnOperations()
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


def _jitter(strength: float, policy: Policy | None) -> dict[str, tuple[float, float]]:
    """Return {operation: smallest and largest factor}.

    As in timm, jitter is only used without a policy or with 3-Augment's operations.
    """
    if not strength or (policy and "3a" not in (policy.name, policy.choice[:2])):
        return {}
    return dict.fromkeys(("brightness", "contrast", "color"), (max(0.0, 1 - strength), 1 + strength))
