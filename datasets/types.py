"""The types that the packages of datasets/ share: a set of images that are read one at a time, and a batch of them."""

import copy
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from datasets.batch_order import Piece
from datasets.shuffle import EpochOrder, FullShuffle

if TYPE_CHECKING:
    from datasets.index import Index


class ImageReadError(Exception):
    """One image cannot be read. That does not end a run: see BadImages."""


class ImageSet:
    """Images with a class each. `targets[i]` is the class number of image i, `classes[number]` its name.

    Where an image can have several labels, `targets[i]` is the number of its set in `label_sets`.
    """

    in_memory = False
    names_are_numbers = False  # the name of an image says no more than its number
    makes_batches: Callable | None = None  # its own loader, in place of reading images one by one
    is_read_in_groups = False  # a process reads and keeps many images at once, so loader processes would repeat that
    per_image: tuple[str, ...] = ("targets",)  # the attributes that `take` selects from
    rows: np.ndarray | None = None  # of a part: which rows of the columns that `take` leaves whole; None: all
    index: "Index | None" = None  # where the columns of the set are, if they are in one
    root: Path | None = None  # the folder of its files, if they are known
    is_listing = False  # of what lies in class folders below `root`, so that a label is a folder
    notes: tuple[str, ...] = ()  # lines for the log; those of the validation set are about both sets
    label_sets: list[tuple[int, ...]] | None = None  # each the numbers of some classes; images share them
    labels_are_numbers = False  # the data has class numbers; names, if any, were given to them
    class_folders: Set[bytes] = frozenset()  # of a part: the names of folders that do not count in what is hashed
    left_out: dict[str, int] = {}  # images of classes that an evaluated checkpoint does not know
    folder_names: Sequence[str] = ()  # for labels that are numbers, of each class the folder that all its images are in
    fingerprints: Any = None  # datasets.overlap.Fingerprints, while it is compared with another set
    doubt = ""  # why its classes seem to be none: an error, unless somebody lists them
    classes_are_names = False  # the data has class names, and their order gives the numbers

    def __init__(self, targets: Sequence[int] | np.ndarray, classes: list[str]):
        self.targets = targets if isinstance(targets, np.ndarray) else np.array(targets, dtype=np.int64)
        self.classes = classes
        # Where both parts come from, in plain values that checkpoints hold: `own_split` of sources/root.py, or for a set
        # without a validation part {"training": title}.
        self.split: dict = {}

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> np.ndarray:
        """The image as uint8 [H, W, channels], or ImageReadError. Threads call it concurrently."""
        raise NotImplementedError

    def kinds(self, index: int) -> Sequence[str]:
        """The unusual properties of the image's file, in the words of -check."""
        return ()

    def file(self, index: int) -> tuple[str, bytes]:
        """The image as a file: its extension and bytes. If there is no file, a PNG of the pixels."""
        pixels, png = self.read(index), io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).save(png, "PNG")
        return ".png", png.getvalue()

    def stamp(self, index: int) -> str:
        """The path below `root`, size and date of the image's file, to see whether it has changed."""
        raise NotImplementedError

    def place_of(self, folder: str) -> Path | None:
        """Return the folder whose new images would all belong to the set at the next start, if this one is inside it."""

    def epoch_order(self, seed: int, epoch: int) -> EpochOrder:
        """The order of an epoch, with each image once: it depends on seed and epoch alone. Slices of it are computed."""
        return FullShuffle(len(self), seed, epoch)

    def order_to_write(self, seed: int) -> EpochOrder:
        """The order in which the images are written in another form: as mixed as this form can be read."""
        return FullShuffle(len(self), seed)

    def will_read(self, seed: int, epoch: int, position: int) -> None:
        """Training is about to read from this position of epoch_order(seed, epoch) on, in the order of that.

        Called in every training process (never in a loader worker) each time that the images of an update are handed to
        its loader, before any of them is read; what came before the position was handed out earlier. The first call may
        be in mid-epoch. Epoch follows epoch; a jump, forwards or back, means that updates were skipped or repeated, or
        that a short trial measures something. It must return at once.
        """

    def name(self, index: int) -> str:
        """The name of this image in messages."""
        raise NotImplementedError

    def key(self, index: int) -> str:
        """The name of this image within its data set, the same after the data was moved. Its hash decides the split.

        The name in messages must therefore not change where it is also the key.
        """
        return self.name(index)

    def all_keys(self) -> Iterable[list[bytes]]:
        """The keys of all images as bytes, in chunks."""
        from datasets.index import CHUNK

        for start in range(0, len(self), CHUNK):
            numbers = range(start, min(start + CHUNK, len(self)))
            yield [self.key(index).encode(errors="surrogateescape") for index in numbers]

    def find_file_names(self, names: Collection[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield (index, file name) of the images whose file name is one of these. A set with a `root` can do this."""
        raise NotImplementedError

    def split_keys(self) -> Iterable[list[bytes]]:
        """The bytes whose hash decides whether each image is held out: its key."""
        return self.all_keys()

    def naming(self) -> Iterable[bytes | np.ndarray]:
        """Return content that differs where names differ, or their order, and is the same for a copy of the data."""
        if self.names_are_numbers and len(self):
            return (self.name(0).encode(), b"%d" % len(self), *self._chosen())
        return (b"\0".join(chunk) for chunk in self.all_keys())

    def _chosen(self) -> tuple[np.ndarray, ...]:
        """Return the rows of a part, to add to what `naming` says of the whole set."""
        return () if self.rows is None else (np.ascontiguousarray(self.rows),)

    def file_sizes(self, indices: Sequence[int]) -> list[int]:
        """Return the bytes of the files of some images, quickly; nothing if they have none. -1: a file is missing."""
        return []

    def take(self, indices: np.ndarray) -> "ImageSet":
        """A set of only these images, with the same class numbers."""
        part = copy.copy(self)
        for name in self.per_image:
            setattr(part, name, getattr(self, name)[indices])
        part.rows = indices.astype(np.uint32, copy=False) if self.rows is None else self.rows[indices]
        return part

    def count_classes(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """int64 [classes]: how many images have each class, of all or of the chosen ones."""
        if not self.label_sets:
            return count_classes(self.targets[chosen], len(self.classes))
        total = [0] * len(self.classes)
        for numbers, count in zip(self.label_sets, count_classes(self.targets[chosen]).tolist(), strict=False):
            for number in numbers:
                total[number] += count
        return np.array(total, np.int64)

    def with_any(self, classes: np.ndarray) -> np.ndarray:
        """bool [N]: the images that have one of these classes."""
        if not self.label_sets:
            return np.isin(self.targets, classes)
        wanted = set(classes.tolist())
        return np.array([not wanted.isdisjoint(each) for each in self.label_sets])[self.targets]

    def target_names(self) -> list[str]:
        """The meaning of each of `targets`: the name of its class, or those of all its classes."""
        if self.label_sets is None:
            return self.classes
        return ["|".join(sorted(self.classes[number] for number in each)) for each in self.label_sets]

    def row(self, index: int) -> int:
        """The row of an image in the columns of the whole set."""
        return index if self.rows is None else int(self.rows[index])


def count_classes(targets: np.ndarray, at_least: int = 0) -> np.ndarray:
    """int64: how many images each class has. In pieces, for numpy copies what it counts as int64."""
    counts = [np.bincount(targets[start : start + 2**20]) for start in range(0, len(targets), 2**20)]
    total = np.zeros(max([at_least, *map(len, counts)]), np.int64)
    for each in counts:
        total[: len(each)] += each
    return total


class SavedData(NamedTuple):
    """The record of its data in a checkpoint that is continued or evaluated."""

    classes: list[str]  # in the order of their numbers
    split: dict  # ImageSet.split; empty if a file of weights does not say it
    validation: dict = {}  # datasets.split.identity of the validation images
    facts: dict = {}  # datasets.fingerprint.data_facts; empty in files of weights, which scripts/export.py writes


class Batch(NamedTuple):
    """One micro-batch of one process."""

    images: Tensor  # uint8 [B, C, H, W], channels last in memory
    targets: Tensor  # int64 [B]; of several labels float32 [B, classes] of 0 and 1
    num_samples: int  # B, or 0 for an image that only keeps this process in step with the others
    bad: list[int]  # unreadable images: replaced in training, omitted in evaluation
    piece: Piece | None = None  # in training; mixing depends on it
    # int64 [B, RANDOM_ERASE_COUNT, 6], on the host: the boxes to erase, rows of Boxes in erasing.py. None if the loader drew none.
    boxes: np.ndarray | None = None

    def parts(self, size: int) -> list["Batch"]:
        """This training batch in parts of at most `size` images."""
        count = len(self.targets)
        if count <= size:
            return [self]
        ends = [(start, min(start + size, count)) for start in range(0, count, size)]
        return [
            Batch(
                self.images[start:end],
                self.targets[start:end],
                end - start,
                self.bad if start == 0 else [],
                self.piece.part(start, end),
                None if self.boxes is None else self.boxes[start:end],
            )
            for start, end in ends
        ]
