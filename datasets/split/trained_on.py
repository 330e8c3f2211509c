"""Find evaluated images that are also in the folder that a run was trained on."""

import filecmp
import math
import os
from pathlib import Path

from datasets.types import ImageSet
from utils.text import warning

MOST_COMPARED = 5000  # images; comparing one takes a millisecond on a network disk


def warn_of_trained_images(image_set: ImageSet, training: str) -> list[str]:
    """Return a warning if evaluated images are also in the training folder, with the same path below it and content.

    `training`: the folder or list of the training images, as the run named it.
    """
    if os.path.realpath(image_set.split["validation"]) == os.path.realpath(training):
        return [
            warning(
                f"DATA.DATA_PATH: the run was trained on {training}, so the accuracy is too high; name other images"
            )
        ]
    is_list = os.path.isfile(training)
    folder = Path(training).parent if is_list else Path(training)
    if image_set.root is None or not folder.is_dir():
        return []
    compared = range(0, len(image_set), math.ceil(len(image_set) / MOST_COMPARED))
    found = [index for index in compared if _is_in(folder, image_set, index, is_list)]
    if not found:
        return []
    of = f"{len(compared):,} compared images" if len(compared) < len(image_set) else f"{len(image_set):,} images"
    return [
        warning(
            f"DATA.DATA_PATH: {len(found):,} of {of} are also in {folder}, such as {image_set.name(found[0])}; leave "
            "out images that the run was trained on, because they distort the accuracy"
        )
    ]


def _is_in(folder: Path, image_set: ImageSet, index: int, is_list: bool) -> bool:
    """Return whether an image is in the folder. With a list, it may be in the folder without being listed."""
    own, other = image_set.name(index), folder / image_set.key(index)
    try:
        return not (is_list and os.path.samefile(own, other)) and filecmp.cmp(own, other, shallow=False)
    except OSError:  # usually there is no such file
        return False
