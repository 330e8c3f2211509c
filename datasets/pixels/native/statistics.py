"""Type and limits of the images' values, and mean and deviation of each channel, from the training images."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from configs.schema import Config
from datasets.passes import read_each
from datasets.pixels import pixels_of
from datasets.pixels.native.pixels import OTHER_LIMITS
from datasets.types import ImageSet, PriorFacts, Settled
from utils.distributed import Process
from utils.errors import DataError
from utils.text import warning

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


def finish(
    config: Config, prior: PriorFacts, process: Process, train: ImageSet | None, val: ImageSet
) -> tuple[list[Settled], ImageSet | None, ImageSet]:
    """Return type, limits, mean and deviation of the pixels, and the images with their limits. Collective.

    Settings that name the limits, or that come from the weights together with the limits, are kept if the weights were
    trained on images of this type; everything else is measured.
    """
    pixels, origins, notes = (val if train is None else train).pixels, prior.origins, ()
    kind, limits = pixels.kind, pixels.limits
    settled: list[Settled] = []
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
        pixels_of(config.DATA).ends()  # raises an error if they are not known
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
    train, val = (each and each.with_facts(pixels=replace(each.pixels, limits=limits)) for each in (train, val))
    settled.append(Settled("DATA.PIXELS", kind, origins.get("DATA.PIXELS", "")))
    return settled, train, val.with_facts(notes=(*val.notes, *notes))


def measure_pixels(config: Config, train: ImageSet) -> Statistics:
    """Return the statistics of at most MOST_IMAGES training images, which the seed draws."""
    pixels = pixels_of(config.DATA)
    values = np.concatenate(list(_samples(config.SEED, train)))
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


def _samples(seed: int, train: ImageSet) -> Iterator[np.ndarray]:
    """Yield pixels of each drawn image that can be read, float32 [pixels, C]."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(train))[:MOST_IMAGES]).tolist()
    count, reasons = max(MOST_VALUES // (len(chosen) * train.pixels.num_channels), 1), []

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
