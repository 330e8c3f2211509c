"""The file features.npz of a run: what the pretrained model saw in its images, for commands that judge the data."""

from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from datasets import ImageSet
from engine.features.compute import ImageFeatures
from engine.session import Session
from utils.errors import ConfigError, cause_of
from utils.files import replacing
from utils.text import format_bytes

FILE = "features.npz"
PARTS = ("training", "validation")
MOST_BYTES = 2**27  # largest size of the features; larger ones are not written


def save_features(
    session: Session, sets: tuple[ImageSet, ImageSet], found: tuple[ImageFeatures, ImageFeatures]
) -> None:
    """Write the features with the name and the target of each image. If there are too many or the disk is full, say so."""
    size = sum(each.nbytes for part in found for each in part.features)
    if size > MOST_BYTES:
        session.log.note(f"no {FILE}: it would take {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}")
        return
    arrays = {}
    for name, images, part in zip(PARTS, sets, found, strict=True):
        names = [images.table_name(index) for index in part.indices.tolist()]
        columns = {"indices": part.indices, "names": names, "targets": part.targets, "features": part.joined}
        arrays |= {f"{name}_{column}": values for column, values in columns.items()}
    try:
        with replacing(session.path / FILE, check=session.check_folder) as file:
            np.savez(file, **arrays)
    except OSError as error:
        session.log.warn(f"cannot write {session.path / FILE} ({cause_of(error)})")


class SavedFeatures(NamedTuple):
    """The features of a part of the images of a run."""

    indices: np.ndarray  # int64 [n], of the images in their part
    names: np.ndarray  # str [n]
    targets: np.ndarray
    features: np.ndarray  # float32 [n, D]


def read_features(folder: Path) -> list[SavedFeatures]:
    """Return the features of the training and of the validation images of a run, or [] if it has none."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        with np.load(path, allow_pickle=False) as file:
            return [SavedFeatures(*(file[f"{part}_{name}"] for name in SavedFeatures._fields)) for part in PARTS]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it to continue without its contents") from None
