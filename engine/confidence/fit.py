"""Fits the statistics of known.py to validation images, whose features the evaluation of a new best epoch computes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Config
from engine.confidence.known import (
    LIKE_ROUNDING,
    MOST_MOVED,
    KnownScore,
    Neighbours,
    Spread,
    Tap,
    TappedFeatures,
    combine,
    distance_of,
    parts_of,
    to_plain,
)
from engine.evaluation.tally import MakeTally, Tally, joined
from engine.tasks.class_tables import ClassResults
from engine.train.trainer import Trainer
from models.weights.record import CALIBRATION
from utils.distributed import Process
from utils.errors import ConfigError
from utils.text import counted

MOST_IMAGES = 1000  # so that a fit takes at most half a second on one CPU core
MOST_VALUES = 1_800_000  # of the features of all images, so that the statistics take at most 5 MB of text in a file
FEWEST_IMAGES = 20  # fewer have no limit that 95% of them reach
QUANTILE = 0.05  # the share of the validation images below the limit


# --- features of an evaluation ---


class FeatureTally:
    """A tally, and features of some of its images, evenly spaced in the share of each process."""

    def __init__(self, tap: Tap, tally: Tally, num_images: int):
        self.tap, self.num_images, self._num_seen = tap, num_images, 0
        self._tally, self.per_image, self.result = tally, tally.per_image, tally.result

    def add(self, logits: Tensor, targets: Tensor, num_excluded: int) -> None:
        self._tally.add(logits, targets, num_excluded)
        try:
            features = self.tap.take()
        except ConfigError:
            return
        width = features.read.shape[1] + features.middle.shape[1]
        interval = -(-self.num_images // max(1, min(MOST_IMAGES, MOST_VALUES // width)))
        chosen = slice(-self._num_seen % interval, len(targets), interval)
        positions = torch.arange(self._num_seen, self._num_seen + len(targets))[chosen]
        self.per_image.features.append((positions, *(each[chosen].clone() for each in features)))
        self._num_seen += len(targets)


@contextlib.contextmanager
def keeping_features(make_tally: MakeTally, models: list[nn.Module], trainer: Trainer) -> Iterator[MakeTally]:
    """Yield a function for tallies that keep features, if the run is calibrated and the models show them."""
    with contextlib.ExitStack() as stack:
        if CALIBRATION in trainer.parts and not why_no_features(models[0], trainer.config):
            taps = [stack.enter_context(contextlib.closing(Tap(model))) for model in models]
            left = iter(taps)

            def make_feature_tally(*sizes) -> FeatureTally:
                return FeatureTally(next(left), make_tally(*sizes), sizes[-1])

            yield make_feature_tally
        else:
            yield make_tally


def why_no_features(model: nn.Module, config: Config) -> str:
    """Return why a model shows no features, or an empty string."""
    if config.COMPILE:
        return "a compiled model (COMPILE) does not show its features"
    try:
        Tap(model).close()
    except ConfigError as error:
        return str(error)
    return ""


def gather_features(local: Any, process: Process) -> TappedFeatures | None:
    """Return the features of all processes in the order of the images, or None. Collective.

    `local`: the results of the images of this process.
    """
    if not local.features:  # a model that shows none does so in every process
        return None
    columns = zip(*local.features, strict=True)
    positions, *features = (torch.cat(column).cpu().numpy() for column in columns)
    _, *features = joined(process, local.indices[positions], *features)
    return TappedFeatures(*map(torch.from_numpy, features))


# --- the fit ---


def learn(images: ClassResults, trainer: Trainer, temperature: float) -> dict[str, Any]:
    """Return the statistics of the images of an evaluation, or the reason why there are none. Collective."""
    local, reason = images.local, why_no_features(trainer.model, trainer.config)
    if trainer.config.DATA.FOLDS and local.features:  # a FoldFeatures
        return trainer.process.first(lambda: local.features.statistics(temperature, reason))
    features = gather_features(local, trainer.process)
    return trainer.process.first(lambda: summarize(features, temperature, reason))


def why_unusable(features: TappedFeatures | None, reason: str) -> str:
    """Return why these features make no statistics, or "". `reason`: why there are no features."""
    if features is None:
        return reason or "this model does not show the output of a layer in the middle"
    num_images = len(features.logits)
    if num_images < FEWEST_IMAGES:
        return f"there are {counted(num_images, 'validation image')}, fewer than {FEWEST_IMAGES}"
    if not all(each.isfinite().all() for each in features):
        return "some features are not finite"
    return ""


def summarize(features: TappedFeatures | None, temperature: float, reason: str) -> dict[str, Any]:
    """Return the statistics, or the reason why there are none. `reason`: why there are no features."""
    if why := why_unusable(features, reason):
        return {"reason": why}
    known = fit_known(features, temperature)
    random = np.random.default_rng(0)
    noise = (torch.from_numpy(random.standard_normal(each.shape, np.float32)) for each in features)
    moved = TappedFeatures(*(each * (1 + LIKE_ROUNDING * more) for each, more in zip(features, noise, strict=True)))
    if (~((known(moved) - known(features)).abs() <= MOST_MOVED)).float().mean() > QUANTILE:  # ~: true for NaN too
        return {"reason": "the images are so much alike that rounding decides which of them fit"}
    return {"statistics": to_plain(known)}


def fit_known(features: TappedFeatures, temperature: float) -> KnownScore:
    """Return the statistics of some images. Limits and medians are those of each image's distances to the others."""
    read, nearest = fit_neighbours(features.read.double())
    middle, outlying = fit_spread(features.middle.double())
    parts = parts_of(features.logits.double(), temperature, nearest, outlying)
    scales = torch.stack([scale_of(each) for each in parts])
    of_total = scale_of(combine(parts, scales, len(nearest)))
    return KnownScore(read, middle, torch.cat([scales, of_total[None]]), temperature)


def fit_neighbours(features: Tensor) -> tuple[Neighbours, Tensor]:
    """Return the images as neighbours, and the distance of each image to the nearest other one."""
    images = functional.normalize(features)
    stored = images.half().double()
    return Neighbours(stored), distance_of((images @ functional.normalize(stored).T).fill_diagonal_(-1))


def fit_spread(features: Tensor) -> tuple[Spread, Tensor]:
    """Return the mean and the covariance of the images, and the distance of each image to the others.

    The covariance is that of Ledoit and Wolf (doi:10.1016/S0047-259X(03)00096-4), which needs fewer images than
    features.
    """
    (num_images, width), mean = features.shape, features.mean(0)
    rest = features - mean
    values, directions = torch.linalg.eigh(rest.T @ rest / num_images)
    usual = values.mean().clamp(min=torch.finfo(torch.float32).tiny)
    spread = values.square().sum() - width * usual**2
    noise = (rest.square().sum(1).square().mean() - values.square().sum()) / num_images
    shrinkage = (noise / spread).clamp(0, 1).nan_to_num(1)
    # Without these images, the other directions have no variance but that of the shrinkage.
    chosen = values.argsort(descending=True)[: min(num_images - 1, width)]
    weights = 1 / ((1 - shrinkage) * values[chosen] + shrinkage * usual).clamp(min=LEAST * usual)
    others = 1 / (shrinkage * usual).clamp(min=LEAST * usual) if len(chosen) < width else weights.new_zeros(())
    directions = directions[:, chosen].half()
    squares = (rest @ directions.double()).square() @ weights
    # Leaving out one image changes the mean and the covariance by multiples of its own deviation.
    left_out = (1 - shrinkage) / (num_images - 1) * squares
    grown = (num_images / (num_images - 1)) ** 2 / (1 - left_out).clamp(min=LEAST)
    return Spread(mean, directions, weights, others), (grown * squares).sqrt()


LEAST = 1e-3  # the smallest variance, as a share of the mean variance, so that no distance depends on rounding


def scale_of(values: Tensor) -> Tensor:
    """Return the limit below which a new image of the kind lies with a probability of at most 5%, and the median."""
    return torch.stack([values.sort().values[int(QUANTILE * (len(values) + 1)) - 1], values.median()])
