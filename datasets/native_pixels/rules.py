"""The rules by which an image keeps the values of its file, and how such an image is shown."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from configs.schema import Data
from datasets.transforms.pixel_rules import PixelRules
from utils.errors import ConfigError

SHOWN = (0.1, 99.9)  # percentiles of an image that are shown as black and white if DATA.RANGE is not known


@dataclass(frozen=True)
class NativeRules(PixelRules):
    """The rules by which image files become pixels of uint8, uint16 or float32."""

    kind: str = "native"  # DATA.PIXELS; native: not yet known
    channel_files: str | None = None
    rgb: tuple[int, ...] = ()
    limits: tuple[float, ...] = ()  # DATA.RANGE

    is_native = True

    @classmethod
    def of_native(cls, data: Data, applies_exif: bool) -> "NativeRules":
        # The colour behind transparent pixels does not depend on the mean, which is measured later.
        grey = (128,) * 3
        facts = {"kind": data.PIXELS, "channel_files": data.CHANNEL_FILES, "rgb": data.RGB, "limits": data.RANGE}
        return cls(data.IMAGE_CHANNELS, applies_exif, grey, data.MAX_PIXELS, **facts)

    def facts(self) -> dict[str, Any]:
        return asdict(replace(self, rgb=(), limits=()))

    def with_kind(self, kind: str) -> "NativeRules":
        return replace(self, kind=kind)

    def with_limits(self, limits: tuple[float, ...]) -> "NativeRules":
        return replace(self, limits=limits)

    def decode(self, data: bytes) -> np.ndarray:
        from datasets.native_pixels.formats import read_native

        return read_native(data, self)

    def shown(self, pixels: np.ndarray) -> np.ndarray:
        """Return the channels that are red, green and blue as uint8 [H, W, 3], or [H, W, 1] of the first channel."""
        channels = list(self.rgb or ((0, 1, 2) if pixels.shape[2] > 2 else (0,)))
        chosen = pixels[:, :, channels].astype(np.float32)
        if self.limits:
            low, high = (each[channels] for each in split_limits(self.limits, self.num_channels))
        else:
            low, high = np.percentile(chosen, SHOWN, (0, 1))
        return np.rint(255 * np.clip((chosen - low) / np.maximum(high - low, 1e-30), 0, 1)).astype(np.uint8)


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
    return split_limits(data.RANGE, data.IMAGE_CHANNELS)
