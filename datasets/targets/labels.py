"""Labels between a source and the targets: as a table has them, and as an index stores them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import Config
from datasets.index import TEXT, Distinct, Index, IndexBuilder, encoded
from datasets.sources.tar import Member, Tar
from datasets.targets.one_class import OneClass

USUAL_COLUMNS = ("image", "label")  # columns of image and label in parquet files on Hugging Face
NAME_COLUMNS = "name both columns with -opts DATA.COLUMNS=[IMAGES,CLASSES]"
LABEL_ENDINGS = ("cls", "json")  # of files in a tar that may have the label of a sample
REMEDY = "save the file as UTF-8, in Excel as 'CSV UTF-8'"


@dataclass(frozen=True)
class RawLabels:
    """The labels of some rows of a table, as its file has them."""

    file: Path
    names: Sequence[str]  # of the columns of labels
    columns: Sequence[Any]  # for each of them, a list of texts (list files, CSV files) or a pyarrow array
    rows: Sequence[int]  # the number of each row in its file
    row: str = "line"  # the word for a row
    classes: Sequence[str] | None = None  # the names of the classes in the order of their numbers, if the file has them
    separator: str = ""  # between the columns of a CSV file

    def where(self, index: int) -> str:
        return f"{self.file}, {self.row} {self.rows[index]}"


@dataclass(frozen=True)
class RawSamples:
    """The samples of a tar, with the files that may have their labels."""

    tar: Tar
    images: Mapping[str, Member]  # the image of each sample, by the sample's name
    files: Mapping[str, Mapping[str, Member]]  # for each of LABEL_ENDINGS, the file of each sample with this ending
    endings: Sequence[str]  # of images
    names: Sequence[str]  # the keys of the labels in .json files


class EncodedTexts(NamedTuple):
    """Texts, each as the number of one of the distinct texts."""

    distinct: list[str]
    numbers: np.ndarray


Values = np.ndarray | Sequence[str] | EncodedTexts  # parsed labels of some rows: numbers [N] or [N, columns], or texts


@dataclass(frozen=True)
class Labels:
    """The labels of a part, as an index has them."""

    values: np.ndarray  # [N] or [N, columns]: numbers, or the number of the text of each image
    where: Callable[[int], str]  # names the row of a number, or the first row of a distinct text
    names: Sequence[str] = ()  # of the columns
    texts: Sequence[str] = ()  # distinct texts as written, in order of first occurrence; empty if labels are numbers
    texts_are: str = ""  # "names" or "numbers" if the source says what its texts are
    file: Path | None = None  # of the texts
    classes: Sequence[str] | None = None  # the names of the classes in the order of their numbers, if they are known
    folders: Sequence[str] = ()  # for each text, the folder with all its images; empty if there are no such folders


class Targets(NamedTuple):
    """The targets of the images of a part, as a Table has them."""

    numbers: np.ndarray  # [N]
    classes: list[str]
    meaning: OneClass


@dataclass(frozen=True)
class ParquetColumns:
    """The columns of images, file names and labels, as dotted parquet paths."""

    image: str
    path: str | None  # the file name that is stored with an image
    labels: tuple[str, ...]
    are_names: bool = False  # whether labels are names of classes instead of numbers
    classes: tuple[str, ...] | None = None  # the names of the classes by number, if they are known


def label_columns(stored: str, part: int = 0) -> dict[str, str]:
    """Return the columns of an index for the labels of a part, with their types. `stored`: OneLabel.stored."""
    columns = {"label": stored, "label_text": TEXT, "label_row": "<u8"}
    return {f"{part}.{name}": column for name, column in columns.items()}


class LabelWriter:
    """Adds the labels of a part of the data to an index: numbers as they are, texts as numbers of distinct texts."""

    def __init__(self, builder: IndexBuilder, part: int = 0):
        self._builder, self._part, self._texts = builder, part, Distinct()
        self._width = 1
        self._pairs: set[int] = set()  # the distinct values of text << 32 | folder

    def add(self, values: Values, rows: Sequence[int] | np.ndarray, folders: np.ndarray | None = None) -> None:
        """Add the next rows. `rows`: their numbers in their file; `folders`: the number of the folder of each image."""
        if isinstance(values, np.ndarray):
            self._width = values.size // max(len(values), 1)
            self._builder.add(f"{self._part}.label", values)
            return
        if isinstance(values, EncodedTexts):
            numbers = self._texts.add(values.distinct, np.zeros(len(values.distinct), np.uint64))[values.numbers]
        else:
            numbers = self._texts.add(values, rows)
        if folders is not None:
            self._pairs.update(np.unique(numbers.astype(np.uint64) << np.uint64(32) | folders).tolist())
        self._builder.add(f"{self._part}.label", numbers)

    def rows(self) -> np.ndarray:
        """Return the labels so far as integers [N, columns], so that one NaN equals another."""
        column = self._builder.column(f"{self._part}.label")
        return column.view(f"<i{column.itemsize}").reshape(-1, self._width)

    def finish(self) -> None:
        """Add the distinct texts."""
        if self._texts.numbers:
            self._builder.add(f"{self._part}.label_text", encoded([*self._texts.numbers]))
            self._builder.add(f"{self._part}.label_row", np.array(self._texts.lines))

    def folders(self, names: Sequence[str]) -> list[str]:
        """Return the folder of the images of each text, or [] unless each text has a folder of its own."""
        num_texts = len(self._texts.numbers)
        if len(self._pairs) != num_texts:
            return []
        own = [os.path.basename(names[pair & 0xFFFFFFFF].rstrip("/")) for pair in sorted(self._pairs)]
        return own if len({*own}) == num_texts and not any(not name or name.isdecimal() for name in own) else []


def stored_labels(index: Index, file: Path, part: int = 0) -> Labels:
    """Return the labels of the part in this file."""
    texts = [os.fsdecode(text) for chunk in index.text(f"{part}.label_text").chunks() for text in chunk]
    rows = index.column(f"{part}.label_row")
    return Labels(index.column(f"{part}.label"), lambda text: f"{file}, line {rows[text]}", texts=texts, file=file)


def label_names(config: Config) -> list[str]:
    """Return the names of the columns or keys of labels in parquet files and tars; * means all columns of numbers."""
    return list(config.DATA.COLUMNS[1:] or USUAL_COLUMNS[1:])


def is_utf8(text: str) -> bool:
    """Return whether a text that was read with surrogateescape is UTF-8: it then has no surrogates for bytes."""
    return text.isprintable() or not any("\udc80" <= character <= "\udcff" for character in text)


def shortened(label: str) -> str:
    """Return a label for messages, cut after 40 characters."""
    return label if len(label) <= 40 else f"{label[:40]}... ({len(label):,} characters)"


def is_text(kind: Any) -> bool:
    """Return whether a pyarrow type is text."""
    return str(kind) in ("string", "large_string", "string_view")
