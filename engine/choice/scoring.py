"""Scores a linear model of a candidate's features on images that it was not fitted to."""

import math
import time

import numpy as np
import torch
from torch import Tensor

from datasets import ImageSet
from datasets.image_set import ALL
from datasets.split import DRAWN, divide
from datasets.split.by_hash import hashes_of
from datasets.split.together import joined
from engine.features.compute import ImageFeatures
from engine.plan import TrainPlan
from engine.tasks import find_task
from utils.distributed import Process
from utils.errors import ConfigError

MAX_IMAGES = 2_000  # images of each part
FOLDS = 5
DRAWS = 200  # samples of the images with replacement; enough for the standard deviation to within about 5%
NORMAL_DRAWS = 10_000  # for the largest of several differences


def images_of(plan: TrainPlan) -> list[ImageSet]:
    """Return the training images to look at, and the validation images unless they were drawn from these."""
    sets = [plan.train_set] if plan.eval_set.split.get("rule") in (*DRAWN, ALL) else [plan.train_set, plan.eval_set]
    # The first images of an epoch, because they are in few shards.
    return [each.take(np.sort(each.epoch_order(plan.config.SEED, 0)[:MAX_IMAGES])) for each in sets]


class Scored:
    """The outputs of linear models for images that these were not fitted to, and the right answers."""

    def __init__(self, plan: TrainPlan, features: list[ImageFeatures]):
        """Fit linear models to the features of images_of(plan).

        Without validation images, each scores one part of all.
        """
        self._plan, self._task, self._process = plan, find_task(plan.config), Process(torch.device("cpu"))
        sets, train = images_of(plan), features[0]
        parts = [(train, features[1])] if features[1:] else []
        if not parts:
            folds = fold_of_each(sets[0])[train.indices]
            parts = [(part_of(train, folds != fold), part_of(train, folds == fold)) for fold in np.unique(folds)]
        begun = time.perf_counter()
        self.outputs = torch.cat([self._outputs(*part) for part in parts])
        took = time.perf_counter() - begun
        self.seconds_of_fit = took / sum(len(fitted.targets) for fitted, _ in parts)  # for each image
        self.targets = torch.cat([torch.from_numpy(others.targets) for _, others in parts])
        self.num_fitted = len(train.targets)
        self.num_unseen = 0  # images of a class that their model does not know
        if plan.config.task.has_classes and not plan.config.task.has_several_classes:
            is_unseen = [~np.isin(others.targets, fitted.targets) for fitted, others in parts]
            self.num_unseen = sum(int(each.sum()) for each in is_unseen)
        # Images in the same group of DATA.GROUP_BY, and copies, are drawn together.
        judged = sets[-1].take(np.concatenate([others.indices for _, others in parts]))
        self.groups = np.unique(hashes_of(judged.split_keys(), 0), return_inverse=True)[1]
        if judged.copies is not None:
            self.groups = joined(self.groups, judged.copies)
        self.num_groups = int(self.groups.max()) + 1

    def _outputs(self, fitted: ImageFeatures, others: ImageFeatures) -> Tensor:
        """Fit a linear model, and return its outputs for other images."""
        features, targets = torch.from_numpy(fitted.joined), torch.from_numpy(fitted.targets)
        if not len(targets):
            raise ConfigError("there are too few images for a linear model")
        if not (features.isfinite().all() and np.isfinite(others.joined).all()):
            raise ConfigError("some features are not finite")
        if reason := self._task.why_no_fit(targets, self._plan.classes):
            raise ConfigError(f"no linear model can be fitted: {reason}")
        head = self._task.fit_head(features, targets, self._plan.num_classes)
        return (torch.from_numpy(others.joined).double() @ head.weight.T + head.bias).float()

    @property
    def value(self) -> float:
        return self._value_of(np.arange(len(self.targets)))

    def draws(self) -> np.ndarray:
        """Return float64 [DRAWS]: the score of as many images, drawn with replacement.

        All candidates have equal draws.
        """
        rng, count = np.random.default_rng(0), self.num_groups
        scores = []
        for _ in range(DRAWS):
            times = np.bincount(rng.integers(0, count, count), minlength=count)
            scores.append(self._value_of(np.repeat(np.arange(len(self.targets)), times[self.groups])))
        return np.array(scores)

    def _value_of(self, rows: np.ndarray) -> float:
        chosen = torch.from_numpy(rows)
        tally = self._task.tally(self._process.device, torch.float64, len(rows))
        tally.add(self.outputs[chosen], self.targets[chosen], 0)
        tally.per_image.indices = rows
        return float(getattr(tally.result(self._process), self._plan.config.TRAIN.BEST_METRIC))


def part_of(features: ImageFeatures, rows: np.ndarray) -> ImageFeatures:
    return ImageFeatures(features.indices[rows], [features.joined[rows]], features.targets[rows])


def fold_of_each(images: ImageSet) -> np.ndarray:
    """Return int64 [N]: the fold of each image, by the rule that holds validation images out of this data set."""
    folds = np.zeros(len(images), np.int64)
    # Another seed, because the validation images have the lowest hashes of the seed of the data set.
    record = images.split | {"fraction": 1 / FOLDS, "folds": FOLDS, "seed": images.split["seed"] + 1}
    if images.trains_on_all:
        record["rule"] = "position"
    for fold in range(FOLDS):
        folds[divide(images, record | {"fold": fold}).columns["val.row"]] = fold
    return folds


def half_width(draws: np.ndarray) -> float:
    """Return half the width of a 95% interval, by the scores of drawn images."""
    known = draws[np.isfinite(draws)]
    return 1.96 * float(known.std(ddof=1)) if len(known) > 1 else math.nan


def noise_of(draws: np.ndarray) -> np.ndarray:
    """Return float64 [candidates]: differences from the first that are noise, by the scores [candidates, DRAWS].

    The best and the worst of several equal candidates differ more than two equal ones. So a difference counts only if
    it is larger than the largest one between any two of as many equal candidates, in 95% of cases.
    """
    draws = draws[:, np.isfinite(draws).all(0)]
    if draws.shape[1] < 2:
        return np.full(len(draws), math.nan)
    one, other = np.triu_indices(len(draws), 1)
    gaps = draws[one] - draws[other]
    deviations = gaps.std(1, ddof=1, keepdims=True)
    gaps = (gaps - gaps.mean(1, keepdims=True)) / np.maximum(deviations, 1e-12)
    # Normal numbers with the correlations of the gaps.
    normal = (
        np.random.default_rng(0).standard_normal((NORMAL_DRAWS, gaps.shape[1])) @ gaps.T / math.sqrt(gaps.shape[1] - 1)
    )
    limit = np.quantile(np.abs(normal).max(1), 0.95)
    return np.concatenate([[0.0], limit * deviations[one == 0, 0]])
