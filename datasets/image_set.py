"""The images of a data set: Storage, where they lie; Table, their rows with targets; ImageSet, the finished images of a
part, as open_data makes them.

Nobody changes a Table or an ImageSet: `dataclasses.replace` makes another one.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from PIL import Image

from configs.schema import Config
from datasets.order import Share, shuffled
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError as ImageReadError  # other files import it from here
from datasets.targets.one_class import OneClass
from utils.errors import ensure

if TYPE_CHECKING:
    from datasets.index import Index, Texts

ALL = "all"  # the rule of a split if all images are trained on: both parts are the whole set
Rows = np.ndarray | None  # the rows of a part in their order; None: all rows of the storage
CHUNK = 1 << 16  # keys that are in memory at once


class Storage:
    """Where the images of a data set lie, and what they are called: a row for each, whatever part it is in.

    Each source has a storage. Methods with a `row` are thread-safe.
    """

    in_memory = False  # published images in memory, among which nobody looks for copies
    is_encoded = False  # the images are files, which pixels can look into
    names_are_numbers = False  # the name of an image contains only its number
    counts_in_part = False  # this number is counted in the image's part
    is_read_in_groups = False  # a process reads and caches groups of images; each loader process would read them again
    # The folder of the files, if it is known. Then there is also a method `stamp(row)`, which returns the path below
    # `root`, size and date of an image's file, to detect changes.
    root: Path | None = None
    index: "Index | None" = None  # the index with the columns of the rows, if there is one

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        """Return the image [H, W, channels] with the type of `pixels`, or raise ImageReadError."""
        raise NotImplementedError

    def kinds(self, row: int, pixels: Pixels) -> Sequence[str]:
        """Return the unusual properties of the image's file, as -check prints them."""
        return ()

    def file_of(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        """Return the image as a file: its extension and bytes. If there is no file, return a PNG of the pixels."""
        image, png = self.read(row, pixels), io.BytesIO()
        Image.fromarray(image if image.shape[2] > 1 else image[:, :, 0]).save(png, "PNG")
        return ".png", png.getvalue()

    def name(self, row: int) -> str:
        """Return the name of this image for messages. With `counts_in_part`, `row` is its number in the part."""
        raise NotImplementedError

    def key(self, row: int) -> str:
        """Return this image's name in its data set. Its hash decides the split, so it must never change."""
        return self.name(row)

    def table_name(self, row: int) -> str:
        """Return this image's name in tables and pictures: for a file, its path below DATA.DATA_PATH."""
        return self.key(row)

    def keys(self, rows: Rows, count: int) -> Iterable[list[bytes]]:
        """Yield the keys of a part with `count` images as bytes, in chunks."""
        for start in range(0, count, CHUNK):
            numbers = range(start, min(start + CHUNK, count))
            if rows is not None and not self.counts_in_part:
                numbers = rows[start : start + CHUNK].tolist()
            yield [self.key(row).encode(errors="surrogateescape") for row in numbers]

    def naming(self, rows: Rows, count: int) -> Iterable[bytes | np.ndarray]:
        """Return content for a hash of the names of a part in their order. A copy of the data has the same hash."""
        if self.names_are_numbers and count:
            first = 0 if rows is None or self.counts_in_part else int(rows[0])
            return (self.name(first).encode(), b"%d" % count, *chosen(rows))
        return (b"\0".join(chunk) for chunk in self.keys(rows, count))

    def file_sizes(self, rows: Sequence[int]) -> list[int]:
        """Return the file sizes of some images quickly (-1: the file is missing). Return [] if images are not files."""
        return []

    def epoch_order(self, rows: Rows, count: int, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch of a part, with each of its images once. It depends only on seed and epoch."""
        return shuffled(count, seed, epoch)

    def order_to_write(self, rows: Rows, count: int, seed: int) -> np.ndarray:
        """Return the order for writing the images in another format, mixed as widely as the format allows."""
        return shuffled(count, seed)

    def will_read(self, part: "ImageSet", share: Share, step: int) -> None:
        """Prepare for training to read the images of a part in the order of `share`, from this step on.

        Every training process (never a loader worker) calls this each time it hands the images of an update to its
        loader, before any of them is read; one of several machines also before loader workers start. The first call may
        be in mid-epoch. A jump means skipped or repeated updates, or a short trial. The call must return at once.
        """

    def will_evaluate(self, part: "ImageSet", indices: np.ndarray) -> None:
        """Prepare for an evaluation of a part, of which this machine reads only these images."""


def chosen(rows: Rows) -> tuple[np.ndarray, ...]:
    """Return the rows of a part, which `naming` adds to the names of the whole storage."""
    return () if rows is None else (np.ascontiguousarray(rows),)


class Watch:
    """What a run notes of a part while it reads it (overlap.py)."""

    note: Callable[[int, np.ndarray], None] | None = None  # gets each image that is read, while parts are compared
    num_in_training: int | None = None  # the number of validation images that are also training images; None: unknown


@dataclass(frozen=True, eq=False)
class Table:
    """Images with their targets, before they are divided and numbered.

    `targets[i]` is the number of the target of image i, usually the number of its class, and `classes[number]` the name
    of a class. `meaning` says what a target number means (datasets/targets/).
    """

    storage: Storage
    targets: np.ndarray
    classes: list[str]
    meaning: OneClass = OneClass()
    rows: Rows = None  # the row of each image in the storage
    # The origin of both parts, in plain values that checkpoints save: the result of own_split in sources/layout.py, a
    # record of a drawn split, or {"training": title} for a set without a validation part.
    split: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines for the log; the notes of the validation set are about both sets
    groups: "Texts | None" = None  # the group of each row of the storage if DATA.GROUP_BY is set; it stays in one part
    folds: np.ndarray | None = None  # the fold of each image, if folds were drawn
    copies: np.ndarray | None = None  # int64 [N], equal for copies of each other, if the set was searched for copies
    class_folders: Set[bytes] = frozenset()  # class folders that are left out of image names when a split hashes them
    left_out: Mapping[str, int] = field(default_factory=dict)  # {class unknown to the checkpoint: number of images}
    is_listing: bool = False  # whether the set consists of the class folders below `root`, so that folders are labels
    doubt: str = ""  # an error message if the folders do not look like classes; ignored if the classes are listed

    def __len__(self) -> int:
        return len(self.targets)

    # --- the storage of these images ---

    @property
    def root(self) -> Path | None:
        return self.storage.root

    @property
    def makes_batches(self) -> bool:
        """Return whether the storage makes batches itself (datasets/sources/synthetic.py)."""
        return hasattr(self.storage, "make_batches")

    def row(self, index: int) -> int:
        """Return the row of an image in the storage."""
        return index if self.rows is None else int(self.rows[index])

    def name(self, index: int) -> str:
        """Return the name of this image for messages."""
        return self.storage.name(index if self.storage.counts_in_part else self.row(index))

    def key(self, index: int) -> str:
        """Return this image's name in its data set."""
        return self.storage.key(index if self.storage.counts_in_part else self.row(index))

    def table_name(self, index: int) -> str:
        """Return this image's name in tables and pictures: for a file, its path below DATA.DATA_PATH."""
        return self.storage.table_name(self.row(index))

    def all_keys(self) -> Iterable[list[bytes]]:
        """Yield the keys of all images as bytes, in chunks."""
        return self.storage.keys(self.rows, len(self))

    def split_keys(self) -> Iterable[list[bytes]]:
        """Return the bytes whose hash decides whether each image is held out: by default the image's key."""
        return self.all_keys() if self.groups is None else self.groups.in_chunks(self.rows)

    # --- targets and parts ---

    @property
    def trains_on_all(self) -> bool:
        """Return whether all images are training images: both parts of the split are the whole set."""
        return self.split.get("rule") == ALL

    @property
    def is_grouped(self) -> bool:
        """Return whether some images say less than others, because they are of one group or copies of each other."""
        return self.groups is not None or self.copies is not None

    def take(self, indices: np.ndarray) -> Self:
        """Return a set of only these images, with the same class numbers. `indices` may be a mask."""
        rows = np.arange(len(self), dtype=np.uint32) if self.rows is None else self.rows
        return replace(
            self,
            targets=self.targets[indices],
            rows=rows[indices],
            folds=None if self.folds is None else self.folds[indices],
            copies=None if self.copies is None else self.copies[indices],
        )

    def count_classes(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return int64 [classes]: the number of images with each class, among all or the chosen images."""
        return self.meaning.count(self.targets[chosen], len(self.classes))

    def with_any(self, classes: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether each image has one of these classes."""
        return self.meaning.with_any(self.targets, classes)

    def target_names(self) -> Sequence[str]:
        """Return the meaning of each target number: the name of its class, or the names of all its classes."""
        return self.meaning.names(self.classes)


@dataclass(frozen=True, eq=False)
class ImageSet(Table):
    """The finished images of a part, which can be read."""

    pixels: Pixels = field(kw_only=True)
    watch: Watch = field(default_factory=Watch)
    read_cached: Callable[[int], np.ndarray] | None = None  # returns the image of a row from a cache (DATA.CACHE)

    def __post_init__(self):
        count = len(self.storage if self.rows is None else self.rows)
        ensure(len(self.targets) == count, f"{len(self.targets)} targets of {count} images")
        for column in (self.targets, self.rows):
            if column is not None:
                column.flags.writeable = False

    @classmethod
    def of(cls, table: Table, pixels: Pixels) -> "ImageSet":
        return cls(**{each.name: getattr(table, each.name) for each in fields(Table)}, pixels=pixels)

    def read(self, index: int) -> np.ndarray:
        """Return the image [H, W, channels] with the type of `pixels`, or raise ImageReadError. Thread-safe."""
        if self.read_cached:
            return self.read_cached(self.row(index))
        return self.storage.read(self.row(index), self.pixels)

    def kinds(self, index: int) -> Sequence[str]:
        """Return the unusual properties of the image's file, as -check prints them."""
        return self.storage.kinds(self.row(index), self.pixels)

    def file(self, index: int) -> tuple[str, bytes]:
        """Return the image as a file: its extension and bytes. If there is no file, return a PNG of the pixels."""
        return self.storage.file_of(self.row(index), self.pixels)

    def look_into(self, is_remote: bool) -> tuple[Pixels, list[str]]:
        """Look into a few files. Return their pixels, and a warning if these would lose most levels of the files."""
        return self.pixels.look_into(self, is_remote) if self.storage.is_encoded else (self.pixels, [])

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch, with each image once. It depends only on seed and epoch."""
        return self.storage.epoch_order(self.rows, len(self), seed, epoch)

    def batches(self, config: Config, batch_size: int, rank: int, device: torch.device) -> Callable:
        """Return the function that makes batches from pieces of an order, if the storage `makes_batches`."""
        return self.storage.make_batches(self, config, batch_size, rank, device)
