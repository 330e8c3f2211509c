"""Tells photos of a model's classes from photos of something else, by the distance of their features to the training images.

The features come from two places: what the classifier reads shows unknown classes, and the mean output of a layer in the
middle shows other kinds of pictures. The distance is Mahalanobis's (Lee et al., arXiv:1807.03888): to the nearest class
for the former, to all training images for the latter. BENCHMARKS.md, "Strangers", compares it with five other methods.
"""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from models.parts import classifier_names
from models.weights.state import KNOWN
from utils.errors import ConfigError, naming_damage

MOST_BYTES = 3_700_000  # limit for the size of the statistics; as text in a file, they are a third larger
RIDGE = 1e-3  # this share of the mean variance is added to each variance, so that distances are finite with few images
QUANTILE = 0.05  # the share of the validation images below the limit
LIKE_ROUNDING = 1e-4  # relative noise, a little more than that of rounding
# Such noise moves a score by less, unless images are so much alike that rounding decides their scores.
MOST_MOVED = 0.05


# --- features and distances ---


class FeaturePair(NamedTuple):
    """The two features of a batch of images."""

    read: Tensor  # [B, D], what the classifier reads
    middle: Tensor  # [B, E], the mean output of a layer in the middle


class Tap:
    """Keeps the features of each batch that a model computes."""

    def __init__(self, model: nn.Module):
        self._read = self._middle = None
        try:
            layers = list(model.feature_info)
            layer = layers[(len(layers) - 1) // 2]
            self._width, middle = layer["num_chs"], model.get_submodule(layer["module"])
            head = model.get_submodule(classifier_names(model)[0])
        except (AttributeError, IndexError, KeyError):
            raise ConfigError(f"timm does not name the layers of {type(model).__name__}") from None
        self._hooks = (
            head.register_forward_pre_hook(self._keep_read),
            middle.register_forward_hook(self._keep_middle),
        )

    def __deepcopy__(self, memo: dict) -> "Tap":
        return self  # the half-precision copy of a model has the same tap

    def _keep_read(self, head: nn.Module, inputs: tuple) -> None:
        self._read = inputs[0].flatten(1).float()

    def _keep_middle(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not isinstance(output, Tensor):  # several branches, as in HRNet
            return
        channels_first = output.ndim == 4 and output.shape[1] == self._width
        places = range(2, 4) if channels_first else range(1, output.ndim - 1)
        self._middle = output.float().mean(tuple(places))

    def take(self) -> FeaturePair:
        """Return the features of the newest batch."""
        if self._read is None or self._middle is None:
            raise ConfigError("this model does not show the output of a layer in the middle")
        features = FeaturePair(self._read, self._middle)
        self._read = self._middle = None
        return features

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Distance(nn.Module):
    """The squared Mahalanobis distance of features to the nearest of several centres with a common covariance."""

    def __init__(self, mean: Tensor, factor: Tensor, centres: Tensor):
        """`mean` [d] is subtracted before the multiplication with `factor` [d, d], after which distances are Euclidean."""
        super().__init__()
        for name, value in (("mean", mean), ("factor", factor), ("centres", centres)):
            self.register_buffer(name, value.float())

    @classmethod
    def fit(cls, features: np.ndarray, groups: np.ndarray, width: int) -> "Distance":
        """Fit the centres of the groups and their common covariance: features [N, D], group numbers [N]."""
        features = grouped(torch.from_numpy(features).double(), width)
        _, groups = torch.from_numpy(groups).unique(return_inverse=True)
        counts = torch.bincount(groups)
        centres = features.new_zeros(len(counts), features.shape[1]).index_add_(0, groups, features) / counts[:, None]
        rest = features - centres[groups]
        covariance = rest.T @ rest / len(rest)
        ridge = RIDGE * covariance.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
        values, vectors = torch.linalg.eigh(covariance + ridge * torch.eye(len(covariance)))
        factor, mean = vectors / values.clamp(min=ridge).sqrt(), features.mean(0)
        return cls(mean, factor, (centres - mean) @ factor)

    def forward(self, features: Tensor) -> Tensor:
        place = (grouped(features, len(self.mean)) - self.mean) @ self.factor
        squares = place.square().sum(1, keepdim=True) + self.centres.square().sum(1)
        return (squares - 2 * place @ self.centres.T).amin(1)


def grouped(features: Tensor, width: int) -> Tensor:
    """Return [B, width]: the means of groups of neighbouring columns of features [B, D]."""
    size = features.shape[1] // width
    return features[:, : size * width].unflatten(1, (width, size)).mean(2)


def widths_within(read: int, middle: int, num_classes: int) -> tuple[int, int]:
    """Return the largest widths of both features that keep the statistics within MOST_BYTES."""
    for size in range(1, read + 1):
        widths = max(read // size, 1), max(middle // size, 1)
        num_values = sum(width * (width + rows) for width, rows in zip(widths, (num_classes, 1), strict=True))
        if 4 * num_values <= MOST_BYTES:
            break
    return widths


class Known(nn.Module):
    """Scores how well features fit the training images. A typical validation image has 1; strangers have negative scores.

    Its output has shape [B].
    """

    def __init__(self, read: Distance, middle: Distance, scales: Tensor):
        """`scales` [3, 2]: limit and median of both distances, and of the sum of their scores, on validation images."""
        super().__init__()
        self.read, self.middle = read, middle
        self.register_buffer("scales", scales.float())

    def forward(self, features: FeaturePair) -> Tensor:
        of_classes = scaled(-self.read(features.read), self.scales[0])
        of_pictures = scaled(-self.middle(features.middle), self.scales[1])
        return scaled(of_classes + of_pictures, self.scales[2])

    @classmethod
    def fit(cls, train: FeaturePair, groups: np.ndarray, val: FeaturePair, num_classes: int) -> "Known":
        """Fit the distances on training images, and their scales on validation images: arrays [N, D] and [N, E]."""
        widths = widths_within(train.read.shape[1], train.middle.shape[1], num_classes)
        distances = [
            Distance.fit(each, of_class, width)
            for each, of_class, width in zip(train, (groups, np.zeros_like(groups)), widths, strict=True)
        ]
        closeness = [-distance(torch.from_numpy(each)) for distance, each in zip(distances, val, strict=True)]
        scales = [scale_of(each) for each in closeness]
        total = sum(scaled(each, scale) for each, scale in zip(closeness, scales, strict=True))
        return cls(*distances, torch.stack([*scales, scale_of(total)]))


def scale_of(values: Tensor) -> Tensor:
    """Return the limit that 95% of the values reach, and their median."""
    return torch.stack([values.quantile(QUANTILE, interpolation="lower"), values.median()])


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Rescale the values so that the limit becomes 0 and the median becomes 1."""
    return (values - scale[0]) / (scale[1] - scale[0]).clamp(min=torch.finfo(torch.float32).tiny)


# --- statistics in a file ---


def to_plain(known: Known) -> dict[str, Any]:
    """Return the statistics as JSON values. Arrays become text."""
    return {
        name: [list(value.shape), base64.b64encode(value.numpy().astype("<f4").tobytes()).decode()]
        for name, value in known.state_dict().items()
    }


def from_plain(saved: dict[str, Any]) -> Known:
    """Return the statistics that `to_plain` has written. Raise an error if they are damaged."""
    arrays = {
        name: torch.from_numpy(np.frombuffer(base64.b64decode(text), "<f4").copy()).reshape(shape)
        for name, (shape, text) in saved.items()
    }
    read, middle = (
        Distance(*(arrays[f"{place}.{name}"] for name in ("mean", "factor", "centres"))) for place in ("read", "middle")
    )
    return Known(read, middle, arrays["scales"])


def watch(model: nn.Module, calibration: dict[str, Any], source: str | Path) -> Callable[[], Tensor] | None:
    """Return a function that returns the scores of the newest batch of a model, or None if there are no statistics."""
    saved = calibration.get(KNOWN, {}).get("statistics")
    if not saved:
        return None
    with naming_damage(Path(source)):
        known = from_plain(saved).to(next(model.parameters()).device)
    tap = Tap(model)
    return lambda: known(tap.take())
