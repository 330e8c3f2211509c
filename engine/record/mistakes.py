"""mistakes.png: the wrong predictions that the model was most certain of. Often it is the label that is wrong."""

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image

from datasets import ImageSet
from datasets.types import ImageReadError
from engine.evaluation.tally import ImageResults, LabelResults
from engine.record.image_tables import Names, Results
from utils.contact_sheet import Tile, contact_sheet, fitted
from utils.errors import UserError
from utils.text import counted

NUM_SHOWN, NUM_THREADS, SIDE = 36, 6, 150


def draw_mistakes(results: Results, image_set: ImageSet) -> Image.Image:
    """A sheet of the most certain errors, the most certain first. Reads their images again, and no others."""
    names = Names(image_set.classes)
    find = most_certain_errors if isinstance(results, ImageResults) else most_certain_label_errors
    number, errors = find(results, names)
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # of a large file or a server each takes its time
        pixels = pool.map(functools.partial(pixels_of, image_set), [index for index, _ in errors])
        tiles = [
            Tile(image, [*told, image_set.key(index)]) for image, (index, told) in zip(pixels, errors, strict=True)
        ]
    shown = f", the {len(tiles)} that the model was most certain of" if len(tiles) < number else ""
    title = f"{counted(number, 'mistake')} in {counted(len(results.indices), 'validation image')}{shown}"
    return contact_sheet(tiles, side=SIDE, title=title)


def most_certain_errors(results: ImageResults, names: Names) -> tuple[int, list[tuple[int, list[str]]]]:
    """How many errors there are; of the most certain ones the image's index and what is said of it."""
    wrong = np.flatnonzero(results.labels != results.predictions)
    chosen = wrong[np.argsort(-results.probabilities[wrong], kind="stable")][:NUM_SHOWN].tolist()

    def told(row: int) -> list[str]:
        label, prediction = names[results.labels[row]], names[results.predictions[row]]
        certain, of_label = results.probabilities[row], results.label_probabilities[row]
        return [f"label: {label} ({of_label:.1%})", f"model: {prediction} ({certain:.1%})"]

    return len(wrong), [(int(results.indices[row]), told(row)) for row in chosen]


def most_certain_label_errors(results: LabelResults, names: Names) -> tuple[int, list[tuple[int, list[str]]]]:
    """The same where an image can have several labels: each that was missed, and each class too many, is an error."""
    wrong = np.flatnonzero(results.are_labels != results.are_predicted)
    certainty = np.where(results.are_predicted, results.probabilities, 1 - results.probabilities)
    chosen = wrong[np.argsort(-certainty[wrong], kind="stable")][:NUM_SHOWN].tolist()

    def told(row: int) -> list[str]:
        how = "not a label" if results.are_predicted[row] else "a label"
        return [f"{how}: {names[results.classes[row]]}", f"model: {results.probabilities[row]:.1%}"]

    return len(wrong), [(int(results.images[row]), told(row)) for row in chosen]


def pixels_of(image_set: ImageSet, index: int) -> np.ndarray | None:
    """The image, small: 36 large photos would take a gigabyte. None if it cannot be read any more."""
    try:
        return np.asarray(fitted(image_set.read(index), SIDE))
    except (ImageReadError, UserError):
        return None
