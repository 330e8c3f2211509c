"""The file features.npz of a run: what the pretrained model saw in its images, for commands that judge the data."""

from collections.abc import Callable, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from datasets import ImageSet
from engine.features.compute import ImageFeatures
from engine.session import Session
from utils.errors import cause_of
from utils.files import replacing
from utils.text import counted, first_of, format_bytes, warning

FILE = "features.npz"
PARTS = ("training", "validation")
MOST_BYTES = 2**27  # largest size of the features; larger ones are not written


def save_features(
    session: Session, sets: tuple[ImageSet, ImageSet], features_of_sets: tuple[ImageFeatures, ImageFeatures]
) -> None:
    """Write the features with the name and the target of each image.

    If there are too many or the disk is full, say so.
    """
    size = sum(each.nbytes for part in features_of_sets for each in part.features)
    if size > MOST_BYTES:
        session.log.note(f"no {FILE}: it would take {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}")
        return
    arrays = {}
    for name, images, part in zip(PARTS, sets, features_of_sets, strict=True):
        names = [images.table_name(index) for index in part.indices.tolist()]
        columns = {"indices": part.indices, "names": names, "targets": part.targets, "features": part.joined}
        arrays |= {f"{name}_{column}": values for column, values in columns.items()}
    try:
        with replacing(session.path / FILE, check=session.check_folder) as file:
            np.savez(file, **arrays)
    except OSError as error:
        session.log.warn(f"cannot write {session.path / FILE} ({cause_of(error)})")


def features_by_name(folder: Path, names: Sequence[str], say: Callable[[str], None]) -> np.ndarray | None:
    """Return the features that a run kept for the images with these names, float32 [N, D]: a row of NaN if it has none.

    Return None if it kept none at all. `say` reports a damaged file and images without features.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = [np.concatenate([file[f"{part}_{name}"] for part in PARTS]) for name in ("names", "features")]
        rows_by_name = dict(zip(columns[0].tolist(), columns[1].astype(np.float32, casting="same_kind"), strict=True))
        features = np.full((len(names), columns[1].shape[1]), np.nan, np.float32)
    except (OSError, EOFError, KeyError, IndexError, ValueError, TypeError, BadZipFile) as error:
        say(warning(f"{path}: damaged ({error}), so its features are not used"))
        return None
    for number, name in enumerate(names):
        features[number] = rows_by_name.get(name, np.nan)
    if missing := [name for name in names if name not in rows_by_name]:
        say(warning(f"{path}: it has no features of {counted(len(missing), 'image')} ({first_of(missing, limit=3)})"))
    return features
