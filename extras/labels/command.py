"""The two commands of scripts/labels.py: find doubtful labels, and list the images with the confirmed labels."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets.identity import ImageContents
from engine.record.saved_run import SavedRun
from extras.labels.copies import Copy, find_copies
from extras.labels.data import DataSet, config_of, read_predictions, refuse_other_data
from extras.labels.lists import LISTS, command_to_train, correct, write_lists
from extras.labels.ranking import Doubt, Predictions, find_doubts
from extras.labels.review import (
    MOST_SHEETS,
    PER_SHEET,
    TABLE,
    Row,
    check_unchanged,
    read_confirmed,
    refuse_confirmed,
    write_review,
)
from utils.errors import ConfigError
from utils.text import counted, first_of, one_line

NUM_CONFUSIONS = 10  # number of class pairs that the summary lists
NUM_LISTED = 20  # number of corrections that are printed


@dataclass(frozen=True)
class Source:
    """The finished runs whose predictions are read."""

    folder: Path  # of the run or the sweep
    runs: list[SavedRun]
    num_missing: int  # trials of the sweep that are not done
    folds: int | None = None
    data_path: Path | None = None  # where the data are now, if they were moved after the run

    def command(self, *words: str) -> str:
        words += ("-data_path", shlex.quote(str(self.data_path))) if self.data_path else ()
        return f"python scripts/labels.py {shlex.quote(str(self.folder))} {' '.join(words)}"


def find(source: Source, data_path: Path | None, output: Path | None, finds_copies: bool) -> None:
    """Write labels.csv and labels.png, and print a summary."""
    folder = output or source.folder / "labels"
    refuse_confirmed(folder / TABLE)
    config = config_of(source.runs[0], data_path)
    data, tables, folds = read_tables(source, data_path)
    judged = np.zeros(len(data), bool)
    for table in tables:
        judged[table.images] = True
    say_what_was_judged(source, data, judged)
    doubts = find_doubts(data.labels, tables, len(data.classes))
    copies: list[Copy] = []
    if finds_copies:
        contents = ImageContents(len(data), data.find)
        contents.read()
        copies = find_copies(contents.groups(), data, folds)
    rows = rows_of(doubts, copies, data)
    sheets = write_review(folder, rows, data)
    for line in summary(doubts, copies, data, finds_copies):
        print(line)
    if not rows:
        print(f"nothing to correct; {folder / TABLE} is empty")
        return
    if len(rows) > PER_SHEET * MOST_SHEETS:
        print(f"the sheets show the first {PER_SHEET * MOST_SHEETS:,} of {len(rows):,} images")
    print(f"look at {first_of([str(each) for each in sheets], limit=3)}")
    if not data.is_correctable:
        print(
            f"the labels of {config.DATA.DATASET} cannot be corrected with -apply; correct them where the data come from"
        )
        return
    print(f"write yes into the column confirmed of {folder / TABLE} where the suggestion is right, then:")
    print(f"  {source.command('-apply', shlex.quote(str(folder / TABLE)))}")


def read_tables(source: Source, data_path: Path | None) -> tuple[DataSet, list[Predictions], np.ndarray | None]:
    """Return the data, one table of predictions for each seed, and the fold of each image in a sweep (-1: unknown)."""
    first = data = folds = None
    by_seed: dict[int, list[Predictions]] = {}
    for run in sorted(source.runs, key=lambda run: str(run.settings["DATA.FOLD"])):
        config = config_of(run, data_path)
        if data is None or config.DATA.FOLD != data.config.DATA.FOLD:  # each fold splits the images differently
            data = DataSet.load(config)
            first = first or data
        refuse_other_data(run, data)
        table = read_predictions(run, data)
        by_seed.setdefault(run.settings["SEED"], []).append(table)
        if source.folds:
            folds = np.full(len(data), -1) if folds is None else folds
            folds[data.numbers[1]] = config.DATA.fold.number
    joined = [Predictions(*map(np.concatenate, zip(*tables, strict=True))) for tables in by_seed.values()]
    return first, joined, folds


def say_what_was_judged(source: Source, data: DataSet, judged: np.ndarray) -> None:
    number, rest = int(judged.sum()), int((~judged).sum())
    print(
        f"{source.folder}: predictions for {number:,} of {counted(len(data), 'image')} by {counted(len(source.runs), 'run')}"
    )
    if source.num_missing:
        print(
            f"{rest:,} images were not judged, because {counted(source.num_missing, 'trial')} of the sweep is not done; "
            f"continue it: python scripts/sweep.py -output {shlex.quote(str(source.folder))}"
        )
    elif not source.folds:
        line = f"{counted(len(data.train), 'training image')} were not judged, because the run was trained on them"
        if data.is_divided:
            settings = shlex.quote(str(source.folder / "config.yaml"))
            line += f"; a sweep judges all: python scripts/sweep.py -cfg {settings} -folds 5 -output sweeps/folds"
        print(line)
    counts = np.bincount(data.labels[judged], minlength=len(data.classes))
    if len(unjudged := np.flatnonzero(counts == 0)):
        names = first_of([data.classes[number] for number in unjudged.tolist()])
        print(f"warning: no image of these classes was judged, so their labels are not checked: {names}")


def rows_of(doubts: Sequence[Doubt], copies: Sequence[Copy], data: DataSet) -> list[Row]:
    """Return one row per image: doubtful labels first, then copies with other labels, then copies in training."""
    reasons: dict[int, list[str]] = {}
    for each in sorted(copies, key=lambda copy: not copy.has_other_label):
        reasons.setdefault(each.image, []).append(each.reason)
    rows = []
    for doubt in doubts:
        suggestion = data.classes[doubt.suggestion]
        reason = "; ".join([f"predicted {suggestion}", *reasons.pop(doubt.image, [])])
        rows.append(Row(doubt.image, suggestion, doubt.confidence, reason))
    return rows + [Row(image, "", None, "; ".join(each)) for image, each in reasons.items()]


def summary(doubts: Sequence[Doubt], copies: Sequence[Copy], data: DataSet, finds_copies: bool) -> list[str]:
    """Return the lines that summarize the findings."""
    lines = [f"doubtful labels: {len(doubts):,}"]
    pairs = Counter((data.label(each.image), data.classes[each.suggestion]) for each in doubts)
    lines += [
        f"  {one_line(label)} -> {one_line(other)}: {count:,}"
        for (label, other), count in pairs.most_common(NUM_CONFUSIONS)
    ]
    if finds_copies:
        others = sum(each.has_other_label for each in copies)
        lines.append(f"equal or nearly equal images with different labels: {others:,}")
        lines.append(f"copies of training images among the validation images: {len(copies) - others:,}")
    return lines


def apply(source: Source, data_path: Path | None, table: Path, output: Path | None) -> None:
    """Write lists of the images with the confirmed labels, and print the command that trains from them."""
    run = source.runs[0]
    data = DataSet.load(config_of(run, data_path))
    if not data.is_correctable:
        raise ConfigError(
            f"-apply: DATA.DATASET is {data.config.DATA.DATASET}; -apply can only list the images of class folders and "
            "CSV files (imagefolder, csv); correct the labels in the data from which this data set was made"
        )
    refuse_other_data(run, data)
    confirmed, record = read_confirmed(table, data.classes)
    changes = [row for row in confirmed if row.suggestion != row.label]
    if not changes:
        raise ConfigError(
            f"-apply: no row of {table} is confirmed with another class than its label; write yes into the column "
            "confirmed where the suggestion is right"
        )
    check_unchanged(changes, data.root, record)
    folder = output or table.parent / "corrected"
    lists = write_lists(folder, data, correct(data, changes))
    if source.folds:
        lists = replace(lists, SAVE=Config().SAVE)  # the runs of a sweep are in its folder
    for row in changes[:NUM_LISTED]:
        print(one_line(f"{row.name}: {row.label} -> {row.suggestion}"))
    if len(changes) > NUM_LISTED:
        print(f"... and {len(changes) - NUM_LISTED:,} more")
    print(
        f"{folder}: {' and '.join(LISTS)} list the training and validation images of {run.folder}, with "
        f"{counted(len(changes), 'corrected label')}; the data are unchanged"
    )
    print("train from the lists, then compare both runs with scripts/compare.py:")
    print(f"  {command_to_train(run.folder, data.config, lists)}")
