"""Read targets that are the name or the number of a class from lists, parquet files and tars."""

import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.index import TEXT, Distinct, Index, IndexBuilder, encoded
from datasets.sources.tar import Member, Tar
from datasets.targets.by_label import ByName, ByNumber, distinct
from datasets.targets.numbering import ByList
from datasets.targets.one_class import OneClass, count_classes
from utils.errors import DataError
from utils.text import counted

MAX_CLASSES = 1_000_000  # a label this high is a mistake, and a list of so many class names would fill the memory
USUAL_CLASSES = 1000  # up to this many classes, a set may have fewer images than classes, such as part of ImageNet
MAX_DIGITS = 18  # digits of the longest label that is read as a number; int() refuses thousands of digits
MAX_LABEL_BYTES = 1 << 20  # a larger .json file in a tar is not a label
ROWS_AT_ONCE = 1 << 16
USUAL_COLUMNS = ("image", "label")  # columns of image and label in parquet files on Hugging Face
NAME_COLUMNS = "name both columns with -opts DATA.COLUMNS=[IMAGES,CLASSES]"
REMEDY = "save the file as UTF-8, in Excel as 'CSV UTF-8'"


@dataclass(frozen=True)
class Labels:
    """The distinct labels of one list, as written, in order of first occurrence."""

    file: Path
    written: list[str]
    lines: np.ndarray  # the first line with each label
    counts: np.ndarray  # the number of images with each label

    @classmethod
    def of(cls, index: Index | IndexBuilder, part: int, file: Path) -> "Labels":
        """Return the labels of a list in an index of several lists."""
        written = [os.fsdecode(each) for chunk in index.text(f"{part}.label").chunks() for each in chunk]
        lines, counts = (index.column(f"{part}.label_{name}") for name in ("line", "count"))
        return cls(file, written, lines, counts)

    def where(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"


class Cells(NamedTuple):
    """Some rows of the columns of targets in a CSV file."""

    file: Path
    names: Sequence[str]  # of the columns
    columns: list[list[str]]  # the cells of each column
    lines: Sequence[int]  # the line number of each row
    separator: str  # between the columns of the file


class ParquetColumns(NamedTuple):
    """The columns of images, file names and targets, as dotted parquet paths."""

    image: str
    path: str | None  # the file name that is stored with an image
    labels: tuple[str, ...]
    are_names: bool = False  # whether labels are names of classes instead of numbers
    classes: tuple[str, ...] | None = None  # the names of the classes by number, if they are known


StoredTargets = tuple[np.ndarray, Callable[[int], str]]  # the labels of a part, and a function that names an image


class Targets(NamedTuple):
    """The targets of the images of a part, as a Table has them."""

    numbers: np.ndarray  # [N]
    classes: list[str]
    meaning: OneClass


class ListedLabels:
    """The labels of a list on their way into an index: the number of the label of each row, and the distinct labels."""

    def __init__(self, builder: IndexBuilder, part: int):
        self._builder, self._part, self._labels, self._of_rows = builder, part, Distinct(), array("I")
        self._pairs: set[int] = set()  # the distinct values of label << 32 | folder

    def add(self, labels: Sequence[str], lines: np.ndarray, folders: np.ndarray) -> None:
        """Add the next rows. `folders`: the number of the folder of each image."""
        self._of_rows.frombytes((numbers := self._labels.add(labels, lines)).tobytes())
        self._pairs.update(np.unique(numbers.astype(np.uint64) << np.uint64(32) | folders).tolist())

    def finish(self, folders: list[str]) -> None:
        """Add the distinct labels to the index. `folders`: the name of each folder."""
        self.of_rows = np.frombuffer(self._of_rows, np.uint32)
        self.of_folders = self._names_of(folders)
        self._builder.add(f"{self._part}.label", encoded(list(self._labels.numbers)))
        self._builder.add(f"{self._part}.label_line", np.array(self._labels.lines))
        self._builder.add(f"{self._part}.label_count", count_classes(self.of_rows))

    def _names_of(self, folders: list[str]) -> list[str]:
        """Return the folder of the images of each label, or [] unless each label has a folder of its own."""
        num_labels = len(self._labels.numbers)
        if len(self._pairs) != num_labels:
            return []
        names = [os.path.basename(folders[pair & 0xFFFFFFFF].rstrip("/")) for pair in sorted(self._pairs)]
        return names if len({*names}) == num_labels and not any(not name or name.isdecimal() for name in names) else []


class TarLabels:
    """The labels of the samples of a tar, read while its files are listed."""

    def __init__(self, tar: Tar):
        self._tar = tar
        self._labels: dict[str, int] = {}

    def add(self, key: str, ending: str, member: Member) -> None:
        """Read a file that is not an image. `key`: the name of its sample."""
        if not (ending == "cls" or ending == "json" and member.size <= MAX_LABEL_BYTES and key not in self._labels):
            return
        label = _label_in(self._tar.read(member.offset, min(member.size, MAX_LABEL_BYTES)), ending)
        if label is None:
            return
        if not isinstance(label, int) or not 0 <= label < MAX_CLASSES:
            raise DataError(
                f"{self._tar.title}: {member.name!r} contains {label!r}, which is not a class number (from 0)"
            )
        self._labels[key] = label

    def of_images(self, images: Mapping[str, Member], endings: Sequence[str]) -> np.ndarray:
        """Return the label of each sample with an image. `endings`: of images."""
        lacking = min(self._labels.keys() ^ images.keys(), default=None)
        if lacking is not None:
            lacks, missing = ("label", ".cls or .json") if lacking in images else ("image", " ".join(endings))
            raise DataError(
                f"{self._tar.title}: the sample {lacking!r} has no {lacks} ({missing}); complete or remove it"
            )
        return np.array([self._labels[key] for key in images], np.int64)


def _label_in(data: bytes, ending: str) -> int | str | None:
    """Return the text of a .cls file, as int if possible, or the label in {"label": 3} or {"cls": 3}, else None."""
    if ending == "cls":
        text = data.strip()[:MAX_DIGITS]
        return int(text) if text.isdigit() else text.decode(errors="replace")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    label = content.get("label", content.get("cls")) if isinstance(content, dict) else None
    return label if type(label) is int else None  # not isinstance, because True is an int too


class OneLabel:
    """Labels that are each the name or the number of a class.

    Sources call these methods without knowing the kind of targets. A class for another kind overrides them.
    """

    type = "<i4"  # of the column `label` in the index of parquet files and tars
    # The columns of targets in the index of lists.
    columns: Mapping[str, str] = {"target": "<i4", "label": TEXT, "label_line": "<u8", "label_count": "<u8"}
    listed: Callable = ListedLabels
    in_tar: Callable = TarLabels
    # What the index of CSV files, parquet files and tars depends on, and the end of the name of the index of tars.
    of_csv: Mapping[str, object] = {"are_bits": False}
    of_parquet: Mapping[str, object] = {}
    of_tars: Mapping[str, object] = {}
    suffix = ""
    # The end of the message about an empty cell; None: cells may be empty.
    if_empty: str | None = (
        ", or if images have several labels or none, name their separator: -opts DATA.LABEL_SEPARATOR='|'"
    )

    def __init__(self, config: Config, columns: Sequence[str] = (), allow_names: bool = True):
        self._config, self._allow_names = config, allow_names

    # --- lists and CSV files ---

    def check_header(self, file: Path, names: Sequence[str], used: Sequence[str]) -> None:
        """Raise DataError if a header with these names is ambiguous. `used`: the names of the columns that are read."""

    def from_cells(self, cells: Cells) -> Sequence[str] | np.ndarray:
        """Return the target of each row as `listed` takes them. Raise DataError for a wrong cell."""
        (labels,) = cells.columns
        if not "".join(labels).isprintable():
            for label, line in zip(labels, cells.lines, strict=True):
                if not is_utf8(label):
                    raise DataError(f"{cells.file}, line {line}: {cells.names[0]} {label!r} is not UTF-8; {REMEDY}")
        return labels

    def finish(self, builder: IndexBuilder, lists: Sequence[ListedLabels], files: Sequence[Path]) -> dict:
        """Add the targets of all lists to their index. Return facts for the index."""
        labels = [Labels.of(builder, part, file) for part, file in enumerate(files)]
        targets, _ = self.numbers(labels)
        for part, (of_labels, of_list) in enumerate(zip(targets, lists, strict=True)):
            for start in range(0, len(of_list.of_rows), ROWS_AT_ONCE):
                builder.add(f"{part}.target", of_labels[of_list.of_rows[start : start + ROWS_AT_ONCE]])
        return {"folder_names": lists[0].of_folders}

    def from_lists(self, index: Index, files: Sequence[Path]) -> list[Targets]:
        """Return the targets of each list."""
        labels = [Labels.of(index, part, file) for part, file in enumerate(files)]
        (numbers, *_), classes = self.numbers(labels)
        folder_names = dict(zip(numbers.tolist(), index.facts["folder_names"], strict=False))
        names = [folder_names.get(number, name) for number, name in enumerate(classes)] if folder_names else []
        meanings = self.meanings(labels, classes, names)
        return [Targets(index.column(f"{part}.target"), classes, meaning) for part, meaning in enumerate(meanings)]

    def _are_numbers(self, lists: Sequence[Labels]) -> bool:
        """Return whether more than half of the images have a numeric label.

        If so, other labels are typos, not names.
        """
        if not self._allow_names:
            return True
        numbers = sum(
            int(labels.counts[index])
            for labels in lists
            for index, label in enumerate(labels.written)
            if _is_number(label)
        )
        return 2 * numbers > sum(int(labels.counts.sum()) for labels in lists)

    def numbers(self, lists: Sequence[Labels]) -> tuple[list[np.ndarray], list[str]]:
        """Return the target number of each list's labels, and the classes. If there are two lists, the first is for
        training and must have all classes. Labels that are not numbers are class names, numbered in sorted order."""
        if self._are_numbers(lists):
            targets = [_numbered_targets(self._config, labels) for labels in lists]
            num_images = sum(int(each.counts.sum()) for each in lists)
            classes = numbered_classes(self._config, targets, [each.where for each in lists], num_images)
        else:
            names = {label: normalize("NFC", label) for labels in lists for label in labels.written}
            classes = sorted(set(names.values()))
            number = {name: index for index, name in enumerate(classes)}
            targets = [np.array([number[names[label]] for label in labels.written], np.int32) for labels in lists]
        return targets, classes

    def meanings(self, lists: Sequence[Labels], classes: list[str], folders: list[str]) -> list[OneClass]:
        """Return what the targets of each list mean. `folders`: for each class, the folder with all its images."""
        numbering = ByNumber(folders) if self._are_numbers(lists) else ByName()
        return [OneClass(numbering)] * len(lists)

    def describe(self, train: Table) -> tuple[str, ...]:
        """Return lines for the log about the targets of the first part."""
        return ()

    # --- parquet files and tars ---

    def find_in_parquet(
        self, file: Path, schema: Any, first: Any, images: tuple[str, str | None] | None
    ) -> ParquetColumns:
        """Return the columns of DATA.COLUMNS, or the columns that are usual on Hugging Face.

        `schema`, `first`: pyarrow's schemas of this and of the first file; `images`: the paths of bytes and names of
        images.
        """
        import pyarrow.types as types

        names = self._config.DATA.COLUMNS or USUAL_COLUMNS
        if missing := [name for name in names if schema.names.count(name) != 1]:
            columns = ", ".join(f"{field.name} {field.type}" for field in schema)
            raise DataError(f"{file}: column {missing[0]} is missing or repeated among {columns}; {NAME_COLUMNS}")
        image, label = (schema.field(name) for name in names)
        kind = _value_type(label.type)
        if not (types.is_integer(kind) or is_text(kind)) or images is None:
            raise DataError(
                f"{file}: {image.name} has the type {image.type} and {label.name} {label.type}; images are stored as "
                f"binary or as a struct with bytes, labels are whole numbers or names, so {NAME_COLUMNS}"
            )
        classes = None if is_text(kind) else _class_names(schema, label.name)
        return ParquetColumns(*images, (label.name,), is_text(kind), classes)

    def names_in_parquet(self, file: Path, columns: ParquetColumns, read: Callable) -> set[str]:
        """Return the class names in a file whose labels are names. `read`: read_columns in sources/parquet.py."""
        return {*_parquet_labels(file, columns, read).unique().to_pylist()} - {None}

    def from_parquet(self, file: Path, columns: ParquetColumns, num_rows: int, read: Callable) -> np.ndarray:
        """Return the labels of a file as int32."""
        import pyarrow
        import pyarrow.compute as compute

        labels = _parquet_labels(file, columns, read)
        if columns.are_names:
            labels = compute.index_in(labels, value_set=pyarrow.array(columns.classes, pyarrow.string()))
        numbers = np.asarray(labels)
        limit = MAX_CLASSES if columns.classes is None else len(columns.classes)
        if (wrong := (numbers < 0) | (numbers >= limit)).any():
            row = int(wrong.argmax())
            raise DataError(
                f"{file}, row {row}: {columns.labels[0]} is {numbers[row]}, which is not a class number from 0 to "
                f"{limit - 1:,}, as in {counted(int(wrong.sum()), 'row')} of {len(numbers):,}; test images of a "
                f"competition have negative labels: move such files elsewhere, or {NAME_COLUMNS}"
            )
        return numbers.astype(np.int32)

    def check_tars(self, is_on_server: bool) -> None:
        """Raise ConfigError if such targets cannot be read from these tars."""

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """Return the labels of images. `rows`: those of the column `label` of an index, [N, numbers per image]."""
        return rows.reshape(-1)

    def from_rows(
        self, parts: Sequence[StoredTargets], classes: Callable[[], Sequence[str] | None], numbering: ByList
    ) -> list[Targets]:
        """Return the targets of each part. `classes`: returns their names, or None if labels are numbers."""
        names = classes()
        if names is None:
            numbering = ByNumber()
            names = numbered_classes(self._config, *map(list, zip(*parts, strict=True)))
        return [Targets(labels, list(names), OneClass(numbering)) for labels, _ in parts]


def is_utf8(text: str) -> bool:
    """Return whether a text that was read with surrogateescape is UTF-8: it then has no surrogates for bytes."""
    return text.isprintable() or not any("\udc80" <= each <= "\udcff" for each in text)


def _is_number(label: str) -> bool:
    try:
        float(label)  # this also accepts nan, which pandas writes for missing numbers
    except ValueError:
        return False
    return True


def is_text(kind: Any) -> bool:
    """Return whether a pyarrow type is text."""
    return str(kind) in ("string", "large_string", "string_view")


def _value_type(kind: Any) -> Any:
    """Return the type of the values, even if they are stored as a dictionary of distinct values."""
    import pyarrow.types as types

    return kind.value_type if types.is_dictionary(kind) else kind


def _class_names(schema: Any, column: str) -> tuple[str, ...] | None:
    """Return the class names of a column if Hugging Face's metadata calls it a ClassLabel."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        return tuple(distinct(list(map(str, feature["names"])))) if feature["_type"] == "ClassLabel" else None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):  # missing or invalid metadata
        return None


def _parquet_labels(file: Path, columns: ParquetColumns, read: Callable) -> Any:
    """Return the labels of a file as integers or strings. Raise DataError if a label is missing."""
    import pyarrow

    column = read(file, columns.labels).column(0)
    if column.null_count:
        row = column.is_null().index(True).as_py()
        raise DataError(f"{file}, row {row}: {columns.labels[0]} is missing; remove the row, or give it a label")
    return column.cast(pyarrow.string() if columns.are_names else _value_type(column.type))


def _numbered_targets(config: Config, labels: Labels) -> np.ndarray:
    """Return the labels as class numbers."""
    targets = np.empty(len(labels.written), dtype=np.int32)
    num_classes = config.MODEL.NUM_CLASSES
    for index, written in enumerate(labels.written):
        whole, _, decimals = written.partition(".")
        label = written if decimals.strip("0") else whole  # 3.0 is 3
        is_number = label.isascii() and label.isdecimal() and len(label) <= MAX_DIGITS
        if not is_number or int(label) >= MAX_CLASSES:
            raise DataError(
                f"{labels.where(index)}: label {shortened(written)!r} is not a class number from 0 to "
                f"{MAX_CLASSES - 1:,}; correct it (in a CSV of class names, at most half the labels may be numbers)"
            )
        target = int(label)
        if num_classes is not None and target >= num_classes:
            raise DataError(
                f"{labels.where(index)}: label {target} needs at least {counted(target + 1, 'class')}, but "
                f"MODEL.NUM_CLASSES is {num_classes}; labels count from 0. Correct the label, or set -num_classes"
            )
        targets[index] = target
    return targets


def shortened(label: str) -> str:
    """Return a label for messages, cut after 40 characters."""
    return label if len(label) <= 40 else f"{label[:40]}... ({len(label):,} characters)"


def numbered_classes(
    config: Config, targets: list[np.ndarray], where: list[Callable[[int], str]], num_images: int | None = None
) -> list[str]:
    """Return the classes of numeric labels: all numbers up to the highest label.

    Raise DataError if there are far more classes than images, because a typo would make the model huge. `targets`: the
    labels of each part; `where`: for each part, a function that names an image or line; `num_images`: the number of
    images, if it differs from the number of targets.
    """
    counts, num_images = [count_classes(count) for count in targets], num_images or sum(map(len, targets))
    used = np.zeros(max(map(len, counts), default=0), bool)
    for count in counts:
        used[: len(count)] |= count > 0
    if config.MODEL.NUM_CLASSES is None and len(used) > max(USUAL_CLASSES, num_images, 2 * int(used.sum())):
        part = next(part for part, count in enumerate(counts) if len(count) == len(used))
        raise DataError(
            f"{where[part](int(targets[part].argmax()))}: label {len(used) - 1} means {counted(len(used), 'class')}, "
            f"but {counted(num_images, 'image')} use {int(used.sum()):,}; correct the label, or, if it is right, set "
            f"-num_classes {len(used)}"
        )
    return [str(number) for number in range(len(used))]
