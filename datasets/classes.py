"""Which number each class has: that of a checkpoint, or of the data."""

import numpy as np

from configs.schema import Config
from datasets.types import ImageSet, Kept
from utils.errors import DataError, did_you_mean
from utils.text import first_of


def number_classes(config: Config, train: ImageSet | None, val: ImageSet, kept: Kept | None) -> None:
    """Give both sets the classes of the checkpoint that is continued or evaluated, in its order.

    Labels that are numbers keep them; classes with names get the number of their name.
    """
    if not kept or not kept.classes or kept.classes == val.classes:
        return
    names, parts = val.classes, [val] if train is None else [train, val]
    numbers = {name: number for number, name in enumerate(kept.classes)}
    if val.labels_are_numbers:
        numbers = {name: number for number, name in enumerate(names) if number < len(kept.classes)}
    new, gone = [name for name in names if name not in numbers], [name for name in kept.classes if name not in names]
    if config.EVAL:  # what has no image to score does not matter
        new = [name for name in new if names.index(name) in val.targets]
    if val.labels_are_numbers or config.EVAL:
        gone = []
    if len(new) == len(gone) == 1 and config.RESUME.allows("CLASS_NAMES"):
        numbers[new[0]] = numbers[gone[0]]
        kept = kept._replace(classes=[new[0] if name == gone[0] else name for name in kept.classes])
        val.notes += (f"class {gone[0]} is called {new[0]} from here on (RESUME.ALLOW_CHANGED)",)
    elif new or gone:
        changes = [f"{word}: {first_of(each)}" for word, each in (("new", new), ("gone", gone)) if each]
        place = f" ({_place(parts, names.index(new[0]))})" if new else ""
        renamed = (
            "; if it was only renamed: -opts RESUME.ALLOW_CHANGED=[CLASS_NAMES]" if len(new) == len(gone) == 1 else ""
        )
        raise DataError(
            f"DATA.DATA_PATH: {config.DATA.DATA_PATH} has {len(names)} classes, the checkpoint {len(kept.classes)} "
            f"({'; '.join(changes)}){place}; name them as there, or start a new run from its weights with -pretrained{renamed}"
            f"{did_you_mean(new[0], kept.classes) if new else ''}"
        )
    lookup = np.array([numbers.get(name, -1) for name in names])
    for image_set in parts:
        image_set.targets, image_set.classes = lookup[image_set.targets], kept.classes


def _place(parts: list[ImageSet], target: int) -> str:
    """The first image of a class."""
    found = ((image_set, np.flatnonzero(image_set.targets == target)) for image_set in parts)
    return next((image_set.name(int(indices[0])) for image_set, indices in found if len(indices)), "without images")
