"""Checks DATA.CACHE: whether a valid cache exists, whether there is space for one, and what it would gain."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from configs.schema import Config
from datasets import ImageSet
from datasets.batch_order import sample_rng
from datasets.loading.cache import (
    REMEDY_FOR_FOLDER,
    REMEDY_FOR_SPACE,
    count_threads,
    encode,
    estimate_bytes,
    locate_cache,
    open_cache,
    why_not_cacheable,
)
from datasets.loading.cache_file import CacheLocation, find_resume_point
from datasets.transforms.crop import TrainTransform
from engine.check.quick_checks import nearest_existing
from utils.files import free_bytes
from utils.findings import WARN, Finding
from utils.text import format_bytes

LARGE = 2  # times the side of a cached image: photographs that a cache of smaller ones may be worth its space for
LEAST_GAIN = 1.5


def check_cache(config: Config, parts: Iterable[tuple[str, ImageSet | None]]) -> Finding:
    """One row for both image sets, which share a folder. Never WRONG: a run without a cache continues without it."""
    lines, needed = [], 0
    for part, image_set in parts:
        if image_set is None:
            continue
        reason = why_not_cacheable(image_set)
        if reason:
            lines.append(f"none of the {part} images, {reason}")
            continue
        location = locate_cache(config, part, image_set)
        try:
            size = describe_cache(config, part, image_set, location, lines)
        except OSError as error:
            return Finding("cache", f"{location.folder} cannot be used ({error})", WARN, REMEDY_FOR_FOLDER)
        needed += size
    found = "\n".join(lines)
    return compare_with_free_space(found, needed, location) if needed else Finding("cache", found)


def suggest_cache(config: Config, image_set: ImageSet, short_side: int, indices: list[int]) -> str:
    """What a cache would gain where images usually have this short side, measured on a few; empty if it is little."""
    data, side = config.DATA, math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)  # which evaluation resizes to
    if data.CACHE != "none" or short_side < LARGE * side or why_not_cacheable(image_set):
        return ""
    smaller = replace(data, CACHE_SIDE=side)
    cached = {index: encode(smaller, image_set, index)[2] for index in indices}

    def read_cached(index: int) -> np.ndarray:
        return np.array(cached[index])

    _seconds_to_crop(config, read_cached, indices)  # the first call of a kernel takes longer
    gain = _seconds_to_crop(config, image_set.read, indices) / _seconds_to_crop(config, read_cached, indices)
    return f"; DATA.CACHE=disk DATA.CACHE_SIDE={side} reads {gain:.1f} times faster" if gain >= LEAST_GAIN else ""


def _seconds_to_crop(config: Config, read: Callable[[int], np.ndarray], indices: list[int]) -> float:
    """Of the processor."""
    side, transform = config.DATA.IMAGE_SIZE, TrainTransform(config.DATA)
    out = torch.empty((side, side, config.DATA.IMAGE_CHANNELS), dtype=torch.uint8).permute(2, 0, 1)
    start = time.process_time()
    for index in indices:
        transform(read(index), sample_rng(config.SEED, 0, index), out)
    return time.process_time() - start


def describe_cache(config: Config, part: str, image_set: ImageSet, location: CacheLocation, lines: list[str]) -> int:
    """Describe the cache of one image set. Returns the bytes still to be written."""
    file = open_cache(location, lines.append)
    if file:
        lines.append(f"{part} images: {format_bytes(len(file.data))} in {location.data}")
        return 0
    num_done, _ = find_resume_point(location)
    with ThreadPoolExecutor(count_threads(config), "cache") as pool:
        size = estimate_bytes(config.DATA, image_set, len(image_set) - num_done, pool)
    begun = f", {num_done:,} of {len(image_set):,} are there" if num_done else ""
    lines.append(f"{part} images: about {format_bytes(size)} will be written to {location.folder}{begun}")
    return size


def compare_with_free_space(found: str, needed: int, location: CacheLocation) -> Finding:
    """Check that `needed` bytes can be written there."""
    nearest = nearest_existing(location.folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = free_bytes(nearest)
    except OSError as error:
        return Finding("cache", f"{found}\ncannot write to {nearest} ({error.strerror})", WARN, REMEDY_FOR_FOLDER)
    found = f"{found}\n{format_bytes(free)} are free there"
    return Finding("cache", found, WARN, REMEDY_FOR_SPACE) if needed > free else Finding("cache", found)
