"""DATA_PATH: the folder of the data, the names of its parts, and the message for a wrong layout."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from configs.schema import Data
from utils.commands import page
from utils.errors import DataError, not_a_file
from utils.text import first_of, warning

# Endings of files that the user must unpack first.
ARCHIVES = (".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".gz", ".bz2", ".xz", ".zst")


# Names in any letter case; the first name that exists is read. Test images are for a final evaluation, not for choosing
# a model, so their name comes last.
TRAIN_NAMES, TEST_NAME = ("train", "training"), "test"
VAL_NAMES = ("val", "valid", "validation", "eval", "dev", TEST_NAME)


class PartNames(NamedTuple):
    """The names of the folders or files with training and validation images, and the names that are not read."""

    train: str | None
    val: str | None
    unread: list[str]

    def suffice(self, only_validation: bool) -> bool:
        return bool(self.train or only_validation and self.val)

    def notes(self, only_validation: bool, root: Path | str, ending: str = "") -> tuple[str, ...]:
        """Return lines for the log: the unread parts, and a warning if test images are the only validation images."""
        notes = []
        if self.unread:
            notes.append(f"not read: {first_of([f'{root}/{name}{ending}' for name in self.unread])}")
        if self.val and self.val.lower() == TEST_NAME and self.train and not only_validation:
            notes.append(
                warning(
                    f"the only validation images are in {root}/{self.val}{ending}, so the best checkpoint is "
                    "chosen on test images; for a fair test, add other validation images "
                    f"({root}/{VAL_NAMES[0]}{ending})"
                )
            )
        return tuple(notes)


def choose_parts(names: Iterable[str]) -> PartNames:
    """Return the training and the validation part among these names."""
    names = sorted(names)
    train, val = (
        next((name for usual in part for name in names if name.lower() == usual), None)
        for part in (TRAIN_NAMES, VAL_NAMES)
    )
    return PartNames(train, val, [name for name in names if name not in (train, val)])


def own_split(training: object, validation: object) -> dict:
    """Return ImageSet.split for data that has a validation part of its own: the locations of both parts."""
    return {"rule": "folders", "training": str(training), "validation": str(validation)}


def folder_of_data(data: Data) -> Path:
    """Return the folder that contains the images: DATA.IMAGE_ROOT (csv), or else DATA_PATH or the folder of a list."""
    if data.image_root:
        return Path(data.image_root).expanduser()
    path = Path(data.DATA_PATH).expanduser()
    return path.parent if path.is_file() else path


def path_below_data(data: Data, folder: Path) -> str:
    """Return the path of a folder relative to the folder that contains the images."""
    return os.path.relpath(folder, folder_of_data(data))


def data_root(data: Data, expects: str, reads_files: bool = False, reads_tars: bool = False) -> Path:
    """Return DATA_PATH, which must exist. `expects` describes the layout that the data set needs there.

    `reads_files`: DATA_PATH may be a file. `reads_tars`: the data set reads tar files, which need not be unpacked.
    """
    root = Path(data.DATA_PATH).expanduser()
    if not root.exists():
        raise DataError(f"DATA.DATA_PATH: {root} does not exist; {expected_layout(data, expects)}")
    kind = not_a_file(root)
    if kind not in (None, "a folder"):
        raise DataError(f"DATA.DATA_PATH: {root} is {kind}; {expected_layout(data, expects)}")
    name = root.name.lower()
    if kind is None and name.endswith(ARCHIVES) and not (reads_tars and name.endswith(".tar")):
        raise DataError(
            f"DATA.DATA_PATH: {root} is an archive; unpack it, and set -data_path to the new folder (layouts: "
            f"{page('docs/data.md')})"
        )
    if kind is None and not reads_files:
        raise DataError(f"DATA.DATA_PATH: {root} is a file, not a folder; {expected_layout(data, expects)}")
    return root


def expected_layout(data: Data, expects: str) -> str:
    """Return the end of messages about a wrong layout: the layout that the data set expects."""
    return f"{data.DATASET} expects {expects} there; set -data_path or -dataset (layouts: {page('docs/data.md')})"
