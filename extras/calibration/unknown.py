"""The confidence below which predict.py -unknown gives no answer."""

import math
from collections.abc import Callable
from typing import NamedTuple

from engine.predict.classifier import Classifier
from utils.errors import ConfigError
from utils.text import counted

CERTAINTY = 0.95  # of the claim that the answers are right often enough
ROUNDING = 1e-5  # a probability differs by less if the same image is computed again in another batch


class Answered(NamedTuple):
    """The validation images with at least this confidence."""

    confidence: float
    num_images: int
    num_right: int


def lowest_confidence(curve: list[list], share: float) -> Answered | None:
    """Return the lowest confidence at or above which at least this share of the validation images was right."""
    fits = [Answered(*point) for point in curve if point[2] / point[1] >= share]
    return min(fits, default=None)


def fewest_images(share: float) -> int:
    """Return how many images must all be right to show, with 95% certainty, that at least this share is right."""
    return math.ceil(math.log(1 - CERTAINTY) / math.log(share))


def find_threshold(classifier: Classifier, share: float, report: Callable[[str], None]) -> float:
    """Return the confidence for -unknown. Report it, and the share of the validation images that it answers."""
    calibration = classifier.calibration
    if not calibration.get("curve"):
        why = calibration.get("reason", "")
        raise ConfigError(
            f"-unknown: {classifier.source} has no calibration of these weights{f', because {why}' if why else ''}; use "
            "the best.pth of a run with CALIBRATE: true, or -unsure with a probability"
        )
    total, found = calibration["figures"]["num_images"], lowest_confidence(calibration["curve"], share)
    if found is None:
        report(
            f"-unknown {share}: at no confidence were {share:.3g} of the {counted(total, 'validation image')} right, so "
            "all images are unknown"
        )
        return math.inf
    report(
        f"-unknown {share}: answers from a confidence of {found.confidence:.4f} on; that is {found.num_images / total:.1%} "
        f"of {counted(total, 'validation image')}, and {found.num_right / found.num_images:.1%} of these were right"
    )
    if found.num_images < (needed := fewest_images(share)):
        report(
            f"-unknown {share}: {counted(found.num_images, 'validation image')} with at least this confidence are too few "
            f"for this claim; it needs at least {needed}, all of them right"
        )
    return found.confidence - ROUNDING
