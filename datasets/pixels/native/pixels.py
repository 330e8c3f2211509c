"""Pixels with the values of their files: uint8, uint16 or float32, with any number of channels, and their limits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.passes import read_each
from datasets.pixels import Pixels, Resize
from datasets.pixels.rules import ImageReadError, Images
from datasets.pixels.survey import Ranges
from datasets.types import PriorFacts, Settled
from utils.distributed import Process
from utils.errors import ConfigError, DataError
from utils.text import warning

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
    """The pixels of a run, uint8, uint16 or float32 [H, W, channels]. In batches they are float32, about 0 to 1."""

    kind: str = "native"  # DATA.PIXELS; native: not yet known
    rgb: tuple[int, ...] = ()
    limits: tuple[float, ...] = ()  # DATA.RANGE

    dtype_in_batch: ClassVar[torch.dtype] = torch.float32
    white: ClassVar[float] = 1
    name: ClassVar[str] = "native"
    own_endings: ClassVar[tuple[str, ...]] = (".npy", ".dcm", ".dicom")
    own_files: ClassVar[str] = ".npy and DICOM"
    measured: ClassVar[tuple[str, ...]] = ("DATA.RANGE", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
    chosen: ClassVar[tuple[str, ...]] = ("DATA.PIXELS", "DATA.RGB", *measured)

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

    def measure(
        self, config: Config, prior: PriorFacts, process: Process, train: Images | None
    ) -> tuple[list[Settled], Self, Iterable[str]]:
        return settle(self, config, prior, process, train)

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


# --- type and limits of the values, and mean and deviation of each channel, from the training images ---


RANGE, MEAN, DEVIATION = "DATA.RANGE", "DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"
MOST_IMAGES, MOST_VALUES = 1_000, 2**24  # images, drawn by the seed, and values of all of them
PERCENTILES = (0.1, 99.9)
NUM_DESCRIBED = 16  # channels; config.yaml of the run has the limits of all


class Statistics(NamedTuple):
    """Statistics of each channel: the limits, and mean and deviation in units of the limits."""

    limits: tuple[float, ...]  # low and high of each channel
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    extremes: list[tuple[float, float]]  # smallest and largest value


def settle(
    pixels: NativePixels, config: Config, prior: PriorFacts, process: Process, train: Images | None
) -> tuple[list[Settled], NativePixels, Iterable[str]]:
    """Return type, limits, mean and deviation of the pixels, the pixels with these limits, and notes. Collective.

    Settings that name the limits, or that come from the weights together with the limits, are kept if the weights were
    trained on images of this type; everything else is measured.
    """
    origins, kind, limits = prior.origins, pixels.kind, pixels.limits
    settled: list[Settled] = []
    notes: Iterable[str] = ()
    kind_of_weights = prior.implied.get("DATA.PIXELS")
    if kind_of_weights and limits and origins[RANGE].startswith(("weights ", "checkpoint ")):
        is_other = kind != kind_of_weights
        if is_other and train is None:
            raise DataError(OTHER_LIMITS.format(kind, kind_of_weights))
        if train is not None and (is_other or ("DATA.PIXELS" in prior.typed and config.DATA.PIXELS == "native")):
            config = config.changed("DATA", RANGE=())  # measured again
    if prior.began.get(RANGE):
        # Typed values stay, so that the run refuses them like any other changed setting.
        keys = [key for key in (RANGE, MEAN, DEVIATION) if key not in prior.typed]
        settled = [Settled(key, tuple(prior.began[key]), "the checkpoint") for key in keys]
    elif train is None:
        NativePixels.of(config.DATA).ends()  # raises an error if they are not known
    else:
        kept = {
            key
            for key in (RANGE, MEAN, DEVIATION)
            if key in prior.typed or config.DATA.RANGE and origins.get(key) == origins.get(RANGE)
        }
        if len(kept) < 3:
            seen = process.first(lambda: measure_pixels(config, train), Statistics)
            values = {RANGE: seen.limits, MEAN: seen.mean, DEVIATION: tuple(each or 1.0 for each in seen.deviation)}
            settled = [Settled(key, each, "the training images") for key, each in values.items() if key not in kept]
            notes = describe_pixels(seen)
    limits = next((each.value for each in settled if each.name == RANGE), limits)
    settled.append(Settled("DATA.PIXELS", kind, origins.get("DATA.PIXELS", "")))
    return settled, replace(pixels, limits=limits), notes


def measure_pixels(config: Config, train: Images) -> Statistics:
    """Return the statistics of at most MOST_IMAGES training images, which the seed draws."""
    pixels = NativePixels.of(config.DATA)
    values = np.concatenate(list(_samples(config.SEED, train, config.DATA.IMAGE_CHANNELS)))
    extremes = list(zip(values.min(0).tolist(), values.max(0).tolist(), strict=True))
    if pixels.limits:
        low, high = pixels.split_limits()
    else:
        low, high = np.percentile(values, PERCENTILES, 0)
        few_differ = high <= low  # nearly all values are equal: keep the others
        low, high = (
            np.where(few_differ, extreme, limit)
            for extreme, limit in zip(np.array(extremes).T, (low, high), strict=True)
        )
        high = np.where(high <= low, np.maximum(low + 1, low + np.abs(low) * 1e-6), high)
    scaled = np.clip((values - low) / (high - low), 0, 1)
    limits, mean, deviation = np.stack([low, high], 1).ravel(), scaled.mean(0, np.float64), scaled.std(0, np.float64)
    rounded = (tuple(float(f"{extreme:.9g}") for extreme in row) for row in (limits, mean, deviation))
    return Statistics(*rounded, extremes)


def _samples(seed: int, train: Images, num_channels: int) -> Iterator[np.ndarray]:
    """Yield pixels of each drawn image that can be read, float32 [pixels, C]."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(train))[:MOST_IMAGES]).tolist()
    count, reasons = max(MOST_VALUES // (len(chosen) * num_channels), 1), []

    def sample(index: int) -> np.ndarray:
        pixels = train.read(index)
        pixels = pixels.reshape(-1, pixels.shape[2])
        if len(pixels) > count:
            pixels = pixels[np.random.default_rng((seed, index)).integers(len(pixels), size=count)]
        return pixels.astype(np.float32)

    for _, pixels_or_reason in read_each(chosen, sample, "measuring pixels"):
        if isinstance(pixels_or_reason, np.ndarray):
            yield pixels_or_reason
        else:
            reasons.append(pixels_or_reason)
    if len(reasons) == len(chosen):
        raise DataError(f"{train.name(chosen[0])}: {reasons[0]}; none of the drawn training images can be read")


def describe_pixels(seen: Statistics) -> Iterator[str]:
    """Yield a line about each channel, and a warning if some values are far outside of the limits."""
    limits = np.reshape(seen.limits, (-1, 2)).tolist()
    for number, ((low, high), (least, most), mean, deviation) in enumerate(
        zip(limits, seen.extremes, seen.mean, seen.deviation, strict=True)
    ):
        span = high - low
        values = f"limits {low:.7g} to {high:.7g}, mean {low + span * mean:.5g}, deviation {span * deviation:.5g}"
        if number < NUM_DESCRIBED:
            yield f"channel {number}: {values}"
        if not deviation:
            yield warning(f"channel {number}: all values between its limits are the same, so it shows nothing")
        elif least < low - span or most > high + span:
            yield warning(
                f"channel {number}: values go from {least:g} to {most:g}; those outside of {low:g} to {high:g} become "
                "the limits, unless DATA.RANGE names others"
            )
