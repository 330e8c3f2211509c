"""The images of a run's settings, opened as a run or an evaluation does."""

from collections.abc import Callable

from configs.schema import Config
from datasets import ImageSet, PriorFacts, SavedData, open_data


def open_sets(
    config: Config, say: Callable[[str], None] = print, saved: SavedData | None = None
) -> tuple[ImageSet | None, ImageSet]:
    """Return the training images, unless the settings are of an evaluation, and the validation images."""
    opened = open_data(config, "validation" if config.EVAL else "both", PriorFacts(saved=saved), say=say)
    return opened.train, opened.val
