"""Pixels with the values of their files: uint8, uint16 or float32, with any number of channels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.pixels import Pixels, Resize
from datasets.pixels.rules import ImageReadError, Images
from datasets.pixels.survey import Ranges
from utils.errors import ConfigError, DataError

NUM_TRIED = 10  # images until one can be read, which decides the type
OTHER_LIMITS = (
    "DATA.PIXELS: {} images do not suit the limits of the weights (DATA.RANGE), which were trained on {} images; use "
    "images of this type, or set DATA.RANGE"
)
SHOWN = (0.1, 99.9)  # percentiles of an image that are shown as black and white if DATA.RANGE is not known
CODE = """import numpy as np
import torch


def prepare(image):
    low, high = np.array({limits}, np.float32).reshape(-1, 2).T
    return torch.from_numpy(np.clip((image - low) / (high - low), 0, 1)).permute(2, 0, 1)

"""
SENTENCE = (
    "`prepare` takes an array [height, width, {channels}] with the values of the files ({kind}), and scales them as "
    "the run did."
)


@dataclass(frozen=True)
class NativePixels(Pixels):
    """The pixels of a run, uint8, uint16 or float32 [H, W, channels]. In batches they are float32, from 0 to 1."""

    kind: str = "native"  # DATA.PIXELS; native: not yet known
    rgb: tuple[int, ...] = ()
    limits: tuple[float, ...] = ()  # DATA.RANGE

    dtype_in_batch: ClassVar[torch.dtype] = torch.float32
    white: ClassVar[float] = 1
    name: ClassVar[str] = "native"
    own_endings: ClassVar[tuple[str, ...]] = (".npy", ".dcm", ".dicom")
    own_files: ClassVar[str] = ".npy and DICOM"
    measured_by: ClassVar[str] = "pixels.native.statistics.finish"
    measured: ClassVar[tuple[str, ...]] = ("DATA.RANGE", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
    chosen: ClassVar[tuple[str, ...]] = ("DATA.PIXELS", "DATA.RGB", *measured)
    photo: ClassVar[str] = "native_photo.NativePhoto"

    @classmethod
    def of(cls, data: Data) -> Self:
        # The mean is measured later, so transparent pixels are grey.
        own = {"kind": data.PIXELS, "rgb": data.RGB, "limits": data.RANGE}
        return replace(super().of(data), background=(128,) * 3, **own)

    @classmethod
    def levels(cls, mean: tuple[float, ...]) -> tuple[float, ...]:
        return mean

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("float32" if self.kind == "window" else self.kind)

    @property
    def channels_shown(self) -> list[int]:
        return list(self.rgb or ((0, 1, 2) if self.num_channels > 2 else (0,)))

    @property
    def shown_as(self) -> str:
        low, high = self.split_limits()
        shown = self.channels_shown
        return "; shown: " + ", ".join(f"channel {each} from {low[each]:g} to {high[each]:g}" for each in shown)

    def decode(self, data: bytes) -> np.ndarray:
        from datasets.pixels.native.formats import decode_native

        return decode_native(data, self, self.kind)

    def kinds(self, read: Callable[[], bytes]) -> list[str]:
        return []

    def look_into(self, images: Images, is_remote: bool) -> tuple[Self, list[str]]:
        """Return pixels with the type of the first image that can be read. All other images must have this type."""
        if self.kind != "native":
            return self, []
        reasons = []
        for index in range(min(NUM_TRIED, len(images))):
            try:
                return replace(self, kind=images.read(index).dtype.name), []
            except ImageReadError as error:
                reasons.append(f"{images.name(index)}: {error}")
        raise DataError(f"{reasons[0]}; no image of the first {len(reasons)} can be read")

    def identity(self) -> dict[str, int | bool | str | tuple[int, ...]]:
        return super().identity() | {"kind": self.kind}

    def survey(self, count: int) -> Ranges:
        return Ranges(self.kind, count, self.num_channels)

    def split_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest value of each channel, float32 [C] each."""
        low, high = np.array(self.limits, np.float32).reshape(-1, 2).T
        return np.resize(low, self.num_channels), np.resize(high, self.num_channels)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the limits of each channel, which are 0 and 1 in a batch. Raise ConfigError unless they can be."""
        if not self.limits:
            raise ConfigError(
                f"DATA.RANGE is not known, which DATA.PIXELS {self.kind} needs; name weights that were trained with "
                "it, or set the lowest and the highest value: -opts DATA.RANGE=[0,4095]"
            )
        low, high = self.split_limits()
        with np.errstate(over="ignore"):
            span = high - low
        if not (np.isfinite(span) & (span > 0)).all():
            raise ConfigError(
                f"DATA.RANGE: {[*self.limits]} has limits that are equal, or too far apart, as 32-bit floats; set "
                "others"
            )
        return low, high

    def resize(self) -> Resize:
        from datasets.pixels.native.floats import NativeResize

        return NativeResize(*self.ends())

    def shrunk(self, pixels: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
        from datasets.pixels.native.floats import shrunk

        return shrunk(pixels, size, interpolation)

    def augmentation(self, config: Config) -> Callable[[Tensor, Random], None]:
        from datasets.pixels.native.floats import Jitter

        return Jitter(config.TRAIN.COLOR_JITTER)

    def shown(self, pixels: np.ndarray) -> np.ndarray:
        """Return the channels that are red, green and blue as uint8 [H, W, 3], or [H, W, 1] of the first channel."""
        channels = self.channels_shown
        chosen = pixels[:, :, channels].astype(np.float32)
        if self.limits:
            low, high = (each[channels] for each in self.split_limits())
        else:
            low, high = np.percentile(chosen, SHOWN, (0, 1))
        return np.rint(255 * np.clip((chosen - low) / np.maximum(high - low, 1e-30), 0, 1)).astype(np.uint8)

    def for_card(self) -> tuple[str, str]:
        return CODE.format(limits=list(self.limits)), SENTENCE.format(channels=self.num_channels, kind=self.kind)


def refuse_limits_of(weights: Mapping[str, Any], data: Data) -> None:
    """Raise ConfigError if the limits of weights with these settings do not suit the images of a run."""
    if data.PIXELS != weights["DATA.PIXELS"]:
        raise ConfigError(OTHER_LIMITS.format(data.PIXELS, weights["DATA.PIXELS"]))
