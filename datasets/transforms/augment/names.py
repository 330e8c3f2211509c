"""Reads the name of a policy with its parameters: timm's strings, and torchvision's policies that timm lacks."""

import math
import re
from typing import NamedTuple

from configs.schema import Train
from utils.errors import ConfigError, did_you_mean

# {name: its parameters with their defaults}
POLICIES: dict[str, dict[str, float]] = {
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), {"mstd": 0.0}),
    "rand": {"m": 10, "n": 2, "p": 0.5, "mstd": 0, "mmax": 10, "inc": 0},
    "augmix": {"m": 3, "w": 3, "d": 0, "a": 1.0, "b": 0, "mstd": math.inf},
    **dict.fromkeys(("cifar10", "svhn", "ta_wide"), {}),
}
# Behind rand's t: other sets of operations, with the largest n; with weights, each operation comes at most once.
CHOICES = {"weights": 15, "3a": 100, "3aw": 14}
# Minimum and maximum: far larger values would take for ever per image.
LIMITS = {
    "rand": {"m": (0, 1000), "n": (1, 100), "p": (0, 1), "mmax": (0, 1000), "inc": (0, 1)},
    "augmix": {"m": (0, 1000), "w": (1, 100), "d": (0, 100), "a": (0.01, 1000), "b": (0, 1)},
}
WHOLE = ("n", "w", "d", "inc", "b")


class Policy(NamedTuple):
    """A policy by its name."""

    name: str  # of POLICIES
    numbers: dict[str, float]
    choice: str = ""  # of CHOICES


def parse_policy(train: Train) -> Policy | None:
    """The policy that the settings name: rand-m9-n3 gives rand and {"m": 9, "n": 3, "p": 0.5, ...}."""
    if train.RAND_AUGMENT:
        given = {"m": train.RAND_AUGMENT_MAGNITUDE, "n": train.RAND_AUGMENT_LAYERS, "mstd": 0.5, "inc": 1}
        return Policy("rand", POLICIES["rand"] | given)
    if not train.AUTO_AUGMENT:
        return None
    name, *parts = train.AUTO_AUGMENT.lower().split("-")
    if name not in POLICIES:
        raise ConfigError(
            f"TRAIN.AUTO_AUGMENT: unknown policy {train.AUTO_AUGMENT!r} (known: {', '.join(POLICIES)})"
            f"{did_you_mean(name, POLICIES)}"
        )
    sets = {f"t{choice}": choice for choice in CHOICES} if name == "rand" else {}
    choices = [sets[part] for part in parts if part in sets]
    numbers = [_number(name, part, train.AUTO_AUGMENT) for part in parts if part not in sets]
    policy = Policy(name, POLICIES[name] | dict(numbers), "".join(choices[:1]))
    _check_limits(policy, train.AUTO_AUGMENT)
    return policy


def _number(name: str, part: str, text: str) -> tuple[str, float]:
    """m9 gives ("m", 9.0)."""
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
