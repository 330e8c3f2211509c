"""Read the images that list files or CSV files name: build their index, and check the lists. Also `imagenet2012`."""

import codecs
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.index import (
    ENDING,
    TEXT,
    Distinct,
    Index,
    IndexBuilder,
    RowHashes,
    Texts,
    encoded,
    equal_rows,
    index_paths,
    open_or_build,
    stamps_of,
)
from datasets.sources.folder import read_split_folders
from datasets.sources.images import FileStorage, normal_paths, on_disk, stays_inside
from datasets.sources.layout import data_root, expected_layout, own_split, path_below_data
from datasets.targets.class_labels import OneLabel
from datasets.targets.labels import LabelWriter, Values, label_columns, stored_labels
from utils.errors import DataError, not_a_file
from utils.text import counted, first_of, warning

ROWS_AT_ONCE = 1 << 16  # rows of a list that are in memory at once
NUM_CHECKED = 10  # files of each list that are looked up at the start; looking up all of ImageNet would take minutes
NUM_NAMED = 10  # repeated or shared paths that the log names


class ListRows(NamedTuple):
    """Some lines of a list in their order: path as written, label, line number, value of DATA.GROUP_BY."""

    paths: list[str]
    labels: Values  # parsed
    lines: np.ndarray
    groups: list[str]  # empty without DATA.GROUP_BY


@dataclass(frozen=True)
class Lists:
    """List files of one kind. If there are two, the first is for training."""

    files: list[Path]
    read: Callable[[Path], Iterator[ListRows]]  # yields the rows of a file
    kind: type[OneLabel]  # the kind of targets
    label_names: Sequence[str] = ()  # the names of the label columns
    labels_are: str = ""  # "numbers" if labels must be class numbers
    settings: dict = field(default_factory=dict)  # everything else that the rows depend on, in plain values


@contextlib.contextmanager
def open_list(file: Path) -> Iterator[TextIO]:
    """Open a list in UTF-8 or UTF-16. Refuse anything but a regular file, without reading it."""
    if kind := not_a_file(file):
        raise DataError(f"{file} is {kind}, not a list of images; remove or rename it")
    with open(file, "rb") as content:
        is_utf16 = content.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        with open(file, encoding="utf-16" if is_utf16 else "utf-8-sig", errors="surrogateescape", newline="") as lines:
            yield lines
    except UnicodeError as error:
        raise DataError(f"{file}: this is not text ({error}); save it as UTF-8") from error


def to_tables(config: Config, lists: Lists, only_last: bool) -> list[Table]:
    """Return the images of each list, or of the last list only.

    Paths are relative to DATA.IMAGE_ROOT, or to the folder of the list if it is not set, and must not lead out of it.
    """
    beside, numbers = lists.files[0].with_name(f"{lists.files[0].name}{ENDING}"), range(len(lists.files))
    made_of = {"files": stamps_of(lists.files), "settings": lists.settings, "version": 5}
    columns = {f"{number}.{name}": TEXT for number in numbers for name in ("path", "group", "folder")}
    for number in numbers:
        columns |= label_columns(lists.kind.stored, number)
    index = open_or_build(index_paths(config, beside), columns, made_of, lambda builder: _build(lists, builder))
    facts = {"names": lists.label_names, "texts_are": lists.labels_are, "folders": index.facts["folder_names"]}
    labels = [replace(stored_labels(index, file, number), **facts) for number, file in enumerate(lists.files)]
    targets = lists.kind.of_labels(config, labels)
    tables = []
    for number in numbers[-1 if only_last else 0 :]:
        file, paths, groups = lists.files[number], index.text(f"{number}.path"), index.text(f"{number}.group")
        root = Path(config.DATA.image_root).expanduser() if config.DATA.image_root else file.parent
        _check_paths(index, file, number, root)
        files = FileStorage(root, paths, folder=path_below_data(config.DATA, root), index=index, confined=True)
        split = own_split(lists.files[0], lists.files[-1])
        tables.append(Table(files, *targets[number], split=split, groups=groups if len(groups) else None))
    notes = (*_notes(config, index, lists, only_last), *tables[0].meaning.describe(config, tables[0]))
    return [*tables[:-1], replace(tables[-1], notes=notes)]


def _build(lists: Lists, builder: IndexBuilder) -> dict:
    """Read the lists into an index, without holding their lines in memory. Return facts for the index."""
    hashes, writers = RowHashes(), [LabelWriter(builder, number) for number in range(len(lists.files))]
    folders = [Distinct() for _ in lists.files]
    for number, file in enumerate(lists.files):
        for rows in lists.read(file):
            if "\0" in "".join(rows.paths):
                line = next(line for path, line in zip(rows.paths, rows.lines, strict=True) if "\0" in path)
                raise DataError(f"{file}, line {line}: the path contains a zero byte; save the list again as UTF-8")
            paths = encoded(rows.paths)
            builder.add(f"{number}.path", paths)
            builder.add(f"{number}.group", encoded(rows.groups))
            places = folders[number].add([path[: path.rfind("/") + 1] for path in rows.paths], rows.lines)
            writers[number].add(rows.labels, rows.lines, places)
            hashes.add(normal_paths(paths))
            del paths, rows  # the next rows are read before these names get other values
        builder.add(f"{number}.folder", encoded(list(folders[number].numbers)))
        writers[number].finish()
    return {"folder_names": writers[0].folders(list(folders[0].numbers))} | _compare(builder, writers, hashes)


def _compare(builder: IndexBuilder, writers: list[LabelWriter], hashes: RowHashes) -> dict:
    """Return count and examples of repeated paths in each list, and of paths and groups that are in both lists."""
    texts = [builder.text(f"{number}.path") for number in range(len(writers))]
    num_first = len(texts[0])
    repeated, shared, num_different = [[] for _ in texts], [], [0 for _ in texts]

    def path_of(row: int) -> bytes:
        part, index = (1, row - num_first) if row >= num_first else (0, row)
        return normal_paths([texts[part][index]])[0]

    for rows in equal_rows(hashes.take(), path_of):
        parts = [[row for row in rows if row < num_first], [row - num_first for row in rows if row >= num_first]]
        for part, writer in enumerate(writers):
            repeated[part] += parts[part][1:]
            labels = writer.rows()[parts[part]]
            num_different[part] += int((labels != labels[:1]).any(1).sum())
        if parts[0]:
            shared += parts[1]
    groups = []
    if len(texts) == 2:
        first, second = (builder.text(f"{number}.group").chunks() for number in range(2))
        groups = sorted(map(os.fsdecode, {*_flat(first)} & {*_flat(second)}))
    return {
        "repeated": [_count_and_names(text, rows) for text, rows in zip(texts, repeated, strict=True)],
        "different": num_different,
        "shared": _count_and_names(texts[-1], shared),
        "shared_groups": {"count": len(groups), "first": groups[:NUM_NAMED]},
    }


_flat = itertools.chain.from_iterable


def _count_and_names(paths: Texts, rows: list[int]) -> dict:
    first = [os.fsdecode(path) for path in normal_paths([paths[row] for row in sorted(rows)[:NUM_NAMED]])]
    return {"count": len(rows), "first": first}


def _notes(config: Config, index: Index, lists: Lists, only_last: bool) -> Iterator[str]:
    """Yield lines for the log. Raise DataError if all validation images are also training images."""
    facts, train, val = index.facts, lists.files[0], lists.files[-1]
    for file, repeated, different in zip(lists.files, facts["repeated"], facts["different"], strict=True):
        if different:
            noun = config.task.noun
            yield warning(
                f"{file} gives images another {noun} than an earlier line does, on {counted(different, 'line')}; keep "
                f"only one {noun} for each image"
            )
        if repeated["count"]:
            names = first_of(repeated["first"], total=repeated["count"])
            yield warning(
                f"{file} repeats earlier paths on {counted(repeated['count'], 'line')} ({names}); a split keeps "
                "repeated images in the same part"
            )
    if only_last or len(lists.files) < 2:
        return
    if facts["shared"]["count"] and facts["shared"]["count"] == len(index.text("1.path")):
        raise DataError(
            f"{val}: all its images are also in {train}, so validation would score images that were trained "
            "on; list other images"
        )
    for key, what in (("shared", "image"), ("shared_groups", f"value of DATA.GROUP_BY {config.DATA.GROUP_BY}")):
        if count := facts[key]["count"]:
            yield warning(
                f"{val} and {train} have {counted(count, what)} in common "
                f"({first_of(facts[key]['first'], total=count)}); remove them from one of the two lists, because they "
                "distort the scores"
            )


def _check_paths(index: Index, file: Path, number: int, root: Path) -> None:
    """Raise DataError if a path leads out of the folder `root`, or if one of the first files does not exist."""
    paths = index.text(f"{number}.path")
    folders = (os.fsdecode(each) for chunk in index.text(f"{number}.folder").chunks() for each in chunk)
    if outside := next((folder for folder in folders if not stays_inside(root, folder)), None):
        raise DataError(
            f"{file}: paths in {outside!r} lead out of {root}; paths are relative to that folder and must not lead out "
            "of it, even through a link"
        )
    relative_to = "the folder of the list" if root == file.parent else "DATA.IMAGE_ROOT"
    for path in map(os.fsdecode, paths.chunk(0, min(NUM_CHECKED, len(paths)))):
        if not os.path.isfile(on_disk(root, path)):
            raise DataError(
                f"{file}: there is no file {root / path}; paths are relative to {relative_to}"
                + (" and have / between folders, even on Windows" if "\\" in path else "")
            )


# --- `imagenet2012`: PaddleViT's list files, or class folders ---


TRAIN_LIST, VAL_LIST = "train_list.txt", "val_list.txt"
EXPECTS = (
    f"{TRAIN_LIST} and {VAL_LIST} with a line 'relative/path label' per image, "
    "or train/ and val/ with a folder per class"
)


def read_imagenet(config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return training images (None if only validation is wanted) and validation images below DATA_PATH."""
    root = data_root(config.DATA, EXPECTS)
    train_file, val_file = root / TRAIN_LIST, root / VAL_LIST
    if not train_file.exists() and not val_file.exists():
        return read_split_folders(config, root, EXPECTS, only_validation)
    # Evaluation needs the training list only for its classes.
    files = [val_file] if only_validation and not train_file.is_file() else [train_file, val_file]
    for file in files:
        if not file.exists():
            raise DataError(f"DATA.DATA_PATH: {root} has no {file.name}; {expected_layout(config.DATA, EXPECTS)}")
        with open_list(file):
            pass  # refuses anything but a regular file
    lists = Lists(files, read_list_file, OneLabel, labels_are="numbers")
    tables = to_tables(config, lists, only_validation)
    return tables[0], tables[-1]


def read_list_file(file: Path) -> Iterator[ListRows]:
    """Yield lines 'relative/path label'. Names may contain spaces, so a line is split at its last white space."""
    with open_list(file) as lines:
        for start in itertools.count(1, ROWS_AT_ONCE):
            text = [line.strip() for line in itertools.islice(lines, ROWS_AT_ONCE)]
            if not text:
                return
            numbers = np.arange(start, start + len(text))
            if "" in text:
                numbers, text = numbers[[bool(line) for line in text]], list(filter(None, text))
            # Make one flat list, because a list for each line would trigger Python's garbage collector many times.
            parts = list(_flat(line.rsplit(maxsplit=1) for line in text))
            if len(parts) < 2 * len(text):
                place, line = next((place, line) for place, line in enumerate(text) if len(line.split(maxsplit=1)) < 2)
                raise DataError(
                    f"{file}, line {numbers[place]}: {line!r} has no label; each line must be 'relative/path label'"
                )
            yield ListRows(parts[0::2], parts[1::2], numbers, [])
