"""The types that the packages of datasets/ share: a set of images that are read one at a time, and a batch of them."""

import copy
import io
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from PIL import Image
from torch import Tensor

from datasets.order import Piece, shuffled
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError as ImageReadError  # other packages import it from here
from datasets.targets.one_class import OneClass

if TYPE_CHECKING:
    from datasets.index import Index


ALL = "all"  # the rule of a split if all images are trained on: both parts are the whole set


class ImageSet:
    """Images, each with a target. `targets[i]` is the number of the target of image i, usually the number of its class,
    and `classes[number]` the name of a class. `meaning` says what a target number means (datasets/targets/).
    """

    in_memory = False
    names_are_numbers = False  # the name of an image contains only its number
    # The set's own loader, used instead of reading images one by one (see SyntheticImages).
    makes_batches: Callable | None = None
    is_read_in_groups = False  # a process reads and caches groups of images; each loader process would read them again
    rows: np.ndarray | None = None  # the row of each image in the whole set, from which `take` selected; None: all rows
    index: "Index | None" = None  # the index with the columns of the set, if there is one
    # The folder of the set's files, if it is known. Then there is also a method `stamp(index)`, which returns the path
    # below `root`, size and date of an image's file, to detect changes.
    root: Path | None = None
    is_listing = False  # whether the set consists of the class folders below `root`, so that folders are labels
    notes: tuple[str, ...] = ()  # lines for the log; the notes of the validation set are about both sets
    meaning = OneClass()
    pixels = Pixels(num_channels=3)
    class_folders: Set[bytes] = frozenset()  # class folders that are left out of image names when a split hashes them
    folds: np.ndarray | None = None  # the fold of each image, if folds were drawn
    has_groups = False  # whether DATA.GROUP_BY names groups, each of which stays in one part
    copies: np.ndarray | None = None  # int64 [N], equal for copies of each other, if the set was searched for copies
    left_out: dict[str, int] = {}  # number of images of each class that the evaluated checkpoint does not know
    fingerprints: Any = None  # datasets.overlap.Fingerprints, while this set is compared with another set
    num_in_training: int | None = None  # the number of validation images that are also training images; None: unknown
    doubt = ""  # an error message if the folders do not look like classes; ignored if the classes are listed

    def __init__(self, targets: Sequence[int] | np.ndarray, classes: list[str]):
        self.targets = targets if isinstance(targets, np.ndarray) else np.array(targets, dtype=np.int64)
        self.classes = classes
        # The origin of both parts, in plain values that checkpoints save: the result of own_split in sources/__init__,
        # a record of a drawn split, or {"training": title} for a set without a validation part.
        self.split: dict = {}

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def trains_on_all(self) -> bool:
        """Return whether all images are training images: both parts of the split are the whole set."""
        return self.split.get("rule") == ALL

    @property
    def is_grouped(self) -> bool:
        """Return whether some images say less than others, because they are of one group or copies of each other."""
        return self.has_groups or self.copies is not None

    def read(self, index: int) -> np.ndarray:
        """Return the image [H, W, channels] with the type of `pixels`, or raise ImageReadError. Thread-safe."""
        raise NotImplementedError

    def kinds(self, index: int) -> Sequence[str]:
        """Return the unusual properties of the image's file, as -check prints them."""
        return ()

    def look_into(self, is_remote: bool) -> tuple[Pixels, list[str]]:
        """Look into a few files. Return their pixels, and a warning if these would lose most levels of the files."""
        return self.pixels, []

    def file(self, index: int) -> tuple[str, bytes]:
        """Return the image as a file: its extension and bytes. If there is no file, return a PNG of the pixels."""
        pixels, png = self.read(index), io.BytesIO()
        Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).save(png, "PNG")
        return ".png", png.getvalue()

    def epoch_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order of an epoch, with each image once. It depends only on seed and epoch."""
        return shuffled(len(self), seed, epoch)

    def order_to_write(self, seed: int) -> np.ndarray:
        """Return the order for writing the images in another format, mixed as widely as the set's format allows."""
        return shuffled(len(self), seed)

    def will_read(self, seed: int, epoch: int, position: int) -> None:
        """Prepare for training to read epoch_order(seed, epoch) from this position.

        Every training process (never a loader worker) calls this each time it hands the images of an update to its
        loader, before any of them is read. The first call may be in mid-epoch. A jump, forwards or back, means that
        updates were skipped or repeated, or that a short trial measured something. The call must return at once.
        """

    def name(self, index: int) -> str:
        """Return the name of this image for messages."""
        raise NotImplementedError

    def key(self, index: int) -> str:
        """Return this image's name in its data set. Its hash decides the split, so it must never change."""
        return self.name(index)

    def table_name(self, index: int) -> str:
        """Return this image's name in tables and pictures: for a file, its path below DATA.DATA_PATH."""
        return self.key(index)

    def all_keys(self) -> Iterable[list[bytes]]:
        """Yield the keys of all images as bytes, in chunks."""
        from datasets.index import CHUNK

        for start in range(0, len(self), CHUNK):
            numbers = range(start, min(start + CHUNK, len(self)))
            yield [self.key(index).encode(errors="surrogateescape") for index in numbers]

    def split_keys(self) -> Iterable[list[bytes]]:
        """Return the bytes whose hash decides whether each image is held out: by default the image's key."""
        return self.all_keys()

    def naming(self) -> Iterable[bytes | np.ndarray]:
        """Return content for a hash of the image names in their order. A copy of the data has the same hash."""
        if self.names_are_numbers and len(self):
            return (self.name(0).encode(), b"%d" % len(self), *self._chosen())
        return (b"\0".join(chunk) for chunk in self.all_keys())

    def _chosen(self) -> tuple[np.ndarray, ...]:
        """Return the rows of a part, which `naming` adds to the names of the whole set."""
        return () if self.rows is None else (np.ascontiguousarray(self.rows),)

    def file_sizes(self, indices: Sequence[int]) -> list[int]:
        """Return the file sizes of some images quickly (-1: the file is missing). Return [] if images are not files."""
        return []

    def with_facts(self, **facts: Any) -> Self:
        """Return a copy of the set with these attributes. Only overlap.py notes its findings in the set itself."""
        changed = copy.copy(self)
        changed.__dict__.update(facts)
        return changed

    def from_files(self) -> Self:
        """Return a copy of the set that reads its own files, not a cache."""
        changed = copy.copy(self)
        for name in ("read", "will_read", "is_read_in_groups"):
            changed.__dict__.pop(name, None)
        return changed

    def take(self, indices: np.ndarray) -> Self:
        """Return a set of only these images, with the same class numbers."""
        rows = indices.astype(np.uint32, copy=False) if self.rows is None else self.rows[indices]
        folds = None if self.folds is None else self.folds[indices]
        copies = None if self.copies is None else self.copies[indices]
        return self.with_facts(targets=self.targets[indices], rows=rows, folds=folds, copies=copies)

    def count_classes(self, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return int64 [classes]: the number of images with each class, among all or the chosen images."""
        return self.meaning.count(self.targets[chosen], len(self.classes))

    def num_classes_with_images(self) -> int:
        return int(np.count_nonzero(self.count_classes()))

    def with_any(self, classes: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether each image has one of these classes."""
        return self.meaning.with_any(self.targets, classes)

    def target_names(self) -> Sequence[str]:
        """Return the meaning of each target number: the name of its class, or the names of all its classes."""
        return self.meaning.names(self.classes)

    def row(self, index: int) -> int:
        """Return the row of an image in the columns of the whole set."""
        return index if self.rows is None else int(self.rows[index])


class SavedData(NamedTuple):
    """The data record of a checkpoint that is resumed or evaluated."""

    classes: list[str]  # in the order of their numbers
    split: dict  # ImageSet.split; empty if a weights file lacks it
    validation: dict = {}  # datasets.split.validation_facts of the validation images
    facts: dict = {}  # datasets.fingerprint.data_facts; empty in weights files that halfstep export writes
    file: Path | None = None  # the checkpoint; next to it, split.csv lists the part of each image


SettingValue = bool | int | float | str | Sequence | Mapping | None


class Settled(NamedTuple):
    """A setting that the images, an earlier run or the weights decide."""

    name: str  # such as DATA.RANGE
    value: SettingValue
    origin: str  # where the value comes from, in words


class PriorFacts(NamedTuple):
    """Facts that are known before the images are read: from the command line, the checkpoint and the weights."""

    saved: SavedData | None = None  # of the run that is resumed or evaluated
    began: Mapping[str, SettingValue] = {}  # the settings with which a resumed run began
    trained: Mapping[str, SettingValue] = {}  # the settings with which the weights were trained
    outputs: Sequence[str] = ()  # the names of the weights' outputs
    implied: Mapping[str, SettingValue] = {}  # the settings that follow from the weights on the command line
    origins: Mapping[str, str] = {}  # where each setting comes from
    typed: Set[str] = frozenset()  # settings on the command line


NO_PRIOR_FACTS = PriorFacts()


@dataclass(frozen=True)
class CacheProgress:
    """Callbacks for progress and cancellation, and whether to build a missing cache."""

    say: Callable[[str], None]
    warn: Callable[[str], None]
    signal: Callable[[], int] = lambda: 0  # returns the number of the signal that has arrived, or 0
    may_build: bool = True
    is_check: bool = False  # describe a missing cache instead of building it
    within: Callable[[], AbstractContextManager] = nullcontext  # around the work, for a row of -check


class Batch(NamedTuple):
    """One micro-batch of one process."""

    images: Tensor  # [B, C, H, W] of Pixels.dtype_in_batch, usually uint8, channels last in memory
    # int64 [B]; several labels: float32 [B, classes], 0 or 1; numbers: float32 [B, outputs]
    targets: Tensor
    num_samples: int  # B, or 0 for an image that does not count: it keeps the processes in step
    bad: list[int]  # unreadable images: replaced in training, omitted in evaluation
    piece: Piece | None = None  # None in batches that were made by hand; erasing and mixing depend on it
    # int64 [B, RANDOM_ERASE_COUNT, 6] on the host: the boxes to erase. None: not drawn yet.
    boxes: np.ndarray | None = None

    @property
    def indices(self) -> np.ndarray:
        """Return the indices of the images of an evaluation."""
        return self.piece.indices[~np.isin(self.piece.indices, self.bad)][: self.num_samples]

    def parts(self, size: int) -> list["Batch"]:
        """Return this training batch in parts of at most `size` images."""
        count = len(self.targets)
        if count <= size:
            return [self]
        parts = []
        for start in range(0, count, size):
            end, bad = min(start + size, count), self.bad if start == 0 else []
            images, targets = self.images[start:end], self.targets[start:end]
            boxes = None if self.boxes is None else self.boxes[start:end]
            parts.append(Batch(images, targets, end - start, bad, self.piece.part(start, end), boxes))
        return parts


class Mixed(NamedTuple):
    """The targets of images that are each mixed from two images."""

    first: Tensor  # the targets of the images themselves, as in Batch
    second: Tensor  # the targets of their partners
    share: Tensor  # float32 [B], the weight of `first` in [0, 1]
