"""The photos of a folder, in the order of scripts/predict.py."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from datasets.sources.folder import FolderScan, describe_left_out
from datasets.sources.images import FileImages
from datasets.transforms.pixel_rules import PixelRules
from utils.errors import ConfigError
from utils.text import natural


class Photos(Sequence):
    """The photos in a folder and its subfolders."""

    def __init__(self, folder: Path, paths: list[str]):
        """`paths` are relative to the folder."""
        self.folder, self.paths = folder, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        """Return the path of a photo as scripts/predict.py prints it."""
        return os.path.normpath(os.path.join(self.folder, self.paths[index]))

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
    photos = Photos(folder, sorted(scan.images_below(""), key=natural))
    for line in describe_left_out(folder, scan.left_out):
        report(line)
    return photos
