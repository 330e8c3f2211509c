"""Scores photos by the statistics in a file of weights."""

import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.confidence.known import MATRICES, KnownScore, Neighbours, Spread, Tap, TappedFeatures, scaled
from models.weights.record import KNOWN
from utils.errors import naming_damage


class OldKnownScore(nn.Module):
    """The score of runs of halfstep 2.1: two Mahalanobis distances to the training images, without the confidence."""

    def __init__(self, saved: dict[str, Tensor]):
        super().__init__()
        for name, value in saved.items():
            self.register_buffer(name.replace(".", "_"), value)

    @staticmethod
    def middle_of(num_layers: int) -> int:
        return (num_layers - 1) // 2

    def forward(self, features: TappedFeatures) -> Tensor:
        read = scaled(self._closeness(features.read, "read"), self.scales[0])
        return scaled(read + scaled(self._closeness(features.middle, "middle"), self.scales[1]), self.scales[2])

    def _closeness(self, features: Tensor, name: str) -> Tensor:
        mean, factor, centres = (getattr(self, f"{name}_{part}") for part in ("mean", "factor", "centres"))
        width = len(mean)  # the means of groups of neighbouring columns, if the features are wider
        size = features.shape[1] // width
        features = features[:, : size * width].unflatten(1, (width, size)).mean(2)
        place = (features - mean) @ factor
        squares = place.square().sum(1, keepdim=True) + centres.square().sum(1)
        return -(squares - 2 * place @ centres.T).amin(1)


def from_plain(saved: dict[str, Any], temperature: float) -> KnownScore | OldKnownScore:
    """Return the statistics that `to_plain`, or halfstep 2.1, has written. Raise an error if they are damaged."""
    arrays = {}
    for name, (shape, text) in saved.items():
        values = np.frombuffer(base64.b64decode(text), "<f2" if name in MATRICES else "<f4")
        arrays[name] = torch.from_numpy(values.astype(np.float32)).reshape(shape)
    if "read.factor" in arrays:
        return OldKnownScore(arrays)
    middle = Spread(*(arrays[f"middle.{name}"] for name in ("mean", "directions", "weights", "rest")))
    return KnownScore(Neighbours(arrays["read.images"]), middle, arrays["scales"], temperature)


def watch(model: nn.Module, calibration: dict[str, Any], source: str | Path) -> Callable[[], Tensor] | None:
    """Return a function that returns the scores of the newest batch of a model, or None if there are no statistics."""
    saved = calibration.get(KNOWN, {}).get("statistics")
    if not saved:
        return None
    with naming_damage(Path(source)):
        known = from_plain(saved, calibration.get("temperature", math.inf)).to(next(model.parameters()).device)
    tap = Tap(model, known.middle_of)
    return lambda: known(tap.take())
