"""Writes train.csv and val.csv with the confirmed labels to a folder of their own. No file of the data changes."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from configs.schema import Config
from configs.values import flatten, to_text
from datasets.pixels.kinds import pixels_of
from datasets.sources.csv_list import USUAL, Columns, find_columns, read_cells
from datasets.sources.images import is_within, on_disk
from engine.labelling.data import PARTS, DataSet
from engine.labelling.review import Confirmed
from utils.commands import command
from utils.errors import ConfigError, DataError, cause_of
from utils.files import replacing, write_text
from utils.text import csv_text, first_of

LISTS, CLASSES = ("train.csv", "val.csv"), "classes.txt"
BY_FLAG = ("DATA.DATASET", "DATA.DATA_PATH")


def correct(data: DataSet, confirmed: Sequence[Confirmed]) -> np.ndarray:
    """Return int64 [N]: the class number of each image with the confirmed labels.

    Raise DataError if a confirmed image is missing or has another label now, or if a part would lose a class.
    """
    labels, rows, names = data.labels.copy(), {row.name: row for row in confirmed}, set()
    number_of = {name: number for number, name in enumerate(data.classes)}
    for number in range(len(data)):
        row = rows.get(data.name(number))
        if row and row.label == data.label(number):  # a list can name an image in several lines
            labels[number] = number_of[row.suggestion]
            names.add(row.name)
    if missing := [row for row in confirmed if row.name not in names]:
        raise DataError(
            f"-apply: {data.root} has no {missing[0].name} with the label {missing[0].label}; find wrong labels again, "
            "or do not confirm this row"
        )
    for part, numbers in zip(PARTS, data.numbers, strict=True):
        before, after = (np.bincount(each[numbers], minlength=len(data.classes)) for each in (data.labels, labels))
        if len(empty := np.flatnonzero((before > 0) & (after == 0))):
            raise DataError(
                f"-apply: class {data.classes[empty[0]]} would have no {part} images left; leave one of its rows "
                "unconfirmed"
            )
    return labels


def write_lists(folder: Path, data: DataSet, labels: np.ndarray) -> Config:
    """Write the lists, with the label of each image in `labels`, and return the settings that train from them.

    Raise DataError if a run would read other images, labels or classes from the lists.
    """
    for name in (*LISTS, CLASSES):
        if (folder / name).exists():
            raise ConfigError(f"-output: {folder / name} exists; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CLASSES, "".join(f"{name}\n" for name in data.classes))
        parts = (True, False) if len(data.val) else (False,)
        for is_val in parts:  # train.csv is last: without it, the folder is not a data set
            with replacing(folder / LISTS[is_val]) as file:
                file.write(csv_text(_rows(data, labels, is_val)).encode(errors="surrogateescape"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from None
    config = _config_of_lists(folder, data)
    try:
        _check(config, data, labels)
    except (ConfigError, DataError) as error:
        for name in (*LISTS, CLASSES):
            (folder / name).unlink(missing_ok=True)
        raise DataError(f"-apply: a CSV file cannot list these images: {error}") from error
    return config


def _rows(data: DataSet, labels: np.ndarray, is_val: bool) -> Iterator[list[str]]:
    """Yield the header and the rows of a list. The rows of a CSV file keep their other columns."""
    numbers = data.numbers[is_val].tolist()
    if data.config.DATA.DATASET != "csv":
        yield list(USUAL)
        for number in numbers:
            yield [data.name(number), data.classes[labels[number]]]
        return
    file = Path(data.parts[is_val].split[PARTS[is_val and not data.is_divided]])
    columns = Columns.of(data.config, [file])
    rows = read_cells(file, columns)
    header = next(rows)
    (place,) = find_columns(columns.of_labels, [name.strip() for name in header])
    yield header
    for number, row in zip(range(len(data)) if data.is_divided else numbers, rows, strict=True):
        if data.is_held_out[number] == is_val:
            yield [*row[:place], data.classes[labels[number]], *row[place + 1 :]]


def _config_of_lists(folder: Path, data: DataSet) -> Config:
    lists = os.path.abspath(folder)
    # If all images are trained on, their list is one file, which has no validation part.
    path = lists if len(data.val) else os.path.join(lists, LISTS[0])
    config = data.config.changed(
        "DATA",
        DATASET="csv",
        DATA_PATH=path,
        IMAGE_ROOT=os.path.abspath(data.root),
        CLASSES=os.path.join(lists, CLASSES),
        FOLD=None,
    )
    if pixels_of(config.DATA) != data.val.pixels:  # data sets with published results ignore EXIF
        return config.changed("DATA", EXIF="ignore")
    return config


def _check(config: Config, data: DataSet, labels: np.ndarray) -> None:
    """Raise DataError if a run would read other images, labels or classes from the lists, or could not read a link."""
    lists = DataSet.load(config)
    if lists.classes != data.classes:
        raise DataError(f"the classes would be {first_of(lists.classes)} instead of {first_of(data.classes)}")
    for part, numbers, listed in zip(PARTS, data.numbers, lists.numbers, strict=True):
        for number, other in zip(numbers.tolist(), listed.tolist(), strict=True):
            name = data.name(number)
            if lists.name(other) != name or lists.labels[other] != labels[number]:
                raise DataError(f"{name} would be read as {lists.name(other)}, {lists.label(other)} ({part})")
            path = on_disk(data.root, name)
            if os.path.islink(path) and not is_within(data.root, path):
                raise DataError(f"{path} is a link that leads out of {data.root}; copy the file into that folder")


def command_to_train(words: Sequence[str], before: Config, lists: Config) -> str:
    """Return the command that trains from the lists with other settings as in `before`, which `words` name."""
    old, new = flatten(before), flatten(lists)
    options = [f"{key}={to_text(new[key])}" for key in new if new[key] != old[key] and key not in BY_FLAG]
    words = [*words, "-dataset", "csv", "-data_path", lists.DATA.DATA_PATH]
    return command("train", *words, "-opts", *options)
