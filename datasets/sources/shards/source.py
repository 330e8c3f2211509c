"""`shards`: samples in tar files as WebDataset writes them, read by position, nearly in the order of the tars."""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from configs.schema import Config
from datasets.shuffle import GroupedShuffle
from datasets.sources.folder import subfolders
from datasets.sources.images import EncodedImages
from datasets.sources.labels import check_label_range
from datasets.sources.root import TRAIN_NAMES, VAL_NAMES, choose_parts, data_root, expected_layout
from datasets.sources.shards.index import Shard, read_shards_of
from datasets.sources.shards.tar import Tar
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import counted

MAX_OPEN_TARS = 128  # of one process, whose limit for open files may be 256
CLASSES_FILE = "classes.txt"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# train-000000.tar, train-00000-of-00002.tar, imagenet-train-0.tar
OF_PART = re.compile(rf"(?:.+[-_.])?({'|'.join((*TRAIN_NAMES, *VAL_NAMES))})[-_.\d]*(?:of[-_\d]+)?\.tar", re.IGNORECASE)
EXPECTS = "train-000000.tar ... and val-000000.tar ..., or train/*.tar and val/*.tar"


class TarStamp(NamedTuple):
    """Path, size and date of a tar when it was indexed."""

    path: Path
    size: int
    mtime_ns: int


class ShardFolder:
    """Where shards are: in a folder on a disk. One on a server overrides all of this, and keeps copies in `root`."""

    def __init__(self, root: Path):
        self.root = root

    def find_tars(self) -> dict[str, list[Path]]:
        """The sorted paths of the tars of each part."""
        return find_tars(self.root)

    def read(self, paths: Sequence[Path]) -> tuple[list[Shard], bool]:
        """As read_shards_of."""
        return read_shards_of(paths, str(self.root))

    def bring(self, tar: TarStamp) -> None:
        """See to it that the tar is at its path, because it is about to be opened."""

    def will_read(self, images: "ShardImages", seed: int, epoch: int, position: int) -> None:
        """As ImageSet.will_read."""

    def shown(self, text: str) -> str:
        """A message with the paths as the user knows them."""
        return text


class ShardImages(EncodedImages):
    """Images inside tars, each at `offset` with `size` bytes."""

    per_image = ("targets", "tar_numbers", "samples")
    folder = ShardFolder(Path())

    def __init__(
        self,
        tars: list[TarStamp],
        tar_numbers: np.ndarray,
        samples: np.ndarray,
        classes: list[str],
        rules: PixelRules,
        shuffle_buffer: int,
    ):
        """`tar_numbers` [N]: the tar of each sample; `samples` [N] as in Shard, tar by tar."""
        super().__init__(samples["label"], classes)
        self.tars, self.tar_numbers, self.samples = tars, tar_numbers, samples
        self.rules, self.shuffle_buffer = rules, shuffle_buffer

    @property
    def root(self) -> Path:
        return self.tars[0].path.parent

    def name(self, index: int) -> str:
        path = self.tars[self.tar_numbers[index]].path
        return self.folder.shown(f"{path}: {os.fsdecode(self.samples['name'][index])}")

    def key(self, index: int) -> str:
        return os.fsdecode(self.samples["name"][index])

    def stamp(self, index: int) -> str:
        tar = self.tars[self.tar_numbers[index]]
        offset, size = (self.samples[field][index] for field in ("offset", "size"))
        return f"{tar.path.name}\0{tar.size}\0{tar.mtime_ns}\0{offset}\0{size}"

    def open_file(self, index: int) -> tuple[str, bytes]:
        offset, size = (int(self.samples[field][index]) for field in ("offset", "size"))
        try:
            data = _opened(self.tars[self.tar_numbers[index]], self.folder).read(offset, size)
        except OSError:
            _opened.cache_clear()  # a stale handle stays stale: the next attempt opens the tar again
            raise
        return os.path.splitext(self.name(index))[1], data

    def epoch_order(self, seed: int, epoch: int) -> GroupedShuffle:
        """Shuffled tars, then samples shuffled within DATA.SHUFFLE_BUFFER: disks are slow at random access.

        Its groups are numbers of `tars`.
        """
        assert (self.tar_numbers[1:] >= self.tar_numbers[:-1]).all(), "samples lie tar by tar"
        starts = np.searchsorted(self.tar_numbers, np.arange(len(self.tars) + 1))
        return GroupedShuffle(starts, self.shuffle_buffer, seed, epoch)

    def will_read(self, seed: int, epoch: int, position: int) -> None:
        self.folder.will_read(self, seed, epoch, position)


@functools.lru_cache(MAX_OPEN_TARS)
def _opened(stamp: TarStamp, folder: ShardFolder) -> Tar:
    """An open tar. One that leaves the cache is closed when the last thread has finished reading from it."""
    folder.bring(stamp)
    tar = Tar(stamp.path)
    if (tar.size, tar.mtime_ns) != (stamp.size, stamp.mtime_ns):
        raise DataError(f"{stamp.path} was changed during this run; start again, with -resume to continue")
    return tar


def read_shards(config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation shards, or all shards and None."""
    return read_from(ShardFolder(data_root(config.DATA, EXPECTS)), config)


def read_from(folder: ShardFolder, config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """As read_shards."""
    root, tars = folder.root, folder.find_tars()
    parts = choose_parts(tars)
    val_tars = tars[parts.val] if parts.val else []
    train_tars = tars[parts.train] if parts.train and not (config.EVAL and val_tars) else []
    if not (train_tars or config.EVAL and val_tars):
        raise DataError(f"DATA.DATA_PATH: {root} has no training shards; {expected_layout(config.DATA, EXPECTS)}")
    shards, is_saved = folder.read([*train_tars, *val_tars])
    notes = [*parts.notes(config, root, "*.tar"), *_cut_shards(config, shards)]
    if not is_saved:
        notes.append(
            f"the index of {root} cannot be saved there, so every start scans the tars; make {root} writable once"
        )
    classes = _classes(config, root, shards)
    both = [shards[: len(train_tars)], shards[len(train_tars) :]]
    train, val = (to_image_set(config, part, classes) if part else None for part in both)
    if train is not None and val is not None:
        _check_trained(train, val)
    for image_set in (train, val):
        if image_set is not None:
            image_set.folder = folder
            image_set.notes = tuple(notes)
            image_set.labels_are_numbers = not (root / CLASSES_FILE).is_file()
            image_set.split = {
                "rule": "folders",
                "training": f"{root / str(parts.train)}*.tar",
                "validation": f"{root / str(parts.val)}*.tar",
            }
    return train, val


def find_tars(root: Path) -> dict[str, list[Path]]:
    """The sorted tars of each part: PART-000000.tar, also with a prefix, and PART/*.tar. Others are parts of their own."""
    tars = defaultdict(list)
    for path in sorted([*root.iterdir(), *(each for name in subfolders(root) for each in (root / name).iterdir())]):
        name = path.name.removesuffix(_compression(path))
        if path.name.startswith(".") or not name.lower().endswith(".tar"):
            continue
        key = part_of(path.relative_to(root).with_name(name))
        if not _compression(path):
            tars[key].append(path)
        elif key.lower() in (*TRAIN_NAMES, *VAL_NAMES) and not path.with_suffix("").exists():
            raise DataError(
                f"{path} is compressed, so it cannot be read by position; unpack it to {path.with_suffix('').name} "
                "(images hardly shrink)"
            )
    return tars


def part_of(tar: PurePath) -> str:
    """The part that a tar belongs to by its path below the root."""
    part = OF_PART.fullmatch(tar.name)
    return tar.parent.name or (part[1] if part else tar.stem)


def _compression(path: Path) -> str:
    return path.suffix if path.suffix in COMPRESSED else ""


def _cut_shards(config: Config, shards: Iterable[Shard]) -> list[str]:
    """Warnings about truncated shards, or DataError with DATA.CUT_SHARDS=refuse."""
    cut = [shard for shard in shards if shard.cut]
    if cut and config.DATA.CUT_SHARDS == "refuse":
        more = f", as are {len(cut) - 1} more" if len(cut) > 1 else ""
        raise DataError(
            f"{cut[0].path} is truncated after {cut[0].last_name}{more}; restore it, or set DATA.CUT_SHARDS=read to "
            "read its complete samples"
        )
    return [
        f"warning: {shard.path} is truncated after {shard.last_name}; complete samples that are read: {len(shard.samples):,}"
        for shard in cut
    ]


def _classes(config: Config, root: Path, shards: Sequence[Shard]) -> list[str]:
    """The lines of classes.txt, or without it the numbers up to the highest label."""
    file = root / CLASSES_FILE
    highest = max((int(shard.samples["label"].max()) for shard in shards if len(shard.samples)), default=-1)
    if not file.is_file():
        check_label_range(config, [shard.samples["label"] for shard in shards], [shard.name for shard in shards])
        return [str(number) for number in range(highest + 1)]
    classes = file.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n").split("\n")
    if highest >= len(classes):
        shard = next(shard for shard in shards if (shard.samples["label"] == highest).any())
        raise DataError(
            f"{shard.path}: label {highest} (from 0), but {file} names {counted(len(classes), 'class')}; add the missing lines"
        )
    return classes


def to_image_set(config: Config, shards: Sequence[Shard], classes: list[str]) -> ShardImages:
    """The samples of these shards in their order."""
    if not any(len(shard.samples) for shard in shards):
        more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
        raise DataError(f"{shards[0].path}{more}: no samples (images with labels); restore or remove the file")
    numbers = np.repeat(np.arange(len(shards), dtype=np.int32), [len(shard.samples) for shard in shards])
    samples = np.concatenate([shard.samples for shard in shards])
    tars = [TarStamp(shard.path, shard.size, shard.mtime_ns) for shard in shards]
    return ShardImages(tars, numbers, samples, classes, PixelRules.of(config.DATA), config.DATA.SHUFFLE_BUFFER)


def _check_trained(train: ShardImages, val: ShardImages) -> None:
    unknown = np.flatnonzero(~np.isin(val.targets, train.targets))
    if len(unknown):
        raise DataError(
            f"{val.name(unknown[0])}: class {val.classes[val.targets[unknown[0]]]} does not occur in the training "
            "shards, so it would never be trained; correct the label, or add training images"
        )
