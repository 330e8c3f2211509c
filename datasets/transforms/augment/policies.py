"""The policies by name: which operations they choose, how many and in which order."""

import math
import re
from random import Random
from typing import NamedTuple, Protocol

from datasets.transforms.augment.names import Policy
from datasets.transforms.augment.plan import Plan
from datasets.transforms.augment.random_operations import MOST, Options, TimmOperation, TorchvisionOperation, choose

SHIFT, SHIFT_AUGMIX = 0.45, 0.3  # of the side, at magnitude 10
NUM_LEVELS, NUM_LEVELS_WIDE = 10, 31  # torchvision's AutoAugment, TrivialAugment

RandomOperation = TimmOperation | TorchvisionOperation


class DrawsPlan(Protocol):
    """A policy that is ready to draw."""

    def draw(self, rng: Random) -> Plan: ...


class SubPolicies(NamedTuple):
    """One of several sequences of operations, as AutoAugment has them."""

    sequences: list[list[RandomOperation]]

    def draw(self, rng: Random) -> Plan:
        return _draw_each(choose(self.sequences, rng), rng)


class RandAugment(NamedTuple):
    """So many random operations; with weights, none of them twice."""

    operations: list[RandomOperation]
    weights: list[float] | None
    count: int

    def draw(self, rng: Random) -> Plan:
        if self.weights is None:
            return _draw_each([choose(self.operations, rng) for _ in range(self.count)], rng)
        weights, chosen = list(self.weights), []
        for _ in range(self.count):
            index = _choose_weighted(weights, rng)
            weights[index] = 0.0
            chosen.append(self.operations[index])
        return _draw_each(chosen, rng)


class AugMix(NamedTuple):
    """Chains of operations, mixed with each other and with the image."""

    operations: list[RandomOperation]
    width: int
    depth: int  # 0: 1 to 3, drawn for each chain
    alpha: float
    is_blended: bool  # timm's b1

    def draw(self, rng: Random) -> Plan:
        weights, blend = _dirichlet(self.alpha, self.width, rng), rng.betavariate(self.alpha, self.alpha)
        chains = []
        for _ in range(self.width):
            chain = [choose(self.operations, rng) for _ in range(self.depth or 1 + int(rng.random() * 3))]
            chains.append(_draw_each(chain, rng).operations)
        if self.is_blended:
            return Plan(chains=tuple(chains), weights=_blended_weights(weights, blend))
        return Plan(chains=tuple(chains), weights=tuple(weights), blend=blend)


def build_policy(policy: Policy, side: int, resamples: tuple[int, ...]) -> DrawsPlan:
    """A policy for square images, with these interpolations."""
    if policy.name in ("cifar10", "svhn", "ta_wide"):
        return SubPolicies(_torchvision_sequences(policy.name, side, resamples))
    from timm.data import auto_augment as timm  # imported here: it takes a second, and most runs do not need it

    numbers = policy.numbers
    deviation = numbers["mstd"]
    if policy.name == "augmix":
        options = Options(resamples, SHIFT_AUGMIX * side, deviation)
        operations = [TimmOperation(each.name, 1.0, numbers["m"], options) for each in timm.augmix_ops()]
        return AugMix(operations, int(numbers["w"]), int(numbers["d"]), numbers["a"], bool(numbers["b"]))
    if policy.name == "rand":
        deviation = math.inf if deviation > 100 else deviation  # timm's way to ask for a uniform magnitude
        options = Options(resamples, SHIFT * side, deviation, numbers["mmax"] or MOST)
        names = timm.rand_augment_choices(policy.choice, increasing=bool(numbers["inc"]))
        operations = [TimmOperation(name, numbers["p"], numbers["m"], options) for name in names]
        return RandAugment(operations, [*names.values()] if isinstance(names, dict) else None, int(numbers["n"]))
    options = Options(resamples, SHIFT * side, deviation)
    sequences = timm.auto_augment_policy(policy.name)
    return SubPolicies(
        [[TimmOperation(each.name, each.prob, each.magnitude, options) for each in sequence] for sequence in sequences]
    )


def _torchvision_sequences(name: str, side: int, resamples: tuple[int, ...]) -> list[list[TorchvisionOperation]]:
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    if name == "ta_wide":
        values = {None: ([0.0], False)} | _torchvision_values(NUM_LEVELS_WIDE, 0.99, 32.0, 135.0, 6)
        del values["invert"]
        return [[TorchvisionOperation(name, 1.0, *each, resamples)] for name, each in values.items()]
    values = _torchvision_values(NUM_LEVELS, 0.3, 150 / 331 * side, 30.0, 4)

    def operation(their_name: str, probability: float, level: int | None) -> TorchvisionOperation:
        name = re.sub("([XY])$", r"_\1", their_name).lower()  # ShearX: shear_x
        levels, is_signed = values[name]
        return TorchvisionOperation(name, probability, [levels[level or 0]], is_signed, resamples)

    return [[operation(*each) for each in sequence] for sequence in AutoAugment(AutoAugmentPolicy(name)).policies]


def _torchvision_values(count: int, shear: float, shift: float, degrees: float, bits: int) -> dict:
    """{name: (values for `count` levels, whether their sign is drawn)}; `bits`: how many posterize removes at most."""
    import torch

    def up_to(limit: float) -> list[float]:
        return torch.linspace(0.0, limit, count).tolist()  # in float32, as torchvision's

    factor = up_to(0.9 if count == NUM_LEVELS else 0.99)
    posterize = 8 - (torch.arange(count) / ((count - 1) / bits)).round().int()
    shifts = [-int(value) for value in up_to(shift)]  # they move the image, ours the place that is shown
    return {
        **dict.fromkeys(("shear_x", "shear_y"), (up_to(shear), True)),
        **dict.fromkeys(("translate_x", "translate_y"), (shifts, True)),
        "rotate": (up_to(degrees), True),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), (factor, True)),
        "posterize": (posterize.tolist(), False),
        "solarize": (torch.linspace(255.0, 0.0, count).tolist(), False),
        **dict.fromkeys(("autocontrast", "equalize", "invert"), ([0.0], False)),
    }


def _draw_each(operations: list[RandomOperation], rng: Random) -> Plan:
    return Plan(tuple(drawn for operation in operations for drawn in operation.draw(rng)))


def _choose_weighted(weights: list[float], rng: Random) -> int:
    place = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        place -= weight
        if place < 0:
            return index
    return max(range(len(weights)), key=weights.__getitem__)  # rounding led past the end


def _dirichlet(alpha: float, count: int, rng: Random) -> list[float]:
    shares = [rng.gammavariate(alpha, 1.0) for _ in range(count)]
    total = sum(shares)
    if total == 0:  # with a small alpha all can be too small for a float; one of them would have been all but 1
        return [1.0] + [0.0] * (count - 1)
    return [share / total for share in shares]


def _blended_weights(weights: list[float], blend: float) -> tuple[float, ...]:
    """Weights for blending one chain after the other that give almost the same as all at once."""
    left, result = 1.0, []
    for weight in reversed(weights):
        result.append(weight * blend / left if left > 0 else 0.0)
        left *= 1 - result[-1]
    return tuple(reversed(result))
