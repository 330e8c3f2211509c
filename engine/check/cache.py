"""Checks DATA.CACHE: whether a valid cache exists, whether there is space for one, and what it would gain."""

import math
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from configs.schema import Config
from datasets import ImageSet
from datasets.batch_order import sample_rng
from datasets.index import caches_folder
from datasets.loading.cache import (
    REMEDY,
    count_threads,
    encode,
    estimate_bytes,
    locate_cache,
    open_cache,
    why_not_cacheable,
)
from datasets.loading.cache_file import find_resume_point
from datasets.transforms.crop import TrainTransform
from engine.check.quick_checks import WARN, Finding, nearest_existing
from utils.files import free_bytes
from utils.text import format_bytes

LARGE = 2  # times the side of a cached image: photographs that a cache of smaller ones may be worth its space for
LEAST_GAIN = 1.5


def check_cache(config: Config, parts: Iterable[tuple[str, ImageSet | None]]) -> Finding:
    """One row for both image sets, which share a folder. Never WRONG: a run without a cache continues without it."""
    lines, needed, folder = [], 0, caches_folder(config)
    try:
        for part, image_set in parts:
            if image_set is not None:
                needed += _describe_cache(config, part, image_set, lines)
        if needed:
            nearest = nearest_existing(folder)
            with tempfile.TemporaryFile(dir=nearest):
                free = free_bytes(nearest)
            lines.append(f"{format_bytes(free)} are free there")
            return Finding("cache", "\n".join(lines), *((WARN, REMEDY) if needed > free else ()))
    except OSError as error:
        return Finding("cache", "\n".join([*lines, f"{folder} cannot be used ({error})"]), WARN, REMEDY)
    return Finding("cache", "\n".join(lines))


def _describe_cache(config: Config, part: str, image_set: ImageSet, lines: list[str]) -> int:
    """Describe the cache of one image set. Returns the bytes still to be written."""
    if reason := why_not_cacheable(image_set):
        lines.append(f"none of the {part} images, {reason}")
        return 0
    location = locate_cache(config, part, image_set)
    if file := open_cache(location, lines.append):
        lines.append(f"{part} images: {format_bytes(len(file.data))} in {location.data}")
        return 0
    with ThreadPoolExecutor(count_threads(config), "cache") as pool:
        num_left = len(image_set) - find_resume_point(location)[0]
        size = estimate_bytes(config.DATA, image_set, num_left, pool)
    lines.append(f"{part} images: about {format_bytes(size)} will be written to {location.folder}")
    return size


def suggest_cache(config: Config, image_set: ImageSet, short_side: int, indices: list[int]) -> str:
    """What a cache would gain where images usually have this short side, measured on a few; empty if it is little."""
    data, side = config.DATA, math.floor(config.DATA.IMAGE_SIZE / config.DATA.CROP_PCT)  # which evaluation resizes to
    if data.CACHE != "none" or short_side < LARGE * side or why_not_cacheable(image_set):
        return ""
    smaller, seconds = replace(data, CACHE=side), []
    cached = {index: encode(smaller, image_set, index)[2] for index in indices}
    transform = TrainTransform(data)
    out = torch.empty((data.IMAGE_SIZE, data.IMAGE_SIZE, data.IMAGE_CHANNELS), dtype=torch.uint8).permute(2, 0, 1)
    # The first call of a kernel takes longer, so the first of these does not count.
    for read in (cached.get, cached.get, image_set.read):
        start = time.process_time()
        for index in indices:
            transform(np.array(read(index)), sample_rng(config.SEED, 0, index), out)
        seconds.append(time.process_time() - start)
    gain = seconds[2] / seconds[1]
    return f"; DATA.CACHE={side} reads {gain:.1f} times faster" if gain >= LEAST_GAIN else ""
