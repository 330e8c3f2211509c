"""`shards`: samples in tar files as WebDataset writes them, read by position, nearly in the order of the tars."""

import functools
import os
from collections.abc import Iterable, Sequence

import numpy as np

from configs.schema import Config
from datasets.index import FileStamp, changed_during_run, note_of_memory
from datasets.shuffle import GroupedShuffle
from datasets.sources.images import EncodedImages
from datasets.sources.labels import check_trained, numbered_classes
from datasets.sources.root import choose_parts, data_root, expected_layout, own_split
from datasets.sources.shards.folder import ShardFolder
from datasets.sources.shards.table import ShardTable, read_table
from datasets.sources.shards.tar import Tar
from datasets.transforms.decode import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError
from utils.text import counted

MAX_OPEN_TARS = 128  # of one process, whose limit for open files may be 256
CLASSES_FILE = "classes.txt"
EXPECTS = "train-000000.tar ... and val-000000.tar ..., or train/*.tar and val/*.tar"


class ShardImages(EncodedImages):
    """Images inside tars, each at an offset."""

    def __init__(
        self, folder: ShardFolder, table: ShardTable, classes: list[str], rules: PixelRules, shuffle_buffer: int
    ):
        super().__init__(table.labels, classes)
        self.folder, self.table, self.index = folder, table, table.index
        self.root = (folder.root / table.tar_name(0)).parent
        self.rules, self.shuffle_buffer = rules, shuffle_buffer

    def name(self, index: int) -> str:
        return _sample(self.folder, self.table, self.row(index))

    def key(self, index: int) -> str:
        return self.table.sample_name(self.row(index))

    def all_keys(self) -> Iterable[list[bytes]]:
        return self.table.names.chunks() if self.rows is None else super().all_keys()

    def stamp(self, index: int) -> str:
        row = self.row(index)
        tar = self.tar(self.table.tar_of(row))
        return f"{tar.path.name}\0{tar.size}\0{tar.mtime_ns}\0{self.table.offsets[row]}\0{self.table.sizes[row]}"

    def tar(self, number: int) -> FileStamp:
        """A tar of the table."""
        return _stamp(self.folder, self.table, number)

    def open_file(self, index: int) -> tuple[str, bytes]:
        row, table = self.row(index), self.table
        try:
            tar = _opened(self.folder, table, table.tar_of(row))
            data = tar.read(int(table.offsets[row]), int(table.sizes[row]))
        except OSError:
            _opened.cache_clear()  # a stale handle stays stale: the next attempt opens the tar again
            raise
        return os.path.splitext(table.sample_name(row))[1], data

    def epoch_order(self, seed: int, epoch: int) -> GroupedShuffle:
        """Shuffled tars, then samples shuffled within DATA.SHUFFLE_BUFFER: disks are slow at random access.

        Its groups are numbers of the table's tars.
        """
        starts = self.table.starts
        if self.rows is not None:
            assert (self.rows[1:] >= self.rows[:-1]).all(), "samples stay tar by tar"
            starts = np.searchsorted(self.rows, starts)
        return GroupedShuffle(starts, self.shuffle_buffer, seed, epoch)

    def will_read(self, seed: int, epoch: int, position: int) -> None:
        self.folder.will_read(self, seed, epoch, position)


@functools.lru_cache(MAX_OPEN_TARS)
def _opened(folder: ShardFolder, table: ShardTable, number: int) -> Tar:
    """An open tar. One that leaves the cache is closed when the last thread has finished reading from it."""
    stamp = _stamp(folder, table, number)
    tar = folder.open(stamp)
    if (tar.size, tar.mtime_ns) != stamp[1:]:
        raise changed_during_run(folder.shown(str(stamp.path)))
    return tar


def _stamp(folder: ShardFolder, table: ShardTable, number: int) -> FileStamp:
    size, date = int(table.tar_sizes[number]), int(table.tar_dates[number])
    return FileStamp(folder.root / table.tar_name(number), size, date)


def _sample(folder: ShardFolder, table: ShardTable, row: int) -> str:
    """The name of a sample in messages."""
    return folder.shown(f"{folder.root / table.tar_name(table.tar_of(row))}: {table.sample_name(row)}")


def read_shards(config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation shards, or all shards and None."""
    return read_from(ShardFolder(data_root(config.DATA, EXPECTS)), config)


def read_from(folder: ShardFolder, config: Config) -> tuple[ImageSet | None, ImageSet | None]:
    """As read_shards."""
    root, tars = folder.root, folder.find_tars()
    parts = choose_parts(tars)
    reads_train = parts.train and not (config.START.EVAL and parts.val)
    if not (reads_train or config.START.EVAL and parts.val):
        raise DataError(f"DATA.DATA_PATH: {root} has no training shards; {expected_layout(config.DATA, EXPECTS)}")
    tables, is_saved = [], True
    for part in [parts.train] * bool(reads_train) + [parts.val] * bool(parts.val):
        table, can_reopen = read_table(config, folder, part, tars[part])
        tables.append(table)
        is_saved &= can_reopen
    notes = [*folder.notes, *parts.notes(config, root, "*.tar"), *_cut_shards(config, folder, tables)]
    notes += [note for table in tables for note in note_of_memory(table.index, str(root))]
    if not is_saved:
        notes.append(
            f"the index of {root} cannot be saved there, so every start scans the tars; make {root} writable once"
        )
    classes = _classes(config, folder, tables)
    sets = [to_image_set(config, folder, table, classes) for table in tables]
    train = sets[0] if reads_train else None
    val = sets[-1] if parts.val else None
    if train is not None and val is not None:
        check_trained(train, val, "shards")
    for image_set in sets:
        image_set.notes = tuple(map(folder.shown, notes))
        image_set.labels_are_numbers = not (root / CLASSES_FILE).is_file()
        image_set.split = own_split(*(folder.shown(f"{root / str(part)}*.tar") for part in (parts.train, parts.val)))
    return train, val


def _cut_shards(config: Config, folder: ShardFolder, tables: Iterable[ShardTable]) -> list[str]:
    """Warnings about truncated shards."""
    cut = []
    for table in tables:
        for tar in table.cut.tolist():
            first, end = table.starts[tar : tar + 2].tolist()
            last_name = table.sample_name(end - 1) if end > first else "nothing"
            cut.append((f"{folder.root / table.tar_name(tar)} is truncated after {last_name}", end - first))
    if cut:
        more = f", as are {len(cut) - 1} more" if len(cut) > 1 else ""
        raise DataError(f"{cut[0][0]}{more}; restore it, or leave it out")
    return []


def _classes(config: Config, folder: ShardFolder, tables: Sequence[ShardTable]) -> list[str]:
    """The lines of classes.txt, or without it the numbers up to the highest label."""
    file = folder.root / CLASSES_FILE
    if not file.is_file():
        names = [functools.partial(_sample, folder, table) for table in tables]
        return numbered_classes(config, [table.labels for table in tables], names)
    classes = file.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n").split("\n")
    table = max(tables, key=lambda table: table.labels.max(initial=-1))
    highest = table.labels.max(initial=-1)
    if highest >= len(classes):
        tar = table.tar_name(table.tar_of(int(table.labels.argmax())))
        raise DataError(
            f"{folder.root / tar}: label {highest} (from 0), but {file} names {counted(len(classes), 'class')}; add the "
            "missing lines"
        )
    return classes


def to_image_set(config: Config, folder: ShardFolder, table: ShardTable, classes: list[str]) -> ShardImages:
    """The samples of a table."""
    if not len(table):
        more = f" and {len(table.tars) - 1} more" if len(table.tars) > 1 else ""
        raise DataError(
            f"{folder.root / table.tar_name(0)}{more}: no samples (images with labels); restore or remove the file"
        )
    return ShardImages(folder, table, classes, PixelRules.of(config.DATA), config.DATA.SHUFFLE_BUFFER)
