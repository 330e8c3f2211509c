"""What -check says of DATA.CACHE: whether there is one that fits, or whether there is room to make it."""

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.schema import Config
from datasets import ImageSet
from datasets.cache.build import Recipe, estimate, free_bytes
from datasets.cache.cached_images import (
    LESS,
    count_threads,
    open_finished,
    place_of,
    refuse_without_memory,
    remedy_for,
    why_not,
)
from datasets.cache.file import Place, committed
from engine.check.quick_checks import existing
from utils.findings import WARN, Finding
from utils.units import format_bytes


def check_cache(config: Config, parts: Iterable[tuple[str, ImageSet | None]]) -> Finding:
    """One row for all parts, which share a folder. A run that cannot have a cache goes on without: nothing is WRONG."""
    refuse_without_memory(config)
    told, needed = [], 0
    for part, image_set in parts:
        if image_set is None:
            continue
        reason = why_not(image_set)
        if reason:
            told.append(f"none of the {part} images, {reason}")
            continue
        place = place_of(config, part, image_set)
        try:
            size = look_at(config, part, image_set, place, told)
        except OSError as error:
            return Finding("cache", f"{place.folder} cannot be used ({error})", WARN, remedy_for(place))
        needed += size
    found = "\n".join(told)
    return weigh(found, needed, place) if needed else Finding("cache", found)


def look_at(config: Config, part: str, image_set: ImageSet, place: Place, told: list[str]) -> int:
    """Say what there is. Returns the bytes that are still to be written."""
    place = replace(place, stays=True)  # or to close one in memory would remove it
    file = open_finished(place, told.append)
    if file:
        told.append(f"{part} images: {format_bytes(len(file.data))} in {place.data}")
        return 0
    num_done, _ = committed(place)
    with ThreadPoolExecutor(count_threads(config), "cache") as pool:
        size = estimate(image_set, Recipe(config.DATA), len(image_set) - num_done, pool)
    begun = f", {num_done:,} of {len(image_set):,} are there" if num_done else ""
    told.append(f"{part} images: about {format_bytes(size)} will be written to {place.folder}{begun}")
    return size


def weigh(found: str, needed: int, place: Place) -> Finding:
    """Whether so many bytes can be written there."""
    nearest = existing(place.folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = free_bytes(replace(place, folder=nearest))
    except OSError as error:
        return Finding("cache", f"{found}\ncannot write to {nearest} ({error.strerror})", WARN, remedy_for(place))
    found = f"{found}\n{format_bytes(free)} are free there"
    return Finding("cache", found, WARN, LESS) if needed > free else Finding("cache", found)
