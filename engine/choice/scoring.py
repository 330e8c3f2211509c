"""Scores a linear model of a candidate's features on images that it was not fitted to."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from datasets import ImageSet
from datasets.split import divide
from datasets.split.by_hash import hashes_of
from engine.choice.measure import Measured, images_of
from engine.plan import TrainPlan
from engine.tasks import find_task
from utils.distributed import Process
from utils.errors import ConfigError

FOLDS = 5
DRAWS = 200  # samples of the images with replacement; enough for the standard deviation to within about 5%


class Scored:
    """The outputs of linear models for images that these were not fitted to, and the right answers."""

    def __init__(self, plan: TrainPlan, found: Measured):
        self._task, self._process = find_task(plan.config), Process(torch.device("cpu"))
        self._metric = plan.config.TRAIN.BEST_METRIC
        train, val = images_of(plan)
        features, targets = (torch.from_numpy(each) for each in (found.train.joined, found.train.targets))
        if not features.isfinite().all():
            raise ConfigError("some features are not finite")
        fit = self._fitter(plan, features, targets)
        images, indices = (train, found.train.indices) if val is None else (val, found.val.indices)
        if val is None:
            of_folds = fold_of_each(train)[found.train.indices]
            outputs = torch.cat([fit(of_folds != fold)(features[of_folds == fold]) for fold in np.unique(of_folds)])
            order = np.argsort(of_folds, kind="stable")
            targets, indices = targets[order], indices[order]
        else:
            targets = torch.from_numpy(found.val.targets)
            outputs = fit(np.ones(len(features), bool))(torch.from_numpy(found.val.joined))
        self.outputs, self.targets, self.num_fitted = outputs, targets, len(features)
        keys = images.take(indices).split_keys()
        # Images in the same group of DATA.GROUP_BY are drawn together.
        self.groups = np.unique(hashes_of(keys, 0), return_inverse=True)[1]
        self.num_groups = int(self.groups.max()) + 1

    def _fitter(self, plan: TrainPlan, features: Tensor, targets: Tensor) -> Callable:
        def fit(rows: np.ndarray) -> Callable[[Tensor], Tensor]:
            chosen = torch.from_numpy(rows)
            if not rows.any():
                raise ConfigError("there are too few images for a linear model")
            if reason := self._task.why_no_fit(targets[chosen], plan.classes):
                raise ConfigError(f"no linear model can be fitted: {reason}")
            head = self._task.fit_head(features[chosen], targets[chosen], plan.num_classes)
            return lambda rows: (rows.double() @ head.weight.T + head.bias).float()

        return fit

    @property
    def value(self) -> float:
        return self._value_of(np.arange(len(self.targets)))

    def draws(self) -> np.ndarray:
        """Return float64 [DRAWS]: the score of as many images, drawn with replacement. All candidates have equal draws."""
        rng, count = np.random.default_rng(0), self.num_groups
        found = []
        for _ in range(DRAWS):
            times = np.bincount(rng.integers(0, count, count), minlength=count)
            found.append(self._value_of(np.repeat(np.arange(len(self.targets)), times[self.groups])))
        return np.array(found)

    def _value_of(self, rows: np.ndarray) -> float:
        chosen = torch.from_numpy(rows)
        tally = self._task.tally(self._process.device, torch.float64, len(rows))
        tally.add(self.outputs[chosen], self.targets[chosen], 0)
        tally.per_image.indices = rows
        return float(getattr(tally.result(self._process), self._metric))


def fold_of_each(images: ImageSet) -> np.ndarray:
    """Return int64 [N]: the fold of each image, by the rule that holds validation images out of this data set."""
    found = np.zeros(len(images), np.int64)
    for fold in range(FOLDS):
        # Another seed, because the validation images have the lowest hashes of the seed of the data set.
        record = images.split | {"fraction": 1 / FOLDS, "folds": FOLDS, "fold": fold, "seed": images.split["seed"] + 1}
        found[np.isin(images.rows, divide(images, record)[1].rows)] = fold
    return found


def half_width(draws: np.ndarray) -> float:
    """Return half the width of a 95% interval, by the scores of drawn images."""
    known = draws[np.isfinite(draws)]
    return 1.96 * float(known.std(ddof=1)) if len(known) > 1 else math.nan
