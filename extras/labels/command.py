"""The three commands of scripts/labels.py: find doubtful labels, apply confirmed corrections, undo them."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.combinations import WITHOUT_FILES
from configs.schema import Config
from datasets.sources.root import folder_of_data
from engine.predict.pictures import describe_missing
from engine.record.saved_run import SavedRun
from extras.labels.alike import Copy, Pictures, find_copies, find_pairs
from extras.labels.corrections import apply_corrections, plan_corrections
from extras.labels.data import DataSet, config_of, origins_of, read_predictions
from extras.labels.journal import Journal, locked_journal, path_of_journal, undo_change
from extras.labels.ranking import Doubt, Predictions, find_doubts
from extras.labels.review import MOST_SHEETS, PER_SHEET, TABLE, Row, read_confirmed, refuse_confirmed, write_review
from utils.errors import ConfigError, DataError, cause_of
from utils.files import sync_folder
from utils.text import counted, first_of, one_line

NUM_CONFUSIONS = 10  # number of class pairs that the summary lists
NUM_MOVES = 20  # number of corrections that are printed


@dataclass(frozen=True)
class Source:
    """The finished runs whose predictions are read."""

    folder: Path  # of the run or the sweep
    runs: list[SavedRun]
    num_missing: int  # trials of the sweep that are not done
    train: str  # the command to train again
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
    journal = read_closed_journal(config, source)
    data, tables, folds = read_tables(source, data_path, journal)
    judged = np.zeros(len(data), bool)
    for table in tables:
        judged[table.images] = True
    say_what_was_judged(source, data, judged)
    doubts = find_doubts(data.labels, tables, len(data.classes))
    copies: list[Copy] = []
    if finds_copies:
        pictures = Pictures(len(data))
        pictures.read(data)
        copies = find_copies(find_pairs(pictures), data, folds)
    rows = rows_of(doubts, copies, data)
    sheets = write_review(folder, rows, data, journal)
    for line in summary(doubts, copies, data, finds_copies):
        print(line)
    if not rows:
        print(f"nothing to correct; {folder / TABLE} is empty")
        return
    if missing := describe_missing(data.classes):
        print(missing)
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


def read_closed_journal(config: Config, source: Source) -> Journal:
    """Return the journal of the data. Raise ConfigError if an -apply or -undo was interrupted."""
    journal = Journal.read(path_of_journal(config))
    if journal.is_open:
        raise ConfigError(
            f"{journal.path}: an -apply or -undo was interrupted; repeat -apply, or take all corrections back: "
            f"{source.command('-undo')}"
        )
    return journal


def read_tables(
    source: Source, data_path: Path | None, journal: Journal
) -> tuple[DataSet, list[Predictions], np.ndarray | None]:
    """Return the data, one table of predictions for each seed, and the fold of each image in a sweep (-1: unknown)."""
    first = data = folds = None
    by_seed: dict[int, list[Predictions]] = {}
    for run in sorted(source.runs, key=lambda run: str(run.settings["DATA.FOLD"])):
        config = config_of(run, data_path)
        if data is None or config.DATA.FOLD != data.config.DATA.FOLD:  # each fold splits the images differently
            data = DataSet.load(config)
            first = first or data
        table = read_predictions(run, data, origins_of(run, data, journal.states()))
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


def apply(source: Source, data_path: Path | None, table: Path, is_agreed: bool) -> None:
    """Correct the confirmed labels of a table."""
    config = config_of(source.runs[0], data_path)
    refuse_without_files(config, "-apply")
    with locked_journal(config, "-apply") as journal:
        journal.settle(folder_of_data(config.DATA))
        data = DataSet.load(config)
        confirmed, record = read_confirmed(table, data.classes)
        corrections = plan_corrections(data, confirmed, record, journal)
        if not corrections:
            print(
                f"{table}: nothing to correct; the labels of {counted(len(confirmed), 'confirmed row')} are already right"
            )
            if journal.is_open:
                journal.write(applied=len(journal.starts))
            return
        for each in corrections[:NUM_MOVES]:
            print(each.describe())
        print(
            f"{counted(len(corrections), 'label')} to correct"
            + (f", the first {NUM_MOVES} are listed above" * (len(corrections) > NUM_MOVES))
        )
        if not (is_agreed or agrees()):
            print("nothing was changed")
            return
        try:
            apply_corrections(data, corrections, journal)
        except OSError as error:
            raise DataError(
                f"-apply: {cause_of(error)} ({error.filename}); repeat the command, or take all corrections back with "
                f"{source.command('-undo')}"
            ) from error
    print(f"corrected {counted(len(corrections), 'label')}; to take them back: {source.command('-undo')}")
    print(f"train again, then compare both with scripts/compare.py: {source.train}")


def refuse_without_files(config: Config, flag: str) -> None:
    if config.DATA.DATASET in WITHOUT_FILES:
        raise ConfigError(
            f"{flag}: DATA.DATASET is {config.DATA.DATASET}, whose labels are not in files, so they cannot be corrected"
        )


def agrees() -> bool:
    """Ask on the terminal whether to apply. Raise ConfigError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "-apply: cannot ask without a terminal; check the corrections above, then repeat the command with -yes"
        )
    print("apply? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def undo(source: Source, data_path: Path | None) -> None:
    """Take back all corrections of the data set, the last one first."""
    config = config_of(source.runs[0], data_path)
    refuse_without_files(config, "-undo")
    root = folder_of_data(config.DATA)
    if not path_of_journal(config).exists():
        raise ConfigError(
            f"-undo: there is nothing to undo in {root}, because the journal {path_of_journal(config).name} does not exist"
        )
    problems, count = [], 0
    with locked_journal(config, "-undo") as journal:
        for number, entry in reversed(journal.in_effect()):
            try:
                problem = undo_change(root, entry)
            except OSError as error:
                problem = f"{error.filename}: {cause_of(error)}"
            if problem:
                problems.append(problem)
                continue
            journal.write(undone=number)
            count += len(entry.get("rows", ())) + ("move" in entry)
        if problems:
            raise DataError(
                f"-undo: {counted(len(problems), 'correction')} cannot be taken back ({first_of(problems, '; ', limit=3)}); "
                f"the others ({count:,}) were taken back. Fix this and repeat -undo, or give up undoing: delete {journal.path}"
            )
        for path in journal.leftovers(root):
            path.unlink(missing_ok=True)
        os.unlink(journal.path)
        sync_folder(journal.path.parent)
    print(f"took back {counted(count, 'correction')}; the labels in {root} are as they were before -apply")
