"""Checks of a data set before a run, which read every image: classes, sizes, unreadable images, duplicates."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator

import numpy as np

from configs.schema import Config
from datasets.bad_images import num_allowed
from datasets.sources.synthetic import SyntheticImages
from datasets.types import ImageReadError, ImageSet
from utils.findings import WARN, WRONG, Finding
from utils.text import counted, first_of

LINE_EACH = ",\n"
BLOCK = 64  # images per task of a thread
UNEVEN = 10  # ratio of largest to smallest class above which it is reported


class ScanResult:
    """Size, digest or error of every image of a set."""

    def __init__(self, image_set: ImageSet):
        self.image_set = image_set
        self.sides = np.zeros((len(image_set), 2), dtype=np.int64)  # height, width
        self.digests = np.zeros(len(image_set), dtype=np.uint64)  # of the pixels; 0 of an unreadable image
        self.reasons: dict[int, str] = {}  # errors of unreadable images
        self.kinds: list[str] = []  # what is unusual about files

    @property
    def readable(self) -> np.ndarray:
        """bool [N]"""
        return self.sides[:, 0] > 0

    def scan(self, indices: range) -> int:
        """Read these images. Returns their number."""
        for index in indices:
            self.kinds.extend(self.image_set.kinds(index))
            try:
                pixels = self.image_set.read(index)
            except ImageReadError as error:
                self.reasons[index] = str(error)
                continue
            self.sides[index] = pixels.shape[:2]
            digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
            digest.update(np.ascontiguousarray(pixels))
            self.digests[index] = int.from_bytes(digest.digest(), "little")
        return len(indices)


def scan_images(image_set: ImageSet, title: str) -> ScanResult:
    """Read every image in threads, with a progress bar on a terminal."""
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    result = ScanResult(image_set)
    blocks = [range(start, min(start + BLOCK, len(image_set))) for start in range(0, len(image_set), BLOCK)]
    with (
        ThreadPoolExecutor() as pool,
        contextlib.closing(pool.map(result.scan, blocks)) as counts,  # starts no further block after Ctrl-C
        tqdm(total=len(image_set), desc=title, unit=" images", leave=False, disable=None) as bar,
    ):
        for count in counts:
            bar.update(count)
    return result


def check_images(config: Config, train: ImageSet | None, val: ImageSet) -> Iterator[Finding]:
    """All checks of a data set whose lists and folders are valid. `train` is None in evaluation."""
    counts = counted(len(val), "validation image")
    yield Finding("data", counts if train is None else f"{len(train):,} training and {counts}")
    if isinstance(val, SyntheticImages):  # generated on the device, with random classes
        return
    yield check_classes(config, train, val)
    scans = []
    for part, image_set in (("training", train), ("validation", val)):
        if image_set is not None:
            scans.append(scan_images(image_set, f"reading {part} images"))
            yield check_readable(part, scans[-1], config.DATA.MAX_BAD_FRACTION)
            yield check_sizes(part, scans[-1], config.DATA.IMAGE_SIZE)
    if kinds := Counter(kind for scan in scans for kind in scan.kinds):
        yield Finding("kinds of files", ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()))
    if train is not None:
        yield check_duplicates(*scans)


def check_classes(config: Config, train: ImageSet | None, val: ImageSet) -> Finding:
    """Classes without images, and how uneven the others are. Labels out of range are refused with the lists."""
    part, image_set = ("validation", val) if train is None else ("training", train)
    names = image_set.classes
    counts, num_val = (np.bincount(each.targets, minlength=len(names)) for each in (image_set, val))
    present = counts[counts > 0]
    notes = [f"{len(names):,}, each with {present.min():,} to {counted(present.max(), f'{part} image')}"]
    if present.max() > UNEVEN * present.min():
        notes.append(f"uneven: {names[counts.argmax()]} has most images")
    if (config.MODEL.NUM_CLASSES or 0) > len(names):
        notes.append(f"MODEL.NUM_CLASSES is {config.MODEL.NUM_CLASSES:,}")
    unseen = [names[number] for number in np.flatnonzero((num_val == 0) & (counts > 0))]
    if unseen:
        notes.append(f"without validation images: {first_of(unseen)}")
    empty = [names[number] for number in np.flatnonzero(counts == 0)]
    if not empty:
        return Finding("classes", "; ".join(notes))
    notes.append(f"without {part} images: {first_of(empty)}")
    return Finding("classes", "; ".join(notes), WARN, "add images of these classes, or number the classes without gaps")


def check_readable(part: str, scan: ScanResult, max_fraction: float) -> Finding:
    """Unreadable images by name. They are WRONG above `max_fraction`, DATA.MAX_BAD_FRACTION."""
    what, total, bad = f"{part} images", len(scan.image_set), sorted(scan.reasons)
    if not bad:
        return Finding(what, f"{total:,}, all readable")
    named = [f"{scan.image_set.name(index)} ({scan.reasons[index]})" for index in bad]
    share = f"{len(bad):,} of {total:,} ({len(bad) / total:.2%}) cannot be read"
    return Finding(
        what,
        f"{share}; DATA.MAX_BAD_FRACTION is {max_fraction:g}:\n{first_of(named, LINE_EACH)}",
        WRONG if len(bad) > num_allowed(max_fraction, total) else WARN,
        "repair or remove them",
    )


def check_sizes(part: str, scan: ScanResult, image_size: int) -> Finding:
    """Smallest, median and largest image, and how many have to be enlarged."""
    what, sides = f"{part} sizes", scan.sides[scan.readable]
    if not len(sides):
        return Finding(what, "no image could be read")
    by_area = sides[np.argsort(sides.prod(axis=1), kind="stable")]
    smallest, median, largest = (f"{width} x {height}" for height, width in by_area[[0, len(sides) // 2, -1]].tolist())
    smaller = (sides.min(axis=1) < image_size).mean()
    note = f"; {smaller:.1%} are smaller than DATA.IMAGE_SIZE {image_size}" if smaller else ""
    return Finding(what, f"smallest {smallest}, median {median}, largest {largest}{note}")


def check_duplicates(train: ScanResult, val: ScanResult) -> Finding:
    """Validation images with the pixels of a training image."""
    known, first = np.unique(train.digests[train.readable], return_index=True)
    twins = np.flatnonzero(np.isin(val.digests, known))  # 0 is not among them
    if not len(twins):
        return Finding("duplicates", "no validation image is also a training image")
    origins = np.flatnonzero(train.readable)[first[np.searchsorted(known, val.digests[twins])]]
    pairs = [
        f"{val.image_set.name(twin)} = {train.image_set.name(origin)}"
        for twin, origin in zip(twins.tolist(), origins.tolist(), strict=True)
    ]
    return Finding(
        "duplicates",
        f"{len(twins):,} of {counted(len(val.image_set), 'validation image')} are also training images:\n"
        f"{first_of(pairs, LINE_EACH)}",
        WARN,
        "remove them from one of the two sets: accuracy on them says nothing",
    )
