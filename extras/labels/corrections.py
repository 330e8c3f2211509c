"""Plans and makes confirmed corrections: moves a file to the folder of its class, or edits its label in a CSV file."""

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datasets.split.by_hash import without_mark
from extras.labels.csv_cells import CsvFile
from extras.labels.data import PARTS, DataSet, below, class_of_folder
from extras.labels.journal import Journal, file_digest, move, replace_content
from extras.labels.review import Confirmed, check_unchanged
from utils.errors import ConfigError, DataError
from utils.files import replacing, sync_folder
from utils.text import one_line


@dataclass(frozen=True)
class Correction:
    """A label to correct. `target`: the name that the file gets; unchanged if only a cell of a table changes."""

    number: int
    name: str
    target: str
    label: str
    suggestion: str

    def describe(self) -> str:
        if self.target == self.name:
            return one_line(f"{self.name}: {self.label} -> {self.suggestion}")
        return one_line(f"{self.name} -> {self.target}")


def plan_corrections(
    data: DataSet, confirmed: Sequence[Confirmed], record: Mapping[str, Any], journal: Journal
) -> list[Correction]:
    """Return the corrections that are still to be made. Raise an error if one of them is impossible."""
    if not data.is_correctable:
        raise ConfigError(
            f"-apply: DATA.DATASET is {data.config.DATA.DATASET}; -apply can only correct class folders and CSV "
            "files (imagefolder, csv); correct the labels in the data from which this data set was made"
        )
    number_of = {data.name(number): number for number in range(len(data))}
    names = _names_now(record, journal)
    left = [row for row in confirmed if _is_left(row, names, number_of, data)]
    check_unchanged(left, {row.name: data.root / names.get(row.name, row.name) for row in left}, record)
    numbers = [number_of[names.get(row.name, row.name)] for row in left]
    _refuse_empty_class(data, numbers, [row.suggestion for row in left])
    plan = _Targets(data) if data.is_listing else None
    return [
        Correction(
            number, data.name(number), plan.add(number, row) if plan else data.name(number), row.label, row.suggestion
        )
        for number, row in zip(numbers, left, strict=True)
    ]


def _names_now(record: Mapping[str, Any], journal: Journal) -> dict[str, str]:
    """Return {name when labels.csv was written: name now} for the files that were moved after that."""
    since = record.get("corrections", 0) + 1 if record.get("journal") == journal.id else 1
    return {origin.name: name for name, origin in journal.origins(since).items()}


def _is_left(row: Confirmed, names: Mapping[str, str], number_of: Mapping[str, int], data: DataSet) -> bool:
    """Return whether the image of a confirmed row still has the old label.

    Raise DataError if the image is missing, or if its label is neither the old nor the suggested one.
    """
    number = number_of.get(names.get(row.name, row.name))
    if number is None:
        raise DataError(
            f"-apply: {row.name} is no longer in {data.root}; find wrong labels again, or do not confirm this row"
        )
    if data.label(number) not in (row.label, row.suggestion):
        raise DataError(
            f"-apply: {row.name} was labelled {row.label} and is now {data.label(number)}; find wrong labels again, or do not "
            "confirm this row"
        )
    return data.label(number) != row.suggestion


def _refuse_empty_class(data: DataSet, numbers: Sequence[int], suggestions: Sequence[str]) -> None:
    """Raise DataError if a class would have no images left in a part. An empty class folder cannot be read."""
    labels, of_class = data.labels.copy(), {name: number for number, name in enumerate(data.classes)}
    labels[list(numbers)] = [of_class[name] for name in suggestions]
    parts = {"the data": slice(None)} if data.is_divided else dict(zip(PARTS, data.numbers, strict=True))
    for part, rows in parts.items():
        counts = (np.bincount(each[rows], minlength=len(data.classes)) for each in (data.labels, labels))
        before, after = counts
        for number in np.flatnonzero((before > 0) & (after == 0)).tolist():
            where = part if part == "the data" else f"the {part} images"
            raise DataError(
                f"-apply: class {data.classes[number]} would have no images left in {where}; leave one of its rows "
                "unconfirmed"
            )


class _Targets:
    """Chooses free names in the folders of the new classes."""

    def __init__(self, data: DataSet):
        self.data, self.taken = data, set()
        # {(whether the folder is in a separate validation part, class): folder name}
        self.folders: dict[tuple[bool, str], str] = {}
        for number, key in enumerate(data.keys):
            folder = key.partition("/")[0]
            self.folders.setdefault(
                (bool(data.is_held_out[number]) and not data.is_divided, class_of_folder(folder)), folder
            )

    def add(self, number: int, row: Confirmed) -> str:
        """Return the name that a file gets. Subfolders and the file name are kept if the name is free."""
        part, _ = self.data.find(number)
        is_own_part = part is self.data.val and not self.data.is_divided
        folder = self.folders.get((is_own_part, row.suggestion), row.suggestion)
        inside = self.data.keys[number].partition("/")[2]
        base = os.fsdecode(without_mark(os.fsencode(inside)))
        stem, ending = os.path.splitext(base)
        for count in itertools.count(1):
            # The split ignores .moved-N (datasets/split/by_hash.py), so the image stays in its part.
            name = base if count == 1 else f"{stem}.moved-{count}{ending}"
            target = os.path.normpath(os.path.join(below(part, self.data.root), folder, name))
            if target not in self.taken and not os.path.lexists(self.data.root / target):
                break
        self._check(self.data.root / self.data.name(number), self.data.root / target)
        self.taken.add(target)
        return target

    def _check(self, source: Path, target: Path) -> None:
        """Raise DataError if the file cannot be moved to this name."""
        place = next(each for each in target.parents if each.exists())
        if os.stat(place).st_dev != os.stat(source.parent).st_dev:
            raise DataError(f"-apply: {source} and {place} are on different file systems; move the file yourself")
        if source.is_symlink() and os.path.realpath(target.parent / os.readlink(source)) != os.path.realpath(source):
            raise DataError(f"-apply: {source} is a link that would break in {target.parent}; move it yourself")


def apply_corrections(data: DataSet, corrections: Sequence[Correction], journal: Journal) -> None:
    """Make the corrections. Each is written to the journal on disk before it is made."""
    if data.config.DATA.DATASET == "csv":
        edits = _edits(data, corrections)  # before the first line, because a file may be refused
        journal.write(apply=len(journal.starts) + 1)
        for edit in edits:
            edit.make(data.root, journal)
    else:
        journal.write(apply=len(journal.starts) + 1)
        for each in corrections:
            _make_folders(data.root, Path(each.target).parent, journal)
            number = journal.announce(move=[each.name, each.target], labels=[each.label, each.suggestion])
            try:
                move(data.root / each.name, data.root / each.target)
            except OSError:
                if os.path.lexists(data.root / each.name):
                    journal.write(skipped=number)
                raise
        for folder in {(data.root / name).parent for each in corrections for name in (each.name, each.target)}:
            sync_folder(folder)
    journal.write(applied=len(journal.starts))


def _make_folders(root: Path, folder: Path, journal: Journal) -> None:
    """Make the missing folders of a path, and announce each in the journal, so that -undo removes it."""
    for each in [*reversed(folder.parents), folder]:
        if not (root / each).is_dir():
            journal.announce(folder=str(each))
            (root / each).mkdir()


@dataclass(frozen=True)
class _Edit:
    """Changed labels in one CSV file."""

    file: str  # relative to the data folder
    before: bytes
    after: bytes
    rows: list[tuple[str, str, str]]  # name, label before and after

    def make(self, root: Path, journal: Journal) -> None:
        path = root / self.file
        number = len(journal.entries) + 1
        copy = path.with_name(f".{path.name}.before-labels-{number}")
        # -undo removes this copy, and temporary files that a kill left.
        journal.write(copy=os.path.relpath(copy, root), edit=self.file)
        with replacing(copy) as file:
            file.write(self.before)
        digest = file_digest(copy)
        if digest != file_digest(path):
            raise DataError(f"-apply: {path} was changed while -apply ran; repeat the command")
        after = hashlib.sha256(self.after).hexdigest()
        names = {"edit": self.file, "copy": os.path.relpath(copy, root)}
        journal.announce(**names, before=digest, after=after, rows=self.rows)
        replace_content(path, self.after)


def _edits(data: DataSet, corrections: Sequence[Correction]) -> list[_Edit]:
    """Return the changed content of each CSV file."""
    by_part: dict[bool, list[Correction]] = {}
    for each in corrections:
        by_part.setdefault(not data.is_divided and bool(data.is_held_out[each.number]), []).append(each)
    return [_edit(data, is_own_part, of_part) for is_own_part, of_part in by_part.items()]


def _edit(data: DataSet, is_own_part: bool, corrections: Sequence[Correction]) -> _Edit:
    path = Path(data.parts[is_own_part].split[PARTS[is_own_part]])
    numbers = np.arange(len(data)) if data.is_divided else data.numbers[is_own_part]
    table = CsvFile.read(path, data.config)
    if [os.path.normpath(each) for each in table.paths] != [data.keys[number] for number in numbers.tolist()]:
        raise DataError(f"-apply: {path} was changed while -apply ran; repeat the command")
    labels = data.labels[numbers]
    changes: dict[int, str] = {}
    for each in corrections:
        old, new = (data.classes.index(name) for name in (each.label, each.suggestion))
        written = next((table.labels[row] for row in np.flatnonzero(labels == new).tolist()), None)
        if written is None and not data.val.classes_are_names:
            raise DataError(
                f"-apply: {path} has no image of class {each.suggestion}, so the number of this class is unknown; "
                "correct the row yourself"
            )
        # A list can name an image in several lines.
        rows = [
            row for row in np.flatnonzero(labels == old).tolist() if data.keys[numbers[row]] == data.keys[each.number]
        ]
        changes |= dict.fromkeys(rows, each.suggestion if written is None else written)
    rows = [(each.name, each.label, each.suggestion) for each in corrections]
    return _Edit(os.path.relpath(path, data.root), table.content, table.with_labels(changes), rows)
