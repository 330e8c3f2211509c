"""The row of -check about what a file tells without its picture. A model may learn it instead of the picture."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from datasets.image_set import ImageSet
from datasets.passes import read_each
from datasets.pixels.decode import open_image
from datasets.pixels.rules import ImageReadError
from engine.quick_checks import WARN, Finding

MOST_IMAGES = 20_000
FEWEST_IMAGES = 50  # with fewer, a prediction by chance is not unlikely
PARTS = 5  # of the cross-validation
LEAST_GAIN = 0.1  # a fact is named if it is right about this share of the images more than the largest class is
DEVIATIONS = 3.5  # and if this gain is so many standard deviations from none; several facts are tried
DATE = 306  # EXIF: when the file was written by the camera
LETTERS = re.compile(r"[^\W\d_]+")


def check_clues(image_set: ImageSet, indices: np.ndarray, sides: np.ndarray) -> Finding:
    """Report which facts predict the class of an image.

    `indices`: of images that can be read; `sides`: int [N, 2], the height and width of each.
    """
    chosen = np.linspace(0, len(indices) - 1, min(MOST_IMAGES, len(indices))).astype(np.int64)
    indices, sides = indices[chosen], sides[chosen]
    targets = np.asarray(image_set.targets)[indices]
    if len(indices) < FEWEST_IMAGES or len(np.unique(targets)) < 2:
        return Finding("without pictures", f"too few images or classes to tell; {FEWEST_IMAGES} images are needed")
    facts = facts_of_sides(sides) | facts_of_files(image_set, indices)
    base = float(np.mean(largest_class(targets)))
    shares = {name: share for name, values in facts.items() if (share := share_predicted(values, targets)) is not None}
    if not shares:
        return Finding("without pictures", f"{', '.join(facts)}: none predicts the class")
    parts = ", ".join(f"from the {name} alone for {share:.0%}" for name, share in most_first(shares))
    text = (
        f"the class follows {parts} of the images (always the largest class: {base:.0%}); a model may learn this "
        "instead of the picture"
    )
    return Finding(
        "without pictures", text, WARN, "give all classes photos of the same origin, or judge the model on such photos"
    )


def most_first(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def facts_of_sides(sides: np.ndarray) -> dict[str, list[str]]:
    """Return size and shape of each image, in steps of about a tenth."""
    height, width = sides.T.astype(np.float64)
    return {
        "size": [f"{step}" for step in np.round(np.log(np.sqrt(height * width)) / 0.1).astype(int)],
        "shape": [f"{step}" for step in np.round(np.log(width / height) / 0.1).astype(int)],
    }


def facts_of_files(image_set: ImageSet, indices: np.ndarray) -> dict[str, list[str]]:
    """Return the facts of each image's file that its header and its name contain."""
    if not image_set.storage.is_encoded:
        return {}
    rows = [facts for _, facts in read_each(indices.tolist(), lambda index: header_of(image_set, index), "")]
    empty = {"format": "", "colour mode": "", "transparency": "", "date": ""}
    headers = [empty if isinstance(facts, ImageReadError) else facts for facts in rows]
    names = [letters_of(image_set, index) for index in indices.tolist()]
    return {name: [header[name] for header in headers] for name in empty} | {"first letters of the name": names}


def header_of(image_set: ImageSet, index: int) -> dict[str, str]:
    extension, data = image_set.file(index)
    try:
        image = open_image(data, image_set.pixels)
    except (ImageReadError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return {"format": extension.lower(), "colour mode": "", "transparency": "", "date": ""}
    is_transparent = "transparency" in image.info or image.mode in ("RGBA", "LA", "PA")
    return {
        "format": image.format or extension.lower(),
        "colour mode": image.mode,
        "transparency": str(is_transparent),
        "date": str(image.getexif().get(DATE, ""))[:10],
    }


def letters_of(image_set: ImageSet, index: int) -> str:
    """Return the first letters of a file's name, such as IMG, or "" if they are part of the name of its class."""
    name = image_set.table_name(index).rpartition("/")[2]
    letters = LETTERS.match(name)
    first = letters.group().lower() if letters else ""
    class_name = image_set.classes[int(image_set.targets[index])].lower()
    return "" if first in class_name or class_name in name.lower() else first


def largest_class(targets: np.ndarray) -> np.ndarray:
    """Return bool [N]: whether each image is in the largest class."""
    return targets == np.bincount(targets).argmax()


def share_predicted(values: Sequence[str], targets: np.ndarray) -> float | None:
    """Return the share of images whose class a fact predicts, in cross-validation, or None if it is not clearly more.

    Each value predicts the class that is the most frequent for it among the other parts' images.
    """
    if len({*values}) < 2:
        return None
    parts = np.random.default_rng(0).permutation(len(targets)) % PARTS
    is_right = np.zeros(len(targets), dtype=bool)
    for part in range(PARTS):
        learned: dict[str, Counter[int]] = {}
        for number in np.flatnonzero(parts != part):
            learned.setdefault(values[number], Counter())[int(targets[number])] += 1
        usual = int(np.bincount(targets[parts != part]).argmax())
        answers = {value: counts.most_common(1)[0][0] for value, counts in learned.items()}
        for number in np.flatnonzero(parts == part):
            is_right[number] = answers.get(values[number], usual) == targets[number]
    by_size = largest_class(targets)
    better, worse = int((is_right & ~by_size).sum()), int((by_size & ~is_right).sum())
    gain = (better - worse) / len(targets)
    is_clear = better - worse > DEVIATIONS * math.sqrt(better + worse)
    return float(is_right.mean()) if gain >= LEAST_GAIN and is_clear else None
