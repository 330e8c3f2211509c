"""OneLabel: targets that are the name or the number of a class, as lists, parquet files and tars have them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.class_numbers import distinct
from datasets.image_set import Table
from datasets.sources.tar import Member, Tar
from datasets.targets.labels import (
    LABEL_ENDINGS,
    NAME_COLUMNS,
    REMEDY,
    USUAL_COLUMNS,
    EncodedTexts,
    Labels,
    ParquetColumns,
    RawLabels,
    RawSamples,
    Targets,
    Values,
    is_text,
    is_utf8,
    shortened,
)
from datasets.targets.one_class import OneClass, count_classes
from utils.errors import DataError
from utils.text import counted

MAX_CLASSES = 1_000_000  # a label this high is a mistake, and a list of so many class names would fill the memory
USUAL_CLASSES = 1000  # up to this many classes, a set may have fewer images than classes, such as part of ImageNet
MAX_DIGITS = 18  # digits of the longest label that is read as a number; int() refuses thousands of digits


class OneLabel(OneClass):
    """A class for each image, which its label names. Sources call the class methods, whatever the kind of targets."""

    stored: ClassVar[str] = "<i4"  # the type of labels in an index: numbers, or the numbers of distinct texts
    has_columns: ClassVar[bool] = False  # whether each output has a column or, in tars, a key of its own

    @classmethod
    def choose_columns(
        cls, config: Config, file: Path, schema: Any, first: Any, images: tuple[str, str | None] | None
    ) -> ParquetColumns:
        """Return the columns of a parquet file: those of DATA.COLUMNS, or the columns that are usual on Hugging Face.

        `schema`, `first`: pyarrow's schemas of this and of the first file; `images`: the paths of bytes and names of
        images.
        """
        import pyarrow.types as types

        names = config.DATA.COLUMNS or USUAL_COLUMNS
        if missing := [name for name in names if schema.names.count(name) != 1]:
            columns = ", ".join(f"{field.name} {field.type}" for field in schema)
            raise DataError(f"{file}: column {missing[0]} is missing or repeated among {columns}; {NAME_COLUMNS}")
        image_name, label_name = names
        image, label = schema.field(image_name), schema.field(label_name)
        kind = _value_type(label.type)
        if not (types.is_integer(kind) or is_text(kind)) or images is None:
            raise DataError(
                f"{file}: {image.name} has the type {image.type} and {label.name} {label.type}; images are stored as "
                f"binary or as a struct with bytes, labels are whole numbers or names, so {NAME_COLUMNS}"
            )
        classes = None if is_text(kind) else _class_names(schema, label.name)
        return ParquetColumns(*images, (label.name,), is_text(kind), classes)

    @classmethod
    def parse(cls, config: Config, raw: RawLabels) -> Values:
        """Return the labels of some rows of a table as an index stores them. Raise DataError for a wrong one."""
        (labels,) = raw.columns
        return _check_texts(raw, labels) if isinstance(labels, list) else _from_arrow(raw, labels)

    @classmethod
    def parse_tar(cls, raw: RawSamples) -> np.ndarray:
        """Return the labels of all samples of a tar that have an image. Raise DataError for a wrong or missing one."""
        labels = {}
        for ending in LABEL_ENDINGS:
            for sample, member in raw.files[ending].items():
                if sample not in labels and (label := _label_in(raw.tar, member, ending)) is not None:
                    labels[sample] = label
        lacking = min(labels.keys() ^ raw.images.keys(), default=None)
        if lacking is not None:
            has_image = lacking in raw.images
            problem = "label (.cls or .json)" if has_image else f"image ({' '.join(raw.endings)})"
            raise DataError(f"{raw.tar.title}: the sample {lacking!r} has no {problem}; complete or remove it")
        return np.array([labels[sample] for sample in raw.images], np.int64)

    @classmethod
    def of_labels(cls, config: Config, parts: Sequence[Labels]) -> list[Targets]:
        """Return the targets of each part. If there are two, the first is for training and must have all classes.

        Labels that are not numbers are class names, numbered in sorted order.
        """
        targets = [part.values.reshape(-1) for part in parts]
        if any(part.texts for part in parts):
            return _targets_of_texts(config, parts, targets)
        if parts[0].classes is not None:
            classes, meaning = list(parts[0].classes), OneLabel()
        else:
            classes = numbered_classes(config, targets, [part.where for part in parts])
            meaning = OneLabel(labels_are="numbers")
        return [Targets(numbers, classes, meaning) for numbers in targets]

    def describe(self, config: Config, images: Table) -> list[str]:
        """Return lines for the log about the targets of these images."""
        return []


# --- texts ---


def _check_texts(raw: RawLabels, labels: list[str]) -> list[str]:
    """Return these labels. Raise DataError if one is empty or not UTF-8."""
    if "" in labels:
        where = raw.where(labels.index(""))
        raise DataError(
            f"{where}: {raw.names[0]} is missing; fill it in or remove the row, or if images have several labels or "
            "none, name their separator: -opts DATA.LABEL_SEPARATOR='|'"
        )
    if not "".join(labels).isprintable():
        for index, label in enumerate(labels):
            if not is_utf8(label):
                raise DataError(f"{raw.where(index)}: {raw.names[0]} {label!r} is not UTF-8; {REMEDY}")
    return labels


def _targets_of_texts(config: Config, parts: Sequence[Labels], numbers: list[np.ndarray]) -> list[Targets]:
    """Return the targets of each part. `numbers`: the number of the text of each image."""
    counts = [count_classes(of_part, len(part.texts)) for part, of_part in zip(parts, numbers, strict=True)]
    if _are_numbers(parts, counts):
        lookups = [_class_numbers(config, part) for part in parts]
        classes = numbered_classes(config, lookups, [part.where for part in parts], sum(map(len, numbers)))
        folders = dict(zip(lookups[0].tolist(), parts[0].folders, strict=False))
        names = [folders.get(number, name) for number, name in enumerate(classes)] if folders else []
        meaning = OneLabel(labels_are="numbers", folders=names)
    else:
        classes = sorted({normalize("NFC", text) for part in parts for text in part.texts})
        number = {name: number for number, name in enumerate(classes)}
        lookups = [np.array([number[normalize("NFC", text)] for text in part.texts], np.int32) for part in parts]
        meaning = OneLabel(labels_are="names")
    targets = []
    for of_part, lookup in zip(numbers, lookups, strict=True):
        is_same = np.array_equal(lookup, np.arange(len(lookup)))  # then all processes share the targets of an index
        targets.append(of_part if is_same else lookup[of_part])
    return [Targets(of_part, classes, meaning) for of_part in targets]


def _are_numbers(parts: Sequence[Labels], counts: Sequence[np.ndarray]) -> bool:
    """Return whether more than half of the images have a numeric label. If so, other labels are typos, not names.

    `counts`: the number of images with each text.
    """
    if parts[0].texts_are:
        return parts[0].texts_are == "numbers"
    num_numbers = 0
    for part, of_texts in zip(parts, counts, strict=True):
        num_numbers += sum(count for text, count in zip(part.texts, of_texts.tolist(), strict=True) if _is_number(text))
    return 2 * num_numbers > sum(int(of_texts.sum()) for of_texts in counts)


def _is_number(label: str) -> bool:
    try:
        float(label)  # this also accepts nan, which pandas writes for missing numbers
    except ValueError:
        return False
    return True


def _class_numbers(config: Config, labels: Labels) -> np.ndarray:
    """Return the class number in each text."""
    targets = np.empty(len(labels.texts), dtype=np.int32)
    num_classes = config.MODEL.NUM_CLASSES
    for index, written in enumerate(labels.texts):
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


# --- parquet files ---


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


def _from_arrow(raw: RawLabels, column: Any) -> Values:
    """Return class names or class numbers. Raise DataError if a label is missing or not the number of a class."""
    if column.null_count:
        row = raw.where(column.is_null().index(True).as_py())
        raise DataError(f"{row}: {raw.names[0]} is missing; remove the row, or give it a label")
    kind = _value_type(column.type)
    if is_text(kind):
        import pyarrow
        import pyarrow.compute as compute  # takes 0.1 s

        texts = column.cast(pyarrow.string())
        distinct_texts = texts.unique()
        numbers = compute.index_in(texts, value_set=distinct_texts)
        return EncodedTexts(distinct_texts.to_pylist(), np.asarray(numbers))
    numbers = np.asarray(column.cast(kind))
    limit = MAX_CLASSES if raw.classes is None else len(raw.classes)
    if (wrong := (numbers < 0) | (numbers >= limit)).any():
        index = int(wrong.argmax())
        raise DataError(
            f"{raw.where(index)}: {raw.names[0]} is {numbers[index]}, which is not a class number from 0 to "
            f"{limit - 1:,}, as in {counted(int(wrong.sum()), 'row')} of {len(numbers):,}; test images of a "
            f"competition have negative labels: move such files elsewhere, or {NAME_COLUMNS}"
        )
    return numbers.astype(np.int32)


# --- tars ---


def _label_in(tar: Tar, member: Member, ending: str) -> int | None:
    """Return the number in a .cls file, or the label in {"label": 3} or {"cls": 3}, or None if there is none."""
    data = tar.read(member.offset, member.size)
    label = _number_in(data) if ending == "cls" else _label_in_json(data)
    if isinstance(label, str) or (label is not None and not 0 <= label < MAX_CLASSES):
        raise DataError(f"{tar.title}: {member.name!r} contains {label!r}, which is not a class number (from 0)")
    return label


def _number_in(data: bytes) -> int | str:
    text = data.strip()[:MAX_DIGITS]
    return int(text) if text.isdigit() else text.decode(errors="replace")


def _label_in_json(data: bytes) -> int | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    label = content.get("label", content.get("cls")) if isinstance(content, dict) else None
    return label if type(label) is int else None  # not isinstance, because True is an int too
