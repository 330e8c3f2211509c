"""The photos of a folder, as a list of paths that takes little memory."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from datasets.index import Texts
from datasets.sources.folder import FolderScan, describe_left_out
from datasets.sources.images import FileImages
from datasets.transforms.pixel_rules import PixelRules
from utils.errors import ConfigError


class Photos(Sequence):
    """The photos in a folder and its subfolders. A million of them take about 50 MB."""

    def __init__(self, folder: Path, paths: Texts):
        """`paths` are relative to the folder."""
        self.folder, self.paths = folder, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        """Return the path of a photo as scripts/predict.py prints it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.path.normpath(os.path.join(self.folder, os.fsdecode(self.paths[index])))

    def images(self, rules: PixelRules) -> FileImages:
        """Return the photos as an image set without classes."""
        return FileImages(self.folder, self.paths, np.zeros(len(self), np.uint8), [], rules)


def find_photos(flag: str, folder: Path, report: Callable[[str], None]) -> Photos:
    """Return all photos in a folder and its subfolders in natural order: 2.jpg before 10.jpg.

    `flag` names the argument in error messages. `report` prints which files were left out.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{flag}: {folder} {problem}; name a folder of images")
    scan = FolderScan(folder, [])
    paths = [os.fsencode(path) for path in scan.images_below("")]  # sorted, so that equal keys have a fixed order
    paths.sort(key=natural_key)
    for line in describe_left_out(folder, scan.left_out):
        report(line)
    return Photos(folder, Texts.of(paths))


def natural_key(path: bytes) -> bytes:
    """Return a sort key that orders paths like utils.text.natural, in a tenth of the memory.

    Each number becomes a zero byte, its number of digits and its digits, so that longer numbers come later.
    """
    return re.sub(rb"[0-9]+", lambda found: _sortable(found[0].lstrip(b"0")), path)


def _sortable(digits: bytes) -> bytes:
    return b"\0" + bytes([min(len(digits), 255)]) + digits
