"""The row of -check about DATA.CACHE."""

import tempfile
from concurrent.futures import ThreadPoolExecutor

from configs.schema import Config
from datasets.index import caches_folder
from datasets.types import ImageSet
from engine.check.quick_checks import WARN, Finding, nearest_existing
from extras.cache import REMEDY, count_threads, estimate_bytes, locate_cache, open_cache, why_not_cacheable
from utils.files import free_bytes
from utils.text import format_bytes


def check_cache(config: Config, sets: dict[str, ImageSet | None]) -> Finding:
    """Whether DATA.CACHE is there, or has room. Never WRONG: a run without a cache continues without it.

    `sets`: those of training and of validation, which share a folder.
    """
    lines, needed, folder = [], 0, caches_folder(config)
    try:
        for part, image_set in sets.items():
            if image_set is None:
                continue
            if reason := why_not_cacheable(image_set):
                lines.append(f"none of the {part} images, {reason}")
                continue
            location = locate_cache(config, part, image_set)
            if file := open_cache(location, lines.append):
                lines.append(f"{part} images: {format_bytes(len(file.data))} in {location.data}")
                continue
            with ThreadPoolExecutor(count_threads(config)) as pool:
                size = estimate_bytes(config.DATA, image_set, pool)
            lines.append(f"{part} images: about {format_bytes(size)} will be written to {location.folder}")
            needed += size
        with tempfile.TemporaryFile(dir=nearest_existing(folder)):
            free = free_bytes(folder)
    except OSError as error:
        return Finding("cache", "\n".join([*lines, f"{folder} cannot be used ({error})"]), WARN, REMEDY)
    text = "\n".join([*lines, *[f"{format_bytes(free)} are free there"] * bool(needed)])
    return Finding("cache", text, *((WARN, REMEDY) if needed > free else ()))
