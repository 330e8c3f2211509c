"""Scores photos by the statistics in a file of weights."""

import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.confidence.known import MATRICES, KnownScore, Neighbours, Spread, Tap
from models.weights.record import KNOWN
from utils.errors import naming_damage


def from_plain(saved: dict[str, Any], temperature: float) -> KnownScore:
    """Return the statistics that `to_plain` has written. Raise an error if they are damaged."""
    arrays = {}
    for name, (shape, text) in saved.items():
        values = np.frombuffer(base64.b64decode(text), "<f2" if name in MATRICES else "<f4")
        arrays[name] = torch.from_numpy(values.astype(np.float32)).reshape(shape)
    middle = Spread(*(arrays[f"middle.{name}"] for name in ("mean", "directions", "weights", "rest")))
    return KnownScore(Neighbours(arrays["read.images"]), middle, arrays["scales"], temperature)


def watch(model: nn.Module, calibration: dict[str, Any], source: str | Path) -> Callable[[], Tensor] | None:
    """Return a function that returns the scores of the newest batch of a model, or None if there are no statistics."""
    saved = calibration.get(KNOWN, {}).get("statistics")
    if not saved:
        return None
    with naming_damage(Path(source)):
        known = from_plain(saved, calibration.get("temperature", math.inf)).to(next(model.parameters()).device)
    tap = Tap(model)

    def scores_of_batch() -> Tensor:
        return known(tap.take())

    return scores_of_batch
