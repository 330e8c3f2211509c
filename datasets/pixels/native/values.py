"""The settings of native pixels, the limits of their values, and their pictures."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.schema import Data
from utils.errors import ConfigError

SHOWN = (0.1, 99.9)  # percentiles of an image that are shown as black and white if DATA.RANGE is not known
OTHER_LIMITS = (
    "DATA.PIXELS: {} images do not suit the limits of the weights (DATA.RANGE), which were trained on {} images; use images "
    "of this type, or set DATA.RANGE"
)


@dataclass(frozen=True)
class NativePixels:
    """The settings of pixels of uint8, uint16 or float32, with any number of channels."""

    kind: str = "native"  # DATA.PIXELS; native: not yet known
    channel_files: str | None = None
    rgb: tuple[int, ...] = ()
    limits: tuple[float, ...] = ()  # DATA.RANGE

    @classmethod
    def of(cls, data: Data) -> "NativePixels":
        return cls(data.PIXELS, data.CHANNEL_FILES, data.RGB, data.RANGE)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("float32" if self.kind == "window" else self.kind)

    def shown(self, pixels: np.ndarray) -> np.ndarray:
        """Return the channels that are red, green and blue as uint8 [H, W, 3], or [H, W, 1] of the first channel."""
        channels = channels_to_show(self.rgb, pixels.shape[2])
        chosen = pixels[:, :, channels].astype(np.float32)
        if self.limits:
            low, high = (each[channels] for each in split_limits(self.limits, pixels.shape[2]))
        else:
            low, high = np.percentile(chosen, SHOWN, (0, 1))
        return np.rint(255 * np.clip((chosen - low) / np.maximum(high - low, 1e-30), 0, 1)).astype(np.uint8)


def with_facts(rules: Any, **facts: Any) -> Any:
    """Return PixelRules whose NativePixels have these fields changed."""
    return replace(rules, native=replace(rules.native, **facts))


def channels_to_show(rgb: tuple[int, ...], count: int) -> list[int]:
    """Return DATA.RGB, or without it the first three of `count` channels, or the first."""
    return list(rgb or ((0, 1, 2) if count > 2 else (0,)))


def split_limits(limits: tuple[float, ...], channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each channel, float32 [C] each, as DATA.RANGE names them."""
    low, high = np.array(limits, np.float32).reshape(-1, 2).T
    return np.resize(low, channels), np.resize(high, channels)


def limits_of(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest value of each channel, float32 [C] each."""
    if not data.RANGE:
        raise ConfigError(
            f"DATA.RANGE is not known, which DATA.PIXELS {data.PIXELS} needs; name weights that were trained with it, or set "
            "the lowest and the highest value: -opts DATA.RANGE=[0,4095]"
        )
    low, high = split_limits(data.RANGE, data.IMAGE_CHANNELS)
    with np.errstate(over="ignore"):
        span = high - low
    if not (np.isfinite(span) & (span > 0)).all():
        raise ConfigError(
            f"DATA.RANGE: {[*data.RANGE]} has limits that are equal, or too far apart, as 32-bit floats; set others"
        )
    return low, high
