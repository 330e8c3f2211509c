"""`shards`: samples in WebDataset's tar files, read without unpacking, mostly one tar after another."""

import functools
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from configs.schema import Config
from datasets.class_numbers import classes_in
from datasets.image_set import Rows, Table, chosen
from datasets.index import (
    ENDING,
    TEXT,
    Index,
    IndexBuilder,
    changed_during_run,
    index_paths,
    open_index,
    open_or_build,
)
from datasets.pixels import Pixels
from datasets.pixels.decode import KNOWN_ENDINGS
from datasets.pixels.kinds import kind_of_pixels
from datasets.sources.folder import subfolders
from datasets.sources.images import GroupedStorage
from datasets.sources.layout import TRAIN_NAMES, VAL_NAMES, choose_parts, data_root, expected_layout, own_split
from datasets.sources.tar import Member, Tar
from datasets.targets.class_labels import OneLabel
from datasets.targets.kinds import kind_of
from datasets.targets.labels import LABEL_ENDINGS, Labels, RawSamples, label_names
from utils.errors import ConfigError, DataError
from utils.files import read_names
from utils.log import shown
from utils.text import counted

MADE_OF = {"shards": 3}  # the version of the content of the index
SAMPLES = {"label": "<i4", "offset": "<i8", "size": "<i8", "name": TEXT}  # the columns of all samples, tar by tar
TARS = {"tar": TEXT, "tar.size": "<i8", "tar.version": "<i8", "tar.checksum": TEXT, "tar.first": "<i8"}
MAX_LABEL_BYTES = 1 << 20  # a larger file has no label
NUM_PIECES, PIECE = 64, 8192  # number and size in bytes of the pieces that a tar's checksum covers, half a MiB in total
MAX_OPEN_TARS = 128  # in each process, whose limit for open files may be 256
NUM_THREADS = 16  # threads, which mostly wait for the disk
CLASSES_FILE = "classes.txt"
EXPECTS = "train-000000.tar ... and val-000000.tar ..., or train/*.tar and val/*.tar"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Names of tars of a part: train-000000.tar, train-00000-of-00002.tar, imagenet-train-0.tar.
OF_PART = re.compile(rf"(?:.+[-_.])?({'|'.join((*TRAIN_NAMES, *VAL_NAMES))})[-_.\d]*(?:of[-_\d]+)?\.tar", re.IGNORECASE)


class ShardTar(NamedTuple):
    """A tar of the set. It has changed if its size or version differs. On a disk, the version is the date."""

    name: str  # below the folder of the set
    size: int
    version: int


class Shard(NamedTuple):
    """The samples of one tar."""

    labels: np.ndarray  # [N], or [N, outputs]
    offsets: np.ndarray
    sizes: np.ndarray
    names: list[bytes]
    checksum: bytes


@dataclass(frozen=True, eq=False)
class ShardFolder:
    """A folder of shards on a disk."""

    root: Path  # of the indexes, and on a disk also of the tars
    title: str  # for messages
    tars: Mapping[str, Sequence[ShardTar]]  # the sorted tars of each part
    notes: tuple[str, ...]  # lines for the log
    num_scans = NUM_THREADS  # tars that are scanned at the same time

    def title_of(self, tar: ShardTar) -> str:
        """Return the name of a tar for messages."""
        return f"{self.title}/{tar.name}"

    def open(self, tar: ShardTar, checksum: bytes = b"") -> Tar:
        """Open the tar. `checksum`: the tar's checksum in the index, to verify a download."""
        opened = Tar(self.root / tar.name)
        if (opened.size, opened.mtime_ns) != tar[1:]:
            raise changed_during_run(opened.title)
        return opened

    def classes(self) -> str | None:
        """Return the content of classes.txt, if there is such a file."""
        file = self.root / CLASSES_FILE
        return read_names(file, "surrogateescape") if os.path.lexists(file) else None

    def older_indexes(self, paths: Sequence[Path]) -> Iterable[Index]:
        """Return indexes of earlier starts at these paths, which may be about other tars."""
        return filter(None, map(open_index, paths))

    def are_unchanged(self, table: "ShardTable", tars: Sequence[ShardTar]) -> bool:
        """Return whether the tars have the content that a table of tars with their names and sizes describes."""
        with ThreadPoolExecutor(NUM_THREADS, "shards") as pool:
            checksums = list(pool.map(lambda tar: checksum_of(self.open(tar)), tars))
        return checksums == [table.checksum(number) for number in range(len(tars))]

    def storage(self, table: "ShardTable", shuffle_buffer: int) -> "ShardStorage":
        return ShardStorage(self, table, shuffle_buffer)


def open_folder(root: Path) -> ShardFolder:
    """Return the folder with this path on a disk."""

    def describe(path: Path) -> ShardTar:
        stat = os.stat(path)
        return ShardTar(path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)

    paths = _find_tars(root)
    with ThreadPoolExecutor(NUM_THREADS, "shards") as pool:
        tars = {part: list(pool.map(describe, of_part)) for part, of_part in paths.items()}
    return ShardFolder(root, str(root), tars, ())


def _find_tars(root: Path) -> dict[str, list[Path]]:
    """Return {part: its sorted tars}. `part_of` decides to which part a tar belongs."""
    folders, tars = [root, *(root / name for name in subfolders(root))], defaultdict(list)
    for path in sorted(path for folder in folders for path in folder.iterdir()):
        # A compressed tar is refused when it is read, unless its unpacked tar is next to it.
        is_packed = path.suffix in COMPRESSED and not path.with_suffix("").exists()
        name = path.with_suffix("") if is_packed else path
        if name.suffix.lower() == ".tar" and not name.name.startswith("."):
            tars[part_of(name.relative_to(root).as_posix())].append(path)
    return tars


def part_of(name: str) -> str:
    """Return the part of a tar: its folder, PART in [PREFIX-]PART-000000.tar, or otherwise its whole name."""
    tar = PurePosixPath(name)
    part = OF_PART.fullmatch(tar.name)
    return tar.parent.name or (part[1] if part else tar.stem)


# --- the samples of a tar ---


def scan(
    tar: Tar,
    image_endings: tuple[str, ...] = KNOWN_ENDINGS,
    kind: type[OneLabel] = OneLabel,
    label_names: Sequence[str] = (),
) -> Shard:
    """Read the headers of a tar, and its labels. A sample's file names agree up to the first dot.

    `kind`: of the targets; `label_names`: the keys of its labels in .json files.
    """
    images: dict[str, Member] = {}
    files: dict[str, dict[str, Member]] = {ending: {} for ending in LABEL_ENDINGS}
    for member in tar.members():
        folder, slash, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        key, ending = folder + slash + stem, ending.lower()
        if not stem:  # a hidden file; macOS adds such files
            continue
        if f".{ending}" in image_endings:
            if key in images:
                raise DataError(
                    f"{tar.title}: the sample {key!r} has two images, {images[key].name!r} and {member.name!r}; "
                    "give each sample a different name"
                )
            images[key] = member
        elif ending in files and member.size <= MAX_LABEL_BYTES:
            files[ending][key] = member
    labels = kind.parse_tar(RawSamples(tar, images, files, image_endings, label_names))
    places = np.array([(member.offset, member.size) for member in images.values()], np.int64).reshape(-1, 2)
    names = [os.fsencode(member.name) for member in images.values()]
    return Shard(labels, *places.T, names, checksum_of(tar))


def pieces_of(size: int) -> np.ndarray:
    """Return int64 [pieces, 2]: start and stop of each piece of a tar that its checksum covers."""
    starts = np.linspace(0, max(size - PIECE, 0), NUM_PIECES, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + PIECE, size)], axis=1)


def checksum_of(tar: Tar) -> bytes:
    """Return a checksum of pieces from all over the tar, so that an index recognises a copy with another date."""
    pieces = [tar.read(start, stop - start) for start, stop in pieces_of(tar.size).tolist()]
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()


# --- the index of a part ---


class ShardTable:
    """All samples of some tars. A row is a sample, and the rows of a tar are consecutive."""

    def __init__(self, index: Index):
        self.index = index
        self.offsets, self.sizes = index.column("offset"), index.column("size")
        self.names, self.tar_names, self.checksums = (index.text(name) for name in ("name", "tar", "tar.checksum"))
        self.labels = index.rows("label", len(self.names))
        self.tar_sizes, self.tar_versions = index.column("tar.size"), index.column("tar.version")
        self.starts = index.column("tar.first")  # the first row of each tar, then the total number of rows

    def __len__(self) -> int:
        return len(self.names)

    def tar(self, number: int) -> ShardTar:
        name = os.fsdecode(self.tar_names[number])
        return ShardTar(name, int(self.tar_sizes[number]), int(self.tar_versions[number]))

    def checksum(self, number: int) -> bytes:
        return self.checksums[number]

    def is_of(self, tars: Sequence[ShardTar], has_versions: bool = True) -> bool:
        """Return whether this is the index of tars with these names, sizes and, if it `has_versions`, versions."""
        names, sizes, versions = zip(*tars, strict=True)
        return (
            self.tar_names.chunk(0, len(self.tar_names)) == list(map(os.fsencode, names))
            and np.array_equal(self.tar_sizes, sizes)
            and (not has_versions or np.array_equal(self.tar_versions, versions))
        )

    def shard(self, number: int) -> Shard:
        """Return the rows of one tar."""
        start, stop = self.starts[number : number + 2].tolist()
        numbers = (column[start:stop] for column in (self.labels, self.offsets, self.sizes))
        return Shard(*numbers, self.names.chunk(start, stop), self.checksum(number))


def add_shards(builder: IndexBuilder, shards: Iterable[tuple[ShardTar, Shard]]) -> None:
    """Add these tars and their samples to the index."""
    num_samples = 0
    for tar, shard in shards:
        for column, values in zip(SAMPLES, shard, strict=False):
            builder.add(column, values)
        of_tar = os.fsencode(tar.name), tar.size, tar.version, shard.checksum, num_samples
        for column, value in zip(TARS, of_tar, strict=True):
            builder.add(column, [value])
        num_samples += len(shard.labels)
    builder.add("tar.first", [num_samples])


def save_shards(path: Path, shards: Iterable[tuple[ShardTar, Shard]]) -> None:
    """Write the index of these tars to a file."""
    builder = IndexBuilder(SAMPLES | TARS)
    add_shards(builder, shards)
    builder.finish({"made_of": MADE_OF}).save(path)


def open_table(config: Config, folder: ShardFolder, part: str) -> ShardTable:
    """Return the samples of the tars of a part, from the index of an earlier start if the tars have not changed.

    The index of tars that were copied with other dates is used too. Otherwise, all tars are read.
    """
    kind, pixels, tars = kind_of(config), kind_of_pixels(config.DATA.PIXELS), folder.tars[part]
    names, endings, made_of = label_names(config), (*KNOWN_ENDINGS, *pixels.own_endings), MADE_OF
    if kind.has_columns:
        made_of = MADE_OF | {"targets": kind.__name__, "columns": names}
    # Indexes of these pixels have other samples, and indexes of numbers other labels.
    suffix = (f"-{pixels.name}" if pixels.own_endings else "") + ("-numbers" if kind.has_columns else "")
    paths = index_paths(config, folder.root / f"{part}{suffix}{ENDING}")

    def build(builder: IndexBuilder) -> dict:
        indexes = [index for index in folder.older_indexes(paths) if index.facts.get("made_of") == made_of]
        for known in map(ShardTable, indexes):
            if known.is_of(tars, has_versions=False) and folder.are_unchanged(known, tars):
                add_shards(builder, zip(tars, map(known.shard, range(len(tars))), strict=True))
                return {}
        with ThreadPoolExecutor(folder.num_scans, "shards") as pool:
            read = pool.map(lambda tar: scan(folder.open(tar), endings, kind, names), tars)
            shards = shown(read, f"index of {folder.title}", len(tars), unit="tars")
            add_shards(builder, zip(tars, shards, strict=True))
        return {}

    columns = SAMPLES | TARS | {"label": kind.stored}
    # Even a small index gets a file, because building it again would read all tars.
    index = open_or_build(paths, columns, made_of, build, lambda index: ShardTable(index).is_of(tars), keep_small=True)
    return ShardTable(index)


# --- the images ---


class ShardStorage(GroupedStorage):
    """Images inside tars, each at an offset."""

    def __init__(self, folder: ShardFolder, table: ShardTable, shuffle_buffer: int):
        super().__init__(table.index, table.names, table.starts, range(len(table)))
        self.folder, self.table = folder, table
        self.root, self.shuffle_buffer = (folder.root / table.tar(0).name).parent, shuffle_buffer

    def name(self, row: int) -> str:
        return f"{self.folder.title_of(self.table.tar(self.place(row)[1]))}: {self.key(row)}"

    def naming(self, rows: Rows, count: int) -> Iterable[bytes | np.ndarray]:
        return self.names.digest(), *chosen(rows)

    def file_sizes(self, rows: Sequence[int]) -> list[int]:
        return [int(self.table.sizes[row]) for row in rows]

    def stamp(self, row: int) -> str:
        _, number = self.place(row)
        tar = self.table.tar(number)
        place = PurePosixPath(tar.name).name, *tar[1:], self.table.offsets[row], self.table.sizes[row]
        return "\0".join(map(str, place))

    def open_file(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        _, number = self.place(row)
        try:
            data = self.read_file(row, number)
        except OSError:
            self.close_tar(number)  # a stale handle stays stale: the next attempt opens the tar again
            raise
        return os.path.splitext(self.key(row))[1], data

    def read_file(self, row: int, number: int) -> bytes:
        """Return the bytes of an image in tar `number`."""
        tar = _opened(self.folder, self.table.tar(number))
        return tar.read(int(self.table.offsets[row]), int(self.table.sizes[row]))

    def close_tar(self, number: int) -> None:
        """Close a tar that could not be read."""
        _opened.cache_clear()

    def epoch_order(self, rows: Rows, count: int, seed: int, epoch: int) -> np.ndarray:
        """Shuffle the tars, then samples within DATA.SHUFFLE_BUFFER, because disks are slow at random access."""
        return self.order_of_groups(rows, count, self.shuffle_buffer, seed, epoch)


@functools.lru_cache(MAX_OPEN_TARS)
def _opened(folder: ShardFolder, tar: ShardTar) -> Tar:
    """Return an open tar. A tar that leaves the cache is closed when the last thread has finished reading from it."""
    return folder.open(tar)


def read_shards(config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return training and validation shards, or all shards and None."""
    root = data_root(config.DATA, EXPECTS, reads_tars=True)
    check_keys(config, is_on_server=False)
    return read_from(open_folder(root), config, only_validation)


def read_from(folder: ShardFolder, config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return training and validation shards of this folder, or all shards and None."""
    kind, parts = kind_of(config), choose_parts(folder.tars)
    reads_train = parts.train and not (only_validation and parts.val)
    if not parts.suffice(only_validation):
        raise DataError(
            f"DATA.DATA_PATH: {folder.title} has no training shards; {expected_layout(config.DATA, EXPECTS)}"
        )
    names = [name for name, is_read in ((parts.train, reads_train), (parts.val, parts.val)) if is_read]
    tables = [open_table(config, folder, name) for name in names]
    notes = [*folder.notes, *parts.notes(only_validation, folder.title, "*.tar")]
    for table in tables:
        if not len(table):
            more = f" and {len(table.tar_names) - 1} more" if len(table.tar_names) > 1 else ""
            raise DataError(
                f"{folder.title_of(table.tar(0))}{more}: there are no samples (images with labels); restore or "
                "remove the file"
            )
    storages = [folder.storage(table, config.DATA.SHUFFLE_BUFFER) for table in tables]
    labels = [Labels(table.labels, storage.name) for table, storage in zip(tables, storages, strict=True)]
    facts = {"names": label_names(config)} if kind.has_columns else {"classes": _classes(folder, labels)}
    targets = kind.of_labels(config, [replace(part, **facts) for part in labels])
    split = own_split(*(f"{folder.title}/{part}*.tar" for part in (parts.train, parts.val)))
    sets = [Table(storage, *of_part, split=split) for storage, of_part in zip(storages, targets, strict=True)]
    notes += sets[0].meaning.describe(config, sets[0])
    sets = [replace(table, notes=tuple(notes)) for table in sets]
    return (sets[0] if reads_train else None), (sets[-1] if parts.val else None)


def check_keys(config: Config, is_on_server: bool) -> None:
    """Raise ConfigError if the values of keys in .json files are needed, but cannot be read from these tars."""
    if not kind_of(config).has_columns:
        return
    if is_on_server:
        raise ConfigError("DATA.DATA_PATH: numbers are not read from a server; copy the tars to this machine")
    if label_names(config) == ["*"]:
        raise ConfigError("DATA.COLUMNS: name the keys of the numbers in the .json files of the tars, in place of *")


def _classes(folder: ShardFolder, parts: Sequence[Labels]) -> list[str] | None:
    """Return the classes that classes.txt names, or None if there is no such file."""
    content = folder.classes()
    if content is None:
        return None
    classes = classes_in(content, f"{folder.title}/{CLASSES_FILE}")
    part = max(parts, key=lambda part: part.values.max())
    highest = part.values.max()
    if highest >= len(classes):
        where = part.where(int(part.values.argmax()))
        raise DataError(
            f"{where}: label {highest} is too high: {folder.title}/{CLASSES_FILE} names only "
            f"{counted(len(classes), 'class')}, counted from 0; add the missing lines"
        )
    return classes
