"""`parquet`: images with labels in row groups, as stored by Hugging Face. pyarrow reads one row group at a time."""

import contextlib
import functools
import os
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from configs.schema import Config, Data
from datasets.image_set import Rows, Table, chosen
from datasets.index import (
    TEXT,
    FileStamp,
    Index,
    IndexBuilder,
    RowHashes,
    changed_during_run,
    index_paths,
    open_or_build,
    stamps_of,
)
from datasets.pixels import Pixels
from datasets.sources.folder import subfolders
from datasets.sources.images import GroupedStorage
from datasets.sources.layout import (
    TRAIN_NAMES,
    VAL_NAMES,
    PartNames,
    choose_parts,
    data_root,
    expected_layout,
    own_split,
)
from datasets.targets.class_labels import OneLabel
from datasets.targets.kinds import kind_of
from datasets.targets.labels import (
    USUAL_COLUMNS,
    LabelWriter,
    ParquetColumns,
    RawLabels,
    Values,
    is_text,
    label_columns,
    stored_labels,
)
from utils.commands import pip
from utils.errors import DataError, needing, not_a_file
from utils.log import shown
from utils.text import counted, warning

ENDING = ".parquet"
EXPECTS = "train-00000-of-00002.parquet ... and validation-*.parquet, also in data/, or train/*.parquet"
# Names of files of a part: train-00000-of-00294.parquet, train.parquet, imagenet-train-0.parquet.
OF_PART = re.compile(rf"(?:.+[-_.])?({'|'.join((*TRAIN_NAMES, *VAL_NAMES))})(?:[-_.\d].*)?", re.IGNORECASE)
SAFE_VERSION = 15  # up to pyarrow 14.0.0, types in a file could be pickles (CVE-2023-47248)
DEPTH = 3  # levels of folders that are searched: data/, or default/train/
NUM_THREADS = 16  # threads, which mostly wait for the disk
INDEX_COLUMNS = {"name": TEXT, "group_file": "<i4", "group_number": "<i4", "group_rows": "<i8"}
INDEX_COLUMNS |= {"group_bytes": "<i8", "file_rows": "<i8"}
CACHE_BYTES = 192 << 20  # limit for the cached row groups of each process
WRITING_BYTES = 2 << 30  # the same limit while one process writes all images in another format
# Row groups that are cached even if they exceed CACHE_BYTES, because near the end of a group the current batch and the
# prefetched batches read from two groups.
MIN_GROUPS = 4
MAX_FOOTERS = 128  # the most footers that a process caches
T = TypeVar("T")


def pyarrow_parquet() -> ModuleType:
    """Return pyarrow's module for parquet files."""
    with needing("pyarrow", "DATA.DATASET: parquet"):
        import pyarrow
        import pyarrow.parquet
    if int(pyarrow.__version__.partition(".")[0]) < SAFE_VERSION:
        raise DataError(
            f"DATA.DATASET: pyarrow {pyarrow.__version__} may execute code from a file; {pip('install')} -U pyarrow"
        )
    return pyarrow.parquet


def read_parquet(config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return training and validation images, or all images and None."""
    pyarrow_parquet()
    root = data_root(config.DATA, EXPECTS, reads_files=True)
    files = {"train": [root]} if root.is_file() else find_files(root)
    parts = choose_parts(files)
    if not parts.train and len(files) == 1:  # a single part of any name: some of its images are held out
        parts = PartNames(next(iter(files)), None, [])
    train_files, val_files = (files[name] if name else [] for name in (parts.train, parts.val))
    if not parts.suffice(only_validation):
        raise DataError(f"DATA.DATA_PATH: {root} has no training files; {expected_layout(config.DATA, EXPECTS)}")
    kind = kind_of(config)
    made_of = {"files": stamps_of([*train_files, *val_files]), "columns": list(config.DATA.COLUMNS)}
    paths = index_paths(config, root / "parquet.index" if root.is_dir() else root.with_suffix(".index"))
    index = open_or_build(
        paths,
        INDEX_COLUMNS | label_columns(kind.stored),
        made_of | {"targets": kind.__name__, "version": 2},
        lambda builder: add_rows(builder, [*train_files, *val_files], config, kind),
    )
    num_train = int(index.column("file_rows")[: len(train_files)].sum())
    num_rows = int(index.column("file_rows").sum())
    parts_of_rows = (range(num_train), range(num_train, num_rows))
    for part_files, rows in zip((train_files, val_files), parts_of_rows, strict=True):
        if part_files and not rows:
            raise DataError(f"{part_files[0]}: the file has no rows; get it again, or remove it")
    storages = [ParquetStorage(config.DATA, index, rows) for rows in parts_of_rows if rows]
    facts = {"names": index.facts["labels"], "classes": index.facts["classes"], "texts_are": "names"}
    stored, rows = replace(stored_labels(index, root), **facts), index.rows("0.label", num_rows)
    labels = [
        replace(stored, values=rows[storage.first : storage.first + len(storage)], where=storage.name)
        for storage in storages
    ]
    targets = kind.of_labels(config, labels)
    notes = parts.notes(only_validation, root, f"*{ENDING}")
    titles = [str(root) if root.is_file() else f"{root / str(part)}*{ENDING}" for part in (parts.train, parts.val)]
    split = own_split(*titles)
    sets = [Table(storage, *of_part, split=split) for storage, of_part in zip(storages, targets, strict=True)]
    if num_train and not only_validation:
        notes = (*notes, *_warn_of_sorted_rows(sets[0], storages[0].reach))
    notes = (*notes, *sets[0].meaning.describe(config, sets[0]))
    sets = [replace(table, notes=notes) for table in sets]
    return (sets[0] if num_train else None), (sets[-1] if num_rows > num_train else None)


def find_files(root: Path) -> dict[str, list[Path]]:
    """Return the sorted files of each part: PART-00000-of-00002.parquet, also in folders, or PART/*.parquet.

    Each other file is a separate part.
    """
    files = defaultdict(list)
    for path in sorted(_files_below(root, DEPTH)):
        by_name = OF_PART.fullmatch(path.stem)
        is_in_part = path.parent != root and path.parent.name.lower() in (*TRAIN_NAMES, *VAL_NAMES)
        if is_in_part:
            part = path.parent.name
        else:
            part = by_name[1] if by_name else path.stem
        files[part].append(path)
    return files


def _files_below(folder: Path, depth: int) -> Iterable[Path]:
    yield from (path for path in folder.glob(f"*{ENDING}") if not path.name.startswith(".") and not path.is_dir())
    for name in subfolders(folder) if depth else ():
        yield from _files_below(folder / name, depth - 1)


def _warn_of_sorted_rows(train: Table, reach: int) -> list[str]:
    """Warn if the rows are sorted by class and an epoch mixes them badly, because it moves a row less than `reach`."""
    # In a random order of n equally large classes, only one row in n has the label of the previous row.
    is_sorted = np.count_nonzero(train.targets[1:] == train.targets[:-1]) > len(train) / 2
    if not is_sorted or reach >= len(train) or len(train.classes) <= 2:
        return []
    return [
        warning(
            f"the rows are sorted by class, and shuffling moves a row by at most {reach:,} places within "
            "its row group, so a batch has few classes; halfstep make-shards makes shards that are better mixed"
        )
    ]


# --- the columns ---


def choose_columns(file: Path, schema: Any, first: Any, config: Config, kind: type[OneLabel]) -> ParquetColumns:
    """Return the columns of a file. `schema`, `first`: pyarrow's schemas of this file and of the first one."""
    name = (config.DATA.COLUMNS or USUAL_COLUMNS)[0]
    images = bytes_and_path(schema.field(name)) if schema.names.count(name) == 1 else None
    return kind.choose_columns(config, file, schema, first, images)


def bytes_and_path(field: Any) -> tuple[str, str | None] | None:
    """Return the dotted paths of the bytes and of the file names in a column of images, or None for another column."""
    import pyarrow.types as types

    inside = {each.name: each.type for each in field.type} if types.is_struct(field.type) else {}
    content = inside.get("bytes") if inside else field.type
    if str(content) not in ("binary", "large_binary", "binary_view"):
        return None
    path = f"{field.name}.path" if is_text(inside.get("path")) else None
    return f"{field.name}.bytes" if inside else field.name, path


# --- the index: row groups, and the label and name of each row, read without the images ---


def add_rows(builder: IndexBuilder, files: Sequence[Path], config: Config, kind: type[OneLabel]) -> dict:
    """Add the rows of these files to the index. `kind`: of targets."""
    with ThreadPoolExecutor(NUM_THREADS, "parquet") as pool:

        def in_threads(task: Callable[[Path], T]) -> Iterator[T]:
            def explaining(file: Path) -> T:
                with explained(file, "the file cannot be read"):
                    return task(file)

            return pool.map(explaining, files)

        schemas = list(in_threads(lambda file: opened(file).schema_arrow))
        pairs = zip(files, schemas, strict=True)
        columns = _common_columns(
            files, [choose_columns(file, schema, schemas[0], config, kind) for file, schema in pairs]
        )
        hashes, writer = RowHashes(), LabelWriter(builder)
        parse = functools.partial(kind.parse, config)
        rows = shown(in_threads(lambda file: _read_rows(file, columns, parse)), "index", len(files), unit="files")
        for number, (groups, labels, names) in enumerate(rows):
            groups = np.array(groups, np.int64).reshape(-1, 3)
            writer.add(labels, range(len(names)))
            builder.add("name", names)
            hashes.add(names)
            builder.add("group_file", np.full(len(groups), number))
            for column, values in zip(("group_number", "group_rows", "group_bytes"), groups.T, strict=True):
                builder.add(column, values)
            builder.add("file_rows", [len(names)])
    writer.finish()
    in_order = np.sort(hashes.take())
    # Names are keys if each image has its own name. A row without a name has an empty name.
    has_keys = not (in_order[1:] == in_order[:-1]).any() and hash(b"") not in in_order
    facts = {"image": columns.image, "labels": columns.labels, "classes": columns.classes}
    return facts | {"has_keys": has_keys}


def _common_columns(files: Sequence[Path], columns_of_files: Sequence[ParquetColumns]) -> ParquetColumns:
    """Return the columns of all files, which must be the same."""
    first = columns_of_files[0]
    for file, columns in zip(files, columns_of_files, strict=True):
        if replace(columns, path=None) != replace(first, path=None):
            raise DataError(
                f"{file} and {files[0]} differ in the columns of images or labels, or in the class names, so they "
                "belong to different data sets; move one of them elsewhere"
            )
    return first if all(columns.path == first.path for columns in columns_of_files) else replace(first, path=None)


@contextlib.contextmanager
def explained(file: Path | str, problem: str) -> Iterator[None]:
    """Turn pyarrow's errors about the file into a DataError. An error of the file system stays an OSError."""
    import pyarrow

    try:
        yield
    # The last two errors come from names that are not text, and from columns without data.
    except (pyarrow.ArrowException, OSError, UnicodeError, StopIteration) as error:
        if getattr(error, "errno", None):
            raise
        raise DataError(f"{file}: {problem} ({error}); the file is damaged or incomplete; get it again") from error


def opened(file: Path | str, **options: Any) -> Any:
    """Open a pyarrow ParquetFile. Raise DataError if the file is not parquet, or OSError if the file system fails."""
    if kind := not_a_file(file):
        raise DataError(f"{file} is {kind}, not a parquet file; remove or rename it")
    with explained(file, "this is not a parquet file"):
        return pyarrow_parquet().ParquetFile(file, **options)


def read_columns(file: Path | str, columns: Sequence[str], group: int | None = None, **options: Any) -> Any:
    """Return a pyarrow table of these columns, from one or all row groups. Raise DataError if the file is damaged."""
    with opened(file, **options) as content, explained(file, f"{', '.join(columns)} cannot be read"):
        # Do not use pyarrow's threads, because they would not survive the fork of a loader process.
        read = content.read if group is None else functools.partial(content.read_row_group, group)
        return read(columns=list(columns), use_threads=False)


def _read_rows(
    file: Path, columns: ParquetColumns, parse: Callable[[RawLabels], Values]
) -> tuple[list[tuple[int, int, int]], Values, list[bytes]]:
    """Return a file's row groups, the labels of its rows, and its image names (all empty if any is missing)."""
    groups, names = row_groups(file, columns), []
    num_rows = sum(rows for _, rows, _ in groups)
    table = read_columns(file, columns.labels)
    raw_columns = [table.column(name) for name in columns.labels]
    raw = RawLabels(file, columns.labels, raw_columns, range(table.num_rows), row="row", classes=columns.classes)
    labels = parse(raw)
    if columns.path:
        texts = read_columns(file, [columns.path]).column(0).flatten()[0]
        names = [] if texts.null_count else [text.encode(errors="surrogateescape") for text in texts.to_pylist()]
    if not len(names or raw.rows) == len(raw.rows) == num_rows:
        raise DataError(f"{file}: its columns have different numbers of rows; the file is damaged; get it again")
    return groups, labels, names or [b""] * num_rows


def row_groups(file: Path, columns: ParquetColumns) -> list[tuple[int, int, int]]:
    """Return (number, rows, bytes of the images) of each row group that has rows, as the footer states them."""
    with opened(file) as content:
        metadata, groups = content.metadata, []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = {group.column(each).path_in_schema: each for each in range(group.num_columns)}
        place = chunks.get(columns.image, 0)
        chunk = group.column(place)
        if chunk.physical_type != metadata.schema.column(place).physical_type:  # pyarrow would crash the process
            raise DataError(
                f"{file}: the columns of row group {number} do not match the schema; the file is damaged; get it again"
            )
        if chunk.statistics is not None and chunk.statistics.null_count:
            first = sum(rows for _, rows, _ in groups)
            raise DataError(
                f"{file}: {counted(chunk.statistics.null_count, 'row')} from row {first} on have no image, or only the "
                "path of one; remove them, or write the file again with embedded images (in Hugging Face's library: "
                "map with embed_table_storage)"
            )
        if group.num_rows:
            groups.append((number, group.num_rows, chunk.total_uncompressed_size))
    return groups


# --- the images ---


class GroupCache:
    """A cache of the most recently used row groups. Threads that need the same group at the same time read it once."""

    def __init__(self):
        self._lock, self._process = threading.Lock(), os.getpid()
        self._groups: OrderedDict[Hashable, Future] = OrderedDict()

    def get(self, key: Hashable, limit: int, read: Callable[[], Any]) -> Any:
        """Return the cached value of this key, or the result of `read`. Keep the `limit` most recently used values."""
        if self._process != os.getpid():
            self.__init__()  # after a fork: a thread of the parent may hold the lock forever
        with self._lock:
            future = self._groups.get(key)
            if is_first := future is None:
                future = self._groups[key] = Future()
            self._groups.move_to_end(key)
            while len(self._groups) > limit:
                self._groups.popitem(last=False)
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:
                with self._lock:
                    self._groups.pop(key, None)  # the next call tries again
                future.set_exception(error)
        return future.result()


GROUPS = GroupCache()  # shared by all parts in this process


class ParquetStorage(GroupedStorage):
    """The images in the rows of parquet files."""

    is_read_in_groups = True

    def __init__(self, data: Data, index: Index, rows: range):
        """`rows`: the rows of this part in the index, all those of one or more files."""
        self.file_starts, group_starts = (
            np.concatenate([[0], np.cumsum(index.column(name), dtype=np.int64)]) for name in ("file_rows", "group_rows")
        )
        super().__init__(index, index.text("name"), group_starts, rows)
        self.column, self.has_keys = index.facts["image"], index.facts["has_keys"]
        self.files = [FileStamp(*each) for each in index.facts["made_of"]["files"]]
        self.groups = {name: index.column(f"group_{name}") for name in ("file", "number", "bytes")}
        self.num_bytes = max(int(self.groups["bytes"].sum()), 1)
        self.limit = max(CACHE_BYTES, MIN_GROUPS * int(self.groups["bytes"].max(initial=0)))
        self.reach = min(data.SHUFFLE_BUFFER, self._within(self.limit))

    def name(self, row: int) -> str:
        file, in_file = self._file_and_row(row)
        own = self.stored_name(row)
        return f"{file.path}, row {in_file}" + (f" ({own})" if own else "")

    def key(self, row: int) -> str:
        """Return the name that is stored with the image, or file and row if names are missing or repeated."""
        if self.has_keys:
            return super().key(row)
        file, in_file = self._file_and_row(row)
        return f"{os.path.basename(file.path)}: {in_file}"

    def naming(self, rows: Rows, count: int) -> Iterable[bytes | np.ndarray]:
        names = self.names.digest() if self.has_keys else str(self._names_and_sizes()).encode()
        return names, b"%d %d" % (self.first, count), *chosen(rows)

    def file_sizes(self, rows: Sequence[int]) -> list[int]:
        return [size for _, size in self._names_and_sizes()]

    def _names_and_sizes(self) -> list[tuple[str, int]]:
        return [(os.path.basename(file.path), file.size) for file in self.files]

    def _file_and_row(self, row: int) -> tuple[FileStamp, int]:
        """Return the file of an image, and its row in the file."""
        in_table = self.first + row
        file = int(np.searchsorted(self.file_starts, in_table, "right")) - 1
        return self.files[file], in_table - int(self.file_starts[file])

    def open_file(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        in_table, group = self.place(row)
        file, number = self.files[self.groups["file"][group]], int(self.groups["number"][group])
        num_kept = max(self.limit * len(self.groups["bytes"]) // self.num_bytes, MIN_GROUPS)
        images = GROUPS.get((file, number, self.column), num_kept, lambda: _read_group(file, number, self.column))
        place = in_table - int(self.group_starts[group])
        data = images[place].as_py() if place < len(images) else None
        if data is None:
            raise DataError(f"{self.name(row)}: there is no image; remove the row")
        return os.path.splitext(self.stored_name(row))[1], data

    def epoch_order(self, rows: Rows, count: int, seed: int, epoch: int) -> np.ndarray:
        return self.order_of_groups(rows, count, self.reach, seed, epoch)

    def order_to_write(self, rows: Rows, count: int, seed: int) -> np.ndarray:
        """Return an order in which images move farther than in training.

        Only one process reads, so it may cache up to WRITING_BYTES of row groups.
        """
        self.limit = max(self.limit, WRITING_BYTES)
        return self.order_of_groups(rows, count, self._within(self.limit), seed, 0)

    def _within(self, num_bytes: int) -> int:
        """Return how far an image may move while its row group is cached. Prefetching gets a quarter of the bytes."""
        mean = max(self.num_bytes // max(int(self.group_starts[-1]), 1), 1)
        return max(num_bytes * 3 // 4 // mean, 1)


def _read_group(file: FileStamp, number: int, column: str) -> Any:
    """Return a pyarrow array of the bytes of a row group's images."""
    if FileStamp.of(file.path) != file:
        raise changed_during_run(file.path)
    images = read_columns(file.path, [column], number, metadata=_footer(file)).column(0)
    images = images.flatten()[0] if "." in column else images
    return images.combine_chunks() if images.num_chunks != 1 else images.chunk(0)


@functools.lru_cache(MAX_FOOTERS)
def _footer(file: FileStamp) -> Any:
    """Return the cached footer of a file. Reading the footer of a large file takes milliseconds."""
    with opened(file.path) as content:
        return content.metadata
