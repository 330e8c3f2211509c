"""Finds equal and nearly equal images: exact copies, and copies that were saved again, resized or slightly cropped."""

import itertools
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from datasets import BadImages, ImageSet
from datasets.loading.ahead import read_ahead
from datasets.types import ImageReadError
from extras.labels.data import DataSet

NUM_THREADS, NUM_AHEAD = 8, 64  # threads that read images, and images read ahead
SIDE = 16  # pixels; images are compared as square pictures of this size
PICTURE = (SIDE, SIDE, 3)
# Two pictures are nearly equal if their mean difference per value (of 255) is at most SHARE x contrast, within the
# bounds LOW and MOST (see most_difference). The contrast is the mean deviation of a picture's values from their mean.
# Synthetic photographs differ by at most 6.5 from copies that were saved again at JPEG quality 50, halved in size or
# cropped by 2%, and by at least 24 from other photographs. Two different plain drawings may differ by only 5, so the
# limit depends on the contrast.
SHARE, LOW, MOST = 0.25, 3.5, 7.5
LEAST_CONTRAST = 2.0  # a picture with less contrast is nearly plain: it is compared for exact equality only
# Features of a picture: mean grey, two colour differences, and five low frequencies. TOLERANCES: the largest difference
# of each feature between two copies. WIDTHS: the cell width of each feature in the search grid.
TOLERANCES = np.array([3.0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.5, 1.5])
WIDTHS = np.array([12.0, 8.0, 8.0, 6.0, 6.0, 6.0, 6.0, 6.0])
FREQUENCIES = ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
MOST_DIFFERENT = 64  # number of different pictures in a cell with which each further picture is compared


Group = dict[int, int]  # {image: the first image that is equal to it} of equal and nearly equal images


class Pictures:
    """The digests and small pictures of all images. The pictures are in a temporary file, not in memory."""

    def __init__(self, num_images: int):
        self.digests: list[bytes | None] = [None] * num_images  # None: the image cannot be read
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (stays open as long as the pictures are used)
        shape = (num_images, *PICTURE)
        self.pixels = np.memmap(self._file, np.uint8, "w+", shape=shape) if num_images else np.zeros(shape, np.uint8)

    def read(self, images: Iterable[tuple[ImageSet, int]]) -> None:
        """Read all images, each given as its set and index, with a progress bar. Report unreadable images as a run does."""
        bad: dict[ImageSet, list[int]] = defaultdict(list)
        with ThreadPoolExecutor(NUM_THREADS, "images") as pool:
            started = ((each, pool.submit(_read, *each)) for each in images)
            results = tqdm(
                read_ahead(started, NUM_AHEAD),
                "reading images",
                len(self.digests),
                unit="image",
                file=sys.stderr,
                disable=None,
            )
            for number, ((part, index), future) in enumerate(results):
                found = future.result()
                if found is None:
                    bad[part].append(index)
                else:
                    self.digests[number], self.pixels[number] = found
        for part, indices in bad.items():
            BadImages(part, 1.0, print).note(indices)


def _read(part: ImageSet, index: int) -> tuple[bytes, np.ndarray] | None:
    try:
        pixels = part.read(index)
    except ImageReadError:
        return None
    return blake2b(pixels, digest_size=16, key=repr(pixels.shape).encode()).digest(), picture_of(pixels)


def picture_of(pixels: np.ndarray) -> np.ndarray:
    """Return an image as uint8 [SIDE, SIDE, 3]. Each of its pixels is the mean of a part of the image."""
    image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).convert("RGB")
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def find_groups(pictures: Pictures) -> list[Group]:
    """Return the groups of images that are equal or nearly equal to another image of the group."""
    first_of: dict[bytes, int] = {}
    digests = enumerate(pictures.digests)
    firsts = [number if digest is None else first_of.setdefault(digest, number) for number, digest in digests]
    leader = list(firsts)  # an image of the same group

    def leader_of(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]  # shortens the way for the next search
            number = leader[number]
        return number

    for one, other in _nearly_equal(pictures.pixels, np.array([*first_of.values()], np.int64)):
        one, other = sorted((leader_of(one), leader_of(other)))
        leader[other] = one
    leaders = [leader_of(number) for number in range(len(firsts))]
    sizes, groups = Counter(leaders), defaultdict(dict)
    for number, first in enumerate(firsts):
        if sizes[leaders[number]] > 1:
            groups[leaders[number]][number] = first
    return [*groups.values()]


def _nearly_equal(pixels: np.ndarray, images: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the pairs of nearly equal images. No two of the given images are equal.

    The features of two copies differ by at most TOLERANCES, so the copies share a cell. Only images in the same
    cell are compared.
    """
    contrasts = np.array([contrast_of(pixels[number]) for number in images.tolist()])
    images, contrasts = images[contrasts >= LEAST_CONTRAST], contrasts[contrasts >= LEAST_CONTRAST]
    if len(images) < 2:
        return
    rows, cells = _cells(np.array([_features(pixels[number]) for number in images.tolist()]))
    order = np.lexsort((rows, cells))
    rows, cells = rows[order], cells[order]
    edges = np.flatnonzero(np.diff(cells, prepend=cells[:1] + np.uint64(1), append=cells[-1:] + np.uint64(1)))
    for cell in np.flatnonzero(np.diff(edges) > 1).tolist():
        for row, other in _compare(pixels, images, contrasts, rows[edges[cell] : edges[cell + 1]].tolist()):
            yield int(images[row]), int(images[other])


def _compare(
    pixels: np.ndarray, images: np.ndarray, contrasts: np.ndarray, rows: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of nearly equal images of one cell. Each is compared with the first image of each group."""
    firsts: list[int] = []
    known = np.empty((min(len(rows), MOST_DIFFERENT), SIDE * SIDE * 3), np.int16)
    for row in rows:
        own = pixels[images[row]].astype(np.int16).ravel()
        differences = np.abs(known[: len(firsts)] - own).sum(1, dtype=np.int32) / own.size
        is_near = differences <= most_difference(np.minimum(contrasts[firsts], contrasts[row]))
        if is_near.any():
            yield row, firsts[int(np.argmax(is_near))]
        elif len(firsts) < len(known):
            known[len(firsts)] = own
            firsts.append(row)


def most_difference(contrast: np.ndarray | float) -> np.ndarray:
    """Return the largest mean difference at which two pictures with this contrast are nearly equal."""
    return np.minimum(np.maximum(SHARE * contrast, np.minimum(LOW, contrast / 2)), MOST)


def contrast_of(picture: np.ndarray) -> float:
    return float(np.abs(picture - picture.mean((0, 1))).mean())


def _features(picture: np.ndarray) -> np.ndarray:
    """Return the features of a picture, in the order of TOLERANCES."""
    red, green, blue = picture.mean((0, 1))
    grey = picture.mean(2)
    places = np.pi * (2 * np.arange(SIDE) + 1) / (2 * SIDE)
    low = [np.cos(u * places) @ grey @ np.cos(v * places) / SIDE**2 for u, v in FREQUENCIES]
    return np.array([grey.mean(), red - green, blue - green, *low])


def _cells(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and cell hashes: each row once per cell within half the tolerances of its features."""
    low, high = (np.floor((features + sign * TOLERANCES / 2) / WIDTHS).astype(np.int64) for sign in (-1, 1))
    rows, cells = [], []
    for ends in itertools.product((0, 1), repeat=len(WIDTHS)):
        chosen = np.flatnonzero(((high > low) | (np.array(ends) == 0)).all(1))
        place, hashes = np.where(ends, high, low)[chosen], np.zeros(len(chosen), np.uint64)
        for column in place.T:
            hashes = (hashes ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(29)
        rows.append(chosen)
        cells.append(hashes)
    return np.concatenate(rows), np.concatenate(cells)


class Copy(NamedTuple):
    """An image that is like another image, and why that is a problem."""

    image: int
    reason: str
    has_other_label: bool


def find_copies(groups: Iterable[Group], data: DataSet, folds: Sequence[int] | None = None) -> list[Copy]:
    """Return images whose copies have another label, and validation images with copies in training.

    `folds`: for a sweep with -folds, the fold that holds out each image (-1: unknown). With folds, a copy in another
    fold is a copy in training.
    """
    return [copy for group in groups for copy in _other_labels(group, data) or _across(group, data, folds)]


def _other_labels(group: Group, data: DataSet) -> list[Copy]:
    """Return the images without the most frequent label of their group, and one image with it."""
    labels = {number: data.label(number) for number in group}
    counts = Counter(labels.values())
    if len(counts) == 1:
        return []
    most = counts.most_common(1)[0][0]
    usual = next(number for number, label in labels.items() if label == most)
    others = [number for number, label in labels.items() if label != most]
    pairs = [(usual, others[0]), *((number, usual) for number in others)]
    return [
        Copy(one, f"{_how(group, one, other)} to {data.name(other)}, labelled {labels[other]}", True)
        for one, other in pairs
    ]


def _across(group: Group, data: DataSet, folds: Sequence[int] | None) -> list[Copy]:
    """Return validation images with copies in training, or with folds, images outside the fold of the first image."""
    if folds is not None:
        known = [number for number in group if folds[number] >= 0]
        pairs = [(number, known[0], "in another fold") for number in known if folds[number] != folds[known[0]]]
    else:
        trained = next((number for number in group if not data.is_held_out[number]), None)
        pairs = [
            (number, trained, "in training") for number in group if data.is_held_out[number] and trained is not None
        ]
    return [Copy(one, f"{_how(group, one, other)} to {data.name(other)} {where}", False) for one, other, where in pairs]


def _how(group: Group, one: int, other: int) -> str:
    return "equal" if group[one] == group[other] else "nearly equal"
