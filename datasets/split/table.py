"""split.csv: the part of each image, and its fold if there are folds."""

from pathlib import Path

import numpy as np

from datasets.split.parts import PARTS
from datasets.types import ImageSet
from utils.files import replacing
from utils.text import csv_text


def write_table(file: Path, train: ImageSet, val: ImageSet) -> None:
    with replacing(file) as out:
        out.write(b"image,part\n" if val.folds is None else b"image,part,fold\n")
        for part, image_set in zip(PARTS, (train, val), strict=True):
            start = 0
            for keys in image_set.all_keys():
                if image_set.folds is None:
                    out.write(_rows(keys, part))
                else:
                    folds = image_set.folds[start : start + len(keys)]
                    out.write(_rows_with_folds(keys, part, folds, val.split["folds"]))
                start += len(keys)


def _rows(keys: list[bytes], part: str) -> bytes:
    together = b"".join(keys)
    if not any(each in together for each in b'",\r\n'):  # values with these characters need quotes
        return b"".join(b"%b,%b\n" % (key, part.encode()) for key in keys)
    rows = ((key.decode(errors="surrogateescape"), part) for key in keys)
    return csv_text(rows).encode(errors="surrogateescape")


def _rows_with_folds(keys: list[bytes], part: str, folds: np.ndarray, total: int) -> bytes:
    """Write a fold in the form of DATA.FOLD."""
    names = [key.decode(errors="surrogateescape") for key in keys]
    rows = ((name, part, f"{fold}/{total}") for name, fold in zip(names, folds.tolist(), strict=True))
    return csv_text(rows).encode(errors="surrogateescape")
