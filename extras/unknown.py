"""The confidence below which predict.py -unknown gives no answer."""

import math
from collections.abc import Callable
from typing import NamedTuple

from engine.predict.classifier import Classifier
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
    """Return the lowest confidence at or above which at least this share is right, and whether a test confirms it.

    The exact binomial test shows with 95% certainty that at least this share is right. Without the test, the share on
    other images would be too low about half of the time. If no confidence passes the test, return the lowest one at or
    above which this share of the validation images is right, or None if there is none.
    """
    fitting = sorted(Answered(*point) for point in curve if point[2] / point[1] >= share)
    certain = next((each for each in fitting if is_certain(each, share)), None)
    return (certain, True) if certain else (fitting[0] if fitting else None, False)


def is_certain(answered: Answered, share: float) -> bool:
    """Return whether at least this many right answers have a probability of at most 5% if only this share is right."""
    total = answered.num_images

    def log_probability(right: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(right + 1) - math.lgamma(total - right + 1)
        return ways + right * math.log(share) + (total - right) * math.log1p(-share)

    numbers = range(answered.num_right, total + 1)
    return math.fsum(math.exp(log_probability(right)) for right in numbers) <= 1 - CERTAINTY + EPSILON


def find_threshold(classifier: Classifier, share: float, report: Callable[[str], None]) -> float:
    """Return the confidence threshold of -unknown. Report it and the share of the validation images that reach it."""
    calibration = classifier.calibration
    if not calibration.get("curve"):
        why = calibration.get("reason", "")
        raise ConfigError(
            f"-unknown: {classifier.source} has no calibration for these weights{f', because {why}' if why else ''}; "
            "use the best.pth of a run with CALIBRATE: true, or -unsure with a probability"
        )
    total, (found, certain) = calibration["figures"]["num_images"], find_answered(calibration["curve"], share)
    if found is None:
        report(
            f"-unknown {share}: no confidence threshold reaches a share of {share:.3g} right answers on "
            f"{counted(total, 'validation image')}, so all images are unknown; give a lower share"
        )
        return math.inf
    report(
        f"-unknown {share}: answers at a confidence of {found.confidence:.4f} or higher; this covers "
        f"{found.num_images / total:.1%} of {counted(total, 'validation image')}, and "
        f"{found.num_right / found.num_images:.1%} of these were right"
    )
    if not certain:
        report(
            f"-unknown {share}: {counted(found.num_images, 'validation image')} with at least this confidence are too few "
            f"to claim this share on other images with {CERTAINTY:.0%} certainty"
        )
    return found.confidence - ROUNDING
