"""The two commands of scripts/labels.py: find doubtful labels, and list the images with the confirmed labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from configs.schema import Config
from configs.tables import import_named
from datasets.identity import ImageContents
from engine.features.doubts import FEWEST_JUDGED, Doubts, judge_labels
from engine.features.saved import features_by_name
from engine.predict.classifier import Classifier
from engine.record.saved_run import SavedRun
from engine.tasks import find_task
from scripts.labelling.copies import Copy, find_copies
from scripts.labelling.data import (
    DataSet,
    Predictions,
    config_of,
    probabilities_of,
    read_predictions,
    refuse_other_data,
    refuse_several_classes,
)
from scripts.labelling.lists import LISTS, command_to_train, correct, write_lists
from scripts.labelling.review import (
    MOST_SHEETS,
    PER_SHEET,
    TABLE,
    Row,
    check_unchanged,
    read_confirmed,
    refuse_confirmed,
    write_review,
)
from utils.commands import as_typed, command
from utils.errors import ConfigError
from utils.text import counted, first_of, one_line, warning

NUM_CONFUSIONS = 10  # number of class pairs that the summary lists
NUM_LISTED = 20  # number of corrections that are printed
DATASET = "imagefolder"  # the data set that is read with weights, without -dataset
WORTH_READING = 0.25  # share of wrong labels that a list should have


@dataclass(frozen=True)
class Source:
    """What labels are judged with: predictions and features of finished runs, or features of any weights."""

    folder: Path  # the folder of the run or the sweep; for weights, the current folder
    runs: list[SavedRun]
    num_missing: int  # trials of the sweep that are not done
    folds: int | None = None
    data_path: Path | None = None  # the data to judge with weights; for runs, the new place of moved data
    weights: Classifier | None = None
    flags: tuple[str, ...] = ()  # settings given with the weights
    device: str = "auto"

    @property
    def config(self) -> Config:
        return self.weights.config if self.weights else config_of(self.runs[0], self.data_path)

    @property
    def name(self) -> str:
        return self.weights.source if self.weights else str(self.folder)

    def command(self, *words: str) -> str:
        words = (*words, *(["-data_path", str(self.data_path)] if self.data_path else []), *self.flags)
        if self.weights:
            words = (*words, "-dataset", self.config.DATA.DATASET)
        return command("scripts/labels.py", self.name, *words)


def find(source: Source, output: Path | None, finds_copies: bool) -> None:
    """Write labels.csv and labels.png, and print a summary."""
    folder = output or source.folder / "labels"
    refuse_confirmed(folder / TABLE)
    import_named("scripts.labelling", find_task(source.config).labelling)(source, folder, finds_copies)


def find_labels(source: Source, folder: Path, finds_copies: bool) -> None:
    """Find doubtful labels of images with one class."""
    data, doubts, folds = (judge_by_weights if source.weights else judge_by_runs)(source)
    copies = read_copies(data, folds) if finds_copies else []
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
            f"the labels of {data.config.DATA.DATASET} cannot be corrected with -apply; correct them where the data come from"
        )
        return
    print(f"write yes into the column confirmed of {folder / TABLE} where the suggestion is right, then:")
    print(f"  {source.command('-apply', str(folder / TABLE))}")


def read_copies(data: DataSet, folds: np.ndarray | None = None) -> list[Copy]:
    """Read all images, and return the copies among them."""
    contents = ImageContents(len(data), data.find)
    contents.read()
    return find_copies(contents.groups(), data, folds)


def judge_by_weights(source: Source) -> tuple[DataSet, Doubts, None]:
    """Judge all labels of a data set by the features of weights."""
    refuse_several_classes(source.data_path, source.config)
    data = DataSet.load(source.config)
    features = features_by_weights(source, data)
    doubts = judge_labels(data.labels, len(data.classes), features)
    print(f"{source.name}: features of {np.isfinite(features[:, 0]).sum():,} of {counted(len(data), 'image')}")
    warn_of_unjudged_classes(data, doubts)
    return data, doubts, None


def features_by_weights(source: Source, data: DataSet) -> np.ndarray:
    """Return float32 [N, D]; a row of NaN is an unreadable image."""
    from engine.features.embedder import Embedder
    from utils.distributed import Process, choose_device

    embedder = Embedder(source.weights, Process(choose_device(source.device, local_rank=0)), print)
    features = np.full((len(data), embedder.width), np.nan, np.float32)
    for images, numbers in zip(data.parts, data.numbers, strict=True):
        table = embedder(images)
        features[numbers[table.indices]] = table.features
    return features


def judge_by_runs(source: Source) -> tuple[DataSet, Doubts, np.ndarray | None]:
    """Judge labels by the predictions for held-out images and, if a run kept them, by the features of all images.

    Also return the fold of each image in a sweep.
    """
    data, tables, folds = read_tables(source)
    probabilities = probabilities_of(tables, data.labels, len(data.classes))
    names = [data.name(number) for number in range(len(data))]
    features = features_by_name(in_order(source.runs)[0].folder, names, print)
    doubts = judge_labels(data.labels, len(data.classes), features, probabilities)
    say_what_was_judged(source, data, np.isfinite(probabilities[:, 0]), features is not None)
    warn_of_unjudged_classes(data, doubts)
    return data, doubts, folds


def in_order(runs: Sequence[SavedRun]) -> list[SavedRun]:
    return sorted(runs, key=lambda run: str(run.settings["DATA.FOLD"]))


def read_tables(source: Source) -> tuple[DataSet, list[Predictions], np.ndarray | None]:
    """Return the data, one table of predictions for each seed, and the fold of each image in a sweep (-1: unknown)."""
    first = data = folds = None
    by_seed: dict[int, list[Predictions]] = {}
    for run in in_order(source.runs):
        config = config_of(run, source.data_path)
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


def say_what_was_judged(source: Source, data: DataSet, judged: np.ndarray, has_features: bool) -> None:
    number, rest = int(judged.sum()), int((~judged).sum())
    print(
        f"{source.folder}: predictions for {number:,} of {counted(len(data), 'image')} by {counted(len(source.runs), 'run')}"
    )
    if has_features:
        print("the features from before the training judge the images")
    elif source.num_missing:
        print(
            f"{rest:,} images were not judged, because {counted(source.num_missing, 'trial')} of the sweep is not done; "
            f"continue it: {command('scripts/sweep.py', '-output', source.folder)}"
        )
    elif not source.folds:
        line = f"{counted(len(data.train), 'training image')} were not judged, because the run was trained on them"
        if data.is_divided:
            words = ("-cfg", source.folder / "config.yaml", "-folds", 5, "-output", "sweeps/folds")
            line += f"; a sweep judges all: {command('scripts/sweep.py', *words)}"
        print(line)


def warn_of_unjudged_classes(data: DataSet, doubts: Doubts) -> None:
    counts = np.bincount(data.labels[doubts.is_judged], minlength=len(data.classes))
    if len(unjudged := np.flatnonzero(counts == 0)):
        names = first_of([data.classes[number] for number in unjudged.tolist()])
        print(warning(f"no image of these classes was judged, so their labels are not checked: {names}"))


def rows_of(doubts: Doubts, copies: Sequence[Copy], data: DataSet) -> list[Row]:
    """Return one row per image: doubtful labels first, then copies with other labels, then copies in training."""
    reasons: dict[int, list[str]] = {}
    for each in sorted(copies, key=lambda copy: not copy.has_other_label):
        reasons.setdefault(each.image, []).append(each.reason)
    rows = []
    for image in doubts.ranked.tolist():
        suggestion = data.classes[doubts.suggestions[image]]
        reason = "; ".join([f"predicted {suggestion}", *reasons.pop(image, [])])
        rows.append(Row(image, suggestion, float(doubts.confidences[image]), reason))
    return rows + [Row(image, "", None, "; ".join(each)) for image, each in reasons.items()]


def summary(doubts: Doubts, copies: Sequence[Copy], data: DataSet, finds_copies: bool) -> list[str]:
    """Return the lines that summarize the findings."""
    listed = doubts.ranked
    low, number, high = doubts.expected
    of_listed = float(doubts.wrong[listed].sum())
    lines = [
        f"the labels of {100 * doubts.accuracy:.1f}% of {counted(int(doubts.is_judged.sum()), 'image')} are predicted without "
        "the image itself",
        f"wrong labels: about {number:,.0f} (95% interval: {low:,.0f} to {high:,.0f})"
        if doubts.is_estimated
        else f"wrong labels: too few images to estimate their number ({FEWEST_JUDGED} are needed)",
        f"doubtful labels: {len(listed):,}, of which about {of_listed:,.0f} are wrong",
    ]
    if len(listed) and (low == 0 or of_listed < WORTH_READING * len(listed)):
        lines.append("the list may hold no wrong label; read its first rows, and stop if they are right")
    pairs = Counter((data.label(image), data.classes[doubts.suggestions[image]]) for image in listed.tolist())
    lines += [
        f"  {one_line(label)} -> {one_line(other)}: {count:,}"
        for (label, other), count in pairs.most_common(NUM_CONFUSIONS)
    ]
    if finds_copies:
        others = sum(each.has_other_label for each in copies)
        lines.append(f"equal or nearly equal images with different labels: {others:,}")
        lines.append(f"copies of training images among the validation images: {len(copies) - others:,}")
    return lines


def apply(source: Source, table: Path, output: Path | None) -> None:
    """Write lists of the images with the confirmed labels, and print the command that trains from them."""
    if find_task(source.config).why_not_applied:
        raise ConfigError(f"-apply: {find_task(source.config).why_not_applied}")
    data = DataSet.load(source.config)
    if not data.is_correctable:
        raise ConfigError(
            f"-apply: DATA.DATASET is {data.config.DATA.DATASET}; -apply can only list the images of class folders and "
            "CSV files (imagefolder, csv); correct the labels in the data from which this data set was made"
        )
    if source.runs:
        refuse_other_data(source.runs[0], data)
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
    origin = source.runs[0].folder if source.runs else data.place
    print(
        f"{folder}: {' and '.join(LISTS)} list the training and validation images of {origin}, with "
        f"{counted(len(changes), 'corrected label')}; the data are unchanged"
    )
    if source.runs:
        print(as_typed("train from the lists, then compare both runs with scripts/compare.py:"))
        words = ["-cfg", str(origin / "config.yaml")]
    else:
        print("train from the lists:")
        words = ["-pretrained", source.name, *source.flags]
    print(f"  {command_to_train(words, data.config, lists)}")
