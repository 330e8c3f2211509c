"""The data sets: each file has a function that reads one kind of data set. SOURCES has a row for each kind.

The function gets the settings, and `say` to report a download. It returns the training set (None with EVAL if there is
a validation set) and the validation set, or all images and None; datasets/split/ then holds out some of them.
"""

from collections.abc import Callable

from configs.schema import Config
from configs.tables import SOURCES, import_named
from datasets.types import ImageSet
from utils.errors import ConfigError, did_you_mean

Read = Callable[[Config, Callable[[str], None]], tuple[ImageSet | None, ImageSet | None]]

TORCHVISION = "torchvision/"


def find_source(name: str) -> Read:
    """Import and return the function that reads a data set."""
    row = SOURCES.get(f"{TORCHVISION}NAME" if name.startswith(TORCHVISION) else name)
    if row is None:
        raise ConfigError(
            f"DATA.DATASET: unknown data set {name!r} (known: {', '.join(SOURCES)}){did_you_mean(name, SOURCES)}"
        )
    return import_named(row.package, row.where)
