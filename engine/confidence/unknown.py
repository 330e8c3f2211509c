"""The confidence below which halfstep predict -unknown gives no answer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from models.weights.record import KNOWN
from utils.errors import ConfigError
from utils.text import counted

CERTAINTY = 0.95  # of the claim that the answers are right often enough
EPSILON = 1e-12  # tolerated rounding error of a probability
ROUNDING = 1e-5  # recomputing an image in another batch changes its probability by less


class Answered(NamedTuple):
    """The validation images with at least this confidence."""

    confidence: float
    num_images: int
    num_right: int


def find_answered(curve: list[list], share: float) -> tuple[Answered | None, bool]:
    """Return the lowest confidence at or above which at least this share is right, and whether tests confirm it.

    The exact binomial test is applied from the surest images down, at numbers of images that do not depend on the
    labels, until it fails. So at most 5% of all validation sets confirm a confidence at or above which fewer answers to
    other images are right. The lowest of all confidences that pass the test would be too low more often. If none is
    confirmed, return the lowest one at or above which this share of the validation images is right, or None.
    """
    points, certain = [Answered(*point) for point in curve], None
    for number in numbers_to_test(points[-1].num_images if points else 0, share):
        point = next(each for each in points if each.num_images >= number)
        if point.num_images - point.num_right > most_wrong(point.num_images, share):
            break
        certain = point
    fitting = min((each for each in points if each.num_right / each.num_images >= share), default=None)
    return (certain, True) if certain else (fitting, False)


def numbers_to_test(total: int, share: float) -> list[int]:
    """Return the numbers of images to test, from a tenth of all on, at least 5% apart.

    At each of these numbers, the test starts to allow one more wrong answer. The last number is `total`.
    """
    numbers, number = [], max(1, total // 10)
    while number <= total:
        if most_wrong(number, share) > most_wrong(number - 1, share):
            numbers.append(number)
            number += max(1, total // 20)
        else:
            number += 1
    return [*numbers, total] if numbers and numbers[-1] < total else numbers


def most_wrong(total: int, share: float) -> int:
    """Return how many of `total` answers may be wrong to show with 95% certainty that this share is right, or -1."""
    wrong = np.arange(1, min(int(total * (1 - share)) + 1, total) + 1)
    ratios = (total - wrong + 1) / wrong * (1 - share) / share
    logarithms = total * math.log(share) + np.cumsum([0, *np.log(ratios)])
    chances = np.cumsum(np.exp(logarithms))  # of so many wrong answers or fewer, if only this share is right
    return int(np.searchsorted(chances, 1 - CERTAINTY + EPSILON, side="right")) - 1


def find_threshold(source: str, calibration: dict[str, Any], share: float, report: Callable[[str], None]) -> float:
    """Return the confidence threshold of -unknown. Report it and the share of the validation images that reach it.

    `source`, `calibration`: the path of the weights and their calibration.
    """
    if not calibration.get("curve"):
        why = calibration.get("reason", "")
        raise ConfigError(
            f"-unknown: {source} has no calibration for these weights{f', because {why}' if why else ''}; "
            "use the best.pth of a run with CALIBRATE: true, without -raw, or -unsure with a probability"
        )
    total, (threshold, certain) = calibration["figures"]["num_images"], find_answered(calibration["curve"], share)
    if threshold is None:
        report(
            f"-unknown {share}: no confidence threshold reaches a share of {share:.3g} right answers on "
            f"{counted(total, 'validation image')}, so all images are unknown; give a lower share"
        )
        return math.inf
    report(
        f"-unknown {share}: answers at a confidence of {threshold.confidence:.4f} or higher; this covers "
        f"{threshold.num_images / total:.1%} of {counted(total, 'validation image')}, and "
        f"{threshold.num_right / threshold.num_images:.1%} of these were right"
    )
    if not certain:
        report(
            f"-unknown {share}: {counted(threshold.num_images, 'validation image')} with at least this confidence "
            f"are too few to claim this share on other images with {CERTAINTY:.0%} certainty"
        )
    known = calibration.get(KNOWN)
    if known is None or "reason" in known:
        why = known["reason"] if known else "a run has them if it began with -pretrained"
        report(
            f"-unknown {share}: {source} has no statistics of the validation images ({why}), so only the "
            "confidence decides"
        )
    return threshold.confidence - ROUNDING
