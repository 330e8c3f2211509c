"""Checks DATA.CACHE: whether a valid cache exists, or whether there is space to build one."""

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.schema import Config
from datasets import ImageSet
from datasets.cache.build import CacheEncoder, estimate_bytes, free_bytes
from datasets.cache.cached_images import (
    REMEDY_FOR_SPACE,
    check_ram_cache_is_possible,
    count_threads,
    locate_cache,
    open_cache,
    remedy_for_folder,
    why_not_cacheable,
)
from datasets.cache.file import CacheLocation, find_resume_point
from engine.check.quick_checks import nearest_existing
from utils.findings import WARN, Finding
from utils.text import format_bytes


def check_cache(config: Config, parts: Iterable[tuple[str, ImageSet | None]]) -> Finding:
    """One row for both image sets, which share a folder. Never WRONG: a run without a cache continues without it."""
    check_ram_cache_is_possible(config)
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
            return Finding("cache", f"{location.folder} cannot be used ({error})", WARN, remedy_for_folder(location))
        needed += size
    found = "\n".join(lines)
    return compare_with_free_space(found, needed, location) if needed else Finding("cache", found)


def describe_cache(config: Config, part: str, image_set: ImageSet, location: CacheLocation, lines: list[str]) -> int:
    """Describe the cache of one image set. Returns the bytes still to be written."""
    location = replace(location, persistent=True)  # otherwise closing a cache in memory would remove it
    file = open_cache(location, lines.append)
    if file:
        lines.append(f"{part} images: {format_bytes(len(file.data))} in {location.data}")
        return 0
    num_done, _ = find_resume_point(location)
    with ThreadPoolExecutor(count_threads(config), "cache") as pool:
        size = estimate_bytes(image_set, CacheEncoder(config.DATA), len(image_set) - num_done, pool)
    begun = f", {num_done:,} of {len(image_set):,} are there" if num_done else ""
    lines.append(f"{part} images: about {format_bytes(size)} will be written to {location.folder}{begun}")
    return size


def compare_with_free_space(found: str, needed: int, location: CacheLocation) -> Finding:
    """Check that `needed` bytes can be written there."""
    nearest = nearest_existing(location.folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = free_bytes(replace(location, folder=nearest))
    except OSError as error:
        return Finding(
            "cache", f"{found}\ncannot write to {nearest} ({error.strerror})", WARN, remedy_for_folder(location)
        )
    found = f"{found}\n{format_bytes(free)} are free there"
    return Finding("cache", found, WARN, REMEDY_FOR_SPACE) if needed > free else Finding("cache", found)
