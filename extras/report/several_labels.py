"""The rows of predictions.csv and the most confident mistakes, if an image can have several labels."""

from collections.abc import Iterator

import numpy as np

from datasets import ImageSet
from engine.evaluation.tally import LabelResults
from extras.report.image_sheets import NUM_SHOWN
from extras.report.image_tables import SEPARATOR, Names, format_share


def label_rows(results: LabelResults, image_set: ImageSet, names: Names) -> Iterator[tuple[str, ...]]:
    """Yield rows with all labels in one cell, all predicted classes in another, and their probabilities in two more."""
    starts, ends = (np.searchsorted(results.images, results.indices, side=side) for side in ("left", "right"))
    for index, start, end in zip(results.indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        cells = {}
        for name, chosen in (("label", results.are_labels), ("prediction", results.are_predicted)):
            rows = start + np.flatnonzero(chosen[start:end])
            cells[name] = SEPARATOR.join(names[number] for number in results.classes[rows].tolist())
            cells[f"{name}s"] = SEPARATOR.join(map(format_share, results.probabilities[rows].tolist()))
        yield image_set.table_name(index), cells["label"], cells["prediction"], cells["predictions"], cells["labels"]


def most_certain_label_errors(results: LabelResults, names: Names) -> tuple[int, list[tuple[int, list[str]]]]:
    """Return the number of mistakes in images with several labels, and (image index, caption) for the most confident.

    Each missed label and each wrong prediction is a mistake.
    """
    wrong = np.flatnonzero(results.are_labels != results.are_predicted)
    certainty = np.where(results.are_predicted, results.probabilities, 1 - results.probabilities)
    chosen = wrong[np.argsort(-certainty[wrong], kind="stable")][:NUM_SHOWN].tolist()

    def caption_of(row: int) -> list[str]:
        how = "not a label" if results.are_predicted[row] else "a label"
        return [f"{how}: {names[results.classes[row]]}", f"model: {results.probabilities[row]:.1%}"]

    return len(wrong), [(int(results.images[row]), caption_of(row)) for row in chosen]
