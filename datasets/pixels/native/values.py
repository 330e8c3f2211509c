"""The limits of native pixels, and the channels that pictures show."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from configs.schema import Data
from utils.errors import ConfigError

OTHER_LIMITS = (
    "DATA.PIXELS: {} images do not suit the limits of the weights (DATA.RANGE), which were trained on {} images; use images "
    "of this type, or set DATA.RANGE"
)


def refuse_limits_of(weights: Mapping[str, Any], data: Data) -> None:
    """Raise ConfigError if the limits of weights with these settings do not suit the images of a run."""
    if data.PIXELS != weights["DATA.PIXELS"]:
        raise ConfigError(OTHER_LIMITS.format(data.PIXELS, weights["DATA.PIXELS"]))


def channels_to_show(rgb: tuple[int, ...], count: int) -> list[int]:
    """Return DATA.RGB, or without it the first three of `count` channels, or the first."""
    return list(rgb or ((0, 1, 2) if count > 2 else (0,)))


def split_limits(limits: tuple[float, ...], channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each channel, float32 [C] each, as DATA.RANGE names them."""
    low, high = np.array(limits, np.float32).reshape(-1, 2).T
    return np.resize(low, channels), np.resize(high, channels)
