"""Caltech101 and Caltech256 in the layout of their archives, split by position."""

from collections.abc import Callable

from configs.schema import Config
from datasets.sources.folder import class_folders, read_class_folders
from datasets.sources.root import data_root, expected_layout
from datasets.types import ImageSet
from utils.errors import DataError

# The folder with the class folders, the folders that may contain it, and the background class, which is left out.
CALTECH101 = ("101_ObjectCategories", ("", "caltech101", "caltech-101"), "BACKGROUND_Google")
CALTECH256 = ("256_ObjectCategories", ("", "caltech256"), "257.clutter")


def read_caltech(config: Config, say: Callable = print) -> tuple[ImageSet, None]:
    """Return images of 101_ObjectCategories/NAME/image_0001.jpg, or of 256_ObjectCategories/001.NAME/001_0001.jpg."""
    folder, parents, background = CALTECH256 if "256" in config.DATA.DATASET else CALTECH101
    expects = f"the folder {folder}/ with a folder per class"
    root = data_root(config.DATA, expects)
    candidates = [root / parent / folder for parent in parents] + ([root] if root.name == folder else [])
    found = next((each for each in candidates if each.is_dir()), None)
    if found is None:
        raise DataError(f"DATA.DATA_PATH: {root} has no {folder}/; {expected_layout(config.DATA, expects)}")
    # Subfolders are not read, because the dog folder of Caltech256 contains a stray folder with other images.
    classes = [name for name in class_folders(found) if name != background]
    image_set = read_class_folders(config, found, classes, deep=False)
    image_set.split = {"rule": "position", "training": str(found)}
    return image_set, None
