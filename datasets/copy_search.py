"""Finds the copies in a set of which images will be held out.

Copies on both sides of a split make the scores too good, so a small set is searched for them before it is divided.
"""

import csv
from dataclasses import replace

import numpy as np

from datasets.changes import split_table
from datasets.identity import ImageContents
from datasets.image_set import ImageSet, Table
from datasets.pixels import Pixels
from datasets.split import MOST_SEARCHED
from datasets.split.together import COPY_OF
from datasets.types import SavedData
from utils.distributed import Process

# Limits of the search, besides MOST_SEARCHED. Reading takes as long as in one epoch: on two cores, 5,000 small images
# take 7 s, and 2 GiB of photos 20 s. Of the images that look alike, the most similar pairs are compared, which takes 5
# to 30 ms for each pair.
MOST_BYTES, MOST_PAIRS = 2**31, 1_000


def with_copies(table: Table, pixels: Pixels, saved: SavedData | None, process: Process) -> Table:
    """Return the images with `copies`, or unchanged if there are none or too many images. Collective.

    `saved`: the data record of a run that is resumed or evaluated. Its split.csv lists the copies.
    """
    copies = process.first(lambda: _copies_of(table, pixels, saved))
    has_copies = copies is not None and len(np.unique(copies)) < len(copies)
    return replace(table, copies=copies) if has_copies else table


def _copies_of(table: Table, pixels: Pixels, saved: SavedData | None) -> np.ndarray | None:
    """Return the copies that a run has listed, or else those that a search finds."""
    listed = _listed_copies(table, saved) if saved else None
    return _find_copies(ImageSet.of(table, pixels)) if listed is None else listed


def _listed_copies(images: Table, saved: SavedData) -> np.ndarray | None:
    """Return the copies that split.csv beside the checkpoint lists, or None if it does not list all images."""
    file = split_table(saved)
    if file is None:
        return None
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as lines:
        listed = {row["image"]: row.get(COPY_OF) for row in csv.DictReader(lines)}
    names = [key.decode(errors="surrogateescape") for keys in images.all_keys() for key in keys]
    if any(listed.get(name) is None for name in names):
        return None
    return np.unique([listed[name] or name for name in names], return_inverse=True)[1]


def _find_copies(image_set: ImageSet) -> np.ndarray | None:
    """Return int64 [N], equal for copies of each other, or None if the set is too large."""
    if not 1 < len(image_set) <= MOST_SEARCHED or sum(image_set.storage.file_sizes(range(len(image_set)))) > MOST_BYTES:
        return None
    searched = replace(image_set, pixels=image_set.look_into(False)[0])
    contents = ImageContents(len(searched), lambda number: (searched, number))
    contents.read(say=lambda line: None)  # the run reports unreadable images
    copies = np.arange(len(image_set))
    for group in contents.groups(MOST_PAIRS):
        copies[[*group]] = min(group)
    return copies
