"""Caltech101 and Caltech256 as their archives unpack, split here by a fixed seed."""

from configs.schema import Config
from datasets.sources.folder import split_one_folder
from datasets.sources.root import data_root, what_is_expected
from datasets.types import ImageSet
from utils.errors import DataError

# Folder of the classes, folders that may be around it (ours, the archive's), and the class of everything else.
CALTECH101 = ("101_ObjectCategories", ("", "caltech101", "caltech-101"), "BACKGROUND_Google")
CALTECH256 = ("256_ObjectCategories", ("", "caltech256"), "257.clutter")


def read_caltech101(config: Config) -> tuple[ImageSet, ImageSet]:
    """101_ObjectCategories/NAME/image_0001.jpg"""
    return _read(config, *CALTECH101)


def read_caltech256(config: Config) -> tuple[ImageSet, ImageSet]:
    """256_ObjectCategories/001.NAME/001_0001.jpg"""
    return _read(config, *CALTECH256)


def _read(config: Config, folder: str, parents: tuple[str, ...], background: str) -> tuple[ImageSet, ImageSet]:
    expects = f"the folder {folder}/ with a folder per class"
    root = data_root(config.DATA, expects)
    places = [root / parent / folder for parent in parents] + ([root] if root.name == folder else [])
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError(f"DATA.DATA_PATH: {root} has no {folder}/; {what_is_expected(config.DATA, expects)}")
    leave_out = () if config.DATA.KEEP_BACKGROUND else (background,)
    # Not deep: in Caltech256 the dogs' folder holds a stray folder with other files.
    return split_one_folder(config, found, leave_out, deep=False)
