"""The most confident mistakes if an image can have several labels, for mistakes.png."""

import numpy as np

from engine.evaluation.tally import LabelResults
from extras.report.image_sheets import NUM_SHOWN
from extras.report.image_tables import Names


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
