"""The confidence below which predict.py -unknown gives no answer."""

import math
from collections.abc import Callable
from typing import NamedTuple

from engine.predict.classifier import Classifier
from utils.errors import ConfigError
from utils.text import counted

CERTAINTY = 0.95  # of the claim that the answers are right often enough
EPSILON = 1e-12  # tolerated rounding of a probability
ROUNDING = 1e-5  # a probability differs by less if the same image is computed again in another batch


class Answered(NamedTuple):
    """The validation images with at least this confidence."""

    confidence: float
    num_images: int
    num_right: int


def find_answered(curve: list[list], share: float) -> tuple[Answered | None, bool]:
    """Return the lowest confidence with at least this share of right answers, and whether that is certain enough.

    At this confidence, an exact binomial test shows that at least this share is right, with 95% certainty. Without the
    test, the share on other images would be too low about every second time. If no confidence passes the test, return
    the lowest one with this share on the validation images, or None.
    """
    fitting = sorted(Answered(*point) for point in curve if point[2] / point[1] >= share)
    certain = next((each for each in fitting if is_certain(each, share)), None)
    return (certain, True) if certain else (fitting[0] if fitting else None, False)


def is_certain(answered: Answered, share: float) -> bool:
    """Return whether so many right answers have a probability of at most 5% if only this share is right."""
    total = answered.num_images

    def log_probability(right: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(right + 1) - math.lgamma(total - right + 1)
        return ways + right * math.log(share) + (total - right) * math.log1p(-share)

    numbers = range(answered.num_right, total + 1)
    return math.fsum(math.exp(log_probability(right)) for right in numbers) <= 1 - CERTAINTY + EPSILON


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
    total, (found, certain) = calibration["figures"]["num_images"], find_answered(calibration["curve"], share)
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
    if not certain:
        report(
            f"-unknown {share}: {counted(found.num_images, 'validation image')} with at least this confidence are too few "
            f"to be {CERTAINTY:.0%} certain of this share on other images; it takes at least {fewest_images(share)}, "
            "and more unless all are right"
        )
    return found.confidence - ROUNDING
