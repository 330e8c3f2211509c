"""Doubtful labels of images with one class, by predictions and features of runs, or by weights."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.features.doubts import FEWEST_JUDGED, Doubts, judge_labels
from engine.features.saved import features_by_name
from engine.labelling.data import Copy, DataSet, Source, refuse_several_classes
from engine.labelling.predictions import in_order, probabilities_of, read_tables
from engine.labelling.review import MOST_SHEETS, Row
from engine.predict.output_paths import PER_SHEET
from utils.commands import command
from utils.text import counted, first_of, one_line, warning

NUM_CONFUSIONS = 10  # number of class pairs that the summary lists
WORTH_READING = 0.25  # share of wrong labels that a list should have


@dataclass(frozen=True)
class JudgedLabels:
    """The labels of a data set, and how probably each is wrong."""

    data: DataSet
    doubts: Doubts
    folds: np.ndarray | None  # the fold of each image in a sweep (-1: unknown)

    @classmethod
    def of(cls, source: Source, say: Callable[[str], None]) -> "JudgedLabels":
        """Judge all labels, and say how many images have been judged by what."""
        judged = (_by_weights if source.weights else _by_runs)(source, say)
        labels, classes = judged.data.labels, judged.data.classes
        counts = np.bincount(labels[judged.doubts.is_judged], minlength=len(classes))
        if len(unjudged := np.flatnonzero(counts == 0)):
            names = first_of([classes[number] for number in unjudged.tolist()])
            say(warning(f"no image of these classes was judged, so their labels are not checked: {names}"))
        return judged

    def rows(self, copies: Sequence[Copy]) -> list[Row]:
        """Return one row per image: doubtful labels first, then copies with other labels, then copies in training."""
        copy_of = {each.image: each for each in sorted(copies, key=lambda copy: not copy.other_label)}
        rows = []
        for image in self.doubts.ranked.tolist():
            suggestion = self.data.classes[self.doubts.suggestions[image]]
            also = [copy_of.pop(image).reason] if image in copy_of else []
            reason = "; ".join([f"predicted {suggestion}", *also])
            rows.append(Row(image, suggestion, float(self.doubts.confidences[image]), reason))
        return rows + [Row(each.image, each.other_label, None, each.reason) for each in copy_of.values()]

    def summary(self, copies: Sequence[Copy] | None) -> list[str]:
        """Return the lines of the summary. `copies`: None if they were not looked for."""
        doubts, data, listed = self.doubts, self.data, self.doubts.ranked
        of_listed = float(doubts.wrong[listed].sum())
        lines = [
            f"the labels of {100 * doubts.accuracy:.1f}% of {counted(int(doubts.is_judged.sum()), 'image')} are "
            "predicted without the image itself",
            _describe_number(doubts),
            f"doubtful labels: {len(listed):,}, of which about {of_listed:,.0f} are wrong",
        ]
        if len(listed) and (doubts.expected[0] == 0 or of_listed < WORTH_READING * len(listed)):
            lines.append("the list may hold no wrong label; read its first rows, and stop if they are right")
        pairs = Counter((data.label(image), data.classes[doubts.suggestions[image]]) for image in listed.tolist())
        lines += [
            f"  {one_line(label)} -> {one_line(other)}: {count:,}"
            for (label, other), count in pairs.most_common(NUM_CONFUSIONS)
        ]
        if copies is not None:
            others = sum(bool(each.other_label) for each in copies)
            lines.append(f"equal or nearly equal images with different labels: {others:,}")
            lines.append(f"copies of training images among the validation images: {len(copies) - others:,}")
        return lines

    def advice(self, source: Source, num_rows: int, table: Path, sheets: Sequence[Path]) -> Iterator[str]:
        """Yield the lines that say what to do with the table and its sheets."""
        if not num_rows:
            yield f"nothing to correct; {table} is empty"
            return
        if num_rows > PER_SHEET * MOST_SHEETS:
            yield f"the sheets show the first {PER_SHEET * MOST_SHEETS:,} of {num_rows:,} images"
        yield f"look at {first_of([str(each) for each in sheets], limit=3)}"
        if not self.data.is_correctable:
            name = self.data.config.DATA.DATASET
            yield f"the labels of {name} cannot be corrected with -apply; correct them where the data come from"
            return
        yield f"write yes into the column confirmed of {table} where the suggestion is right, then:"
        yield f"  {source.command('-apply', str(table))}"


def _describe_number(doubts: Doubts) -> str:
    if not doubts.is_estimated:
        return f"wrong labels: too few images to estimate their number ({FEWEST_JUDGED} are needed)"
    if doubts.is_unknown:
        return "wrong labels: their number cannot be estimated, because the labels are hardly predictable"
    low, number, high = doubts.expected
    return f"wrong labels: about {number:,.0f} (95% interval: {low:,.0f} to {high:,.0f})"


def _by_weights(source: Source, say: Callable[[str], None]) -> JudgedLabels:
    """Judge all labels of a data set by the features of weights."""
    refuse_several_classes(source.data_path, source.config)
    data = source.data()
    features = source.features(data, say)
    doubts = judge_labels(data.labels, len(data.classes), features)
    say(f"{source.name}: features of {np.isfinite(features[:, 0]).sum():,} of {counted(len(data), 'image')}")
    return JudgedLabels(data, doubts, None)


def _by_runs(source: Source, say: Callable[[str], None]) -> JudgedLabels:
    """Judge labels by the predictions for held-out images and by the features that a run kept."""
    data, tables, folds = read_tables(source)
    probabilities = probabilities_of(tables, data.labels, len(data.classes))
    features = features_by_name(in_order(source.runs)[0].folder, data.names, say)
    doubts = judge_labels(data.labels, len(data.classes), features, probabilities)
    _say_what_was_judged(source, data, np.isfinite(probabilities[:, 0]), doubts.uses_features, say)
    return JudgedLabels(data, doubts, folds)


def _say_what_was_judged(
    source: Source, data: DataSet, judged: np.ndarray, uses_features: bool, say: Callable[[str], None]
) -> None:
    number, rest = int(judged.sum()), int((~judged).sum())
    say(
        f"{source.folder}: predictions for {number:,} of {counted(len(data), 'image')} by "
        f"{counted(len(source.runs), 'run')}"
    )
    if uses_features:
        say("the features from before the training judge the images")
    elif source.num_missing:
        say(
            f"{rest:,} images were not judged, because {counted(source.num_missing, 'trial')} of the sweep is not "
            f"done; continue it: {command('sweep', '-output', source.folder)}"
        )
    elif rest and not source.folds:
        line = f"{counted(len(data.train), 'training image')} were not judged, because the run was trained on them"
        if data.is_divided:
            line += f"; a run with -folds judges all: {source.by_folds}"
        say(line)
