"""Facts that identify a data set: in another process, in a resumed run, and when runs are compared."""

import hashlib
import os
from collections.abc import Iterable

import numpy as np

from datasets.image_set import Table
from utils.runs import OF_A_PART

NUM_SIZES = 64  # files of each part whose sizes are compared; all sizes would take minutes on a network disk
CLASSES = "classes and their order"


def data_facts(train: Table | None, val: Table) -> dict[str, int | str]:
    """Return {name of a fact: number or digest} for the training images, if there are any, and the validation images.

    Paths are relative to the data folder. The facts of a million images take milliseconds, because an index stores
    checksums of the names.
    """
    facts: dict[str, int | str] = {
        CLASSES: _digest([name.encode(errors="surrogateescape") + b"\0" for name in val.classes])
    }
    for part, table in (("training", train), ("validation", val)):
        is_repeated = part == "validation" and val.trains_on_all
        if table is None or not len(table) or is_repeated:
            continue
        places = np.linspace(0, len(table) - 1, NUM_SIZES).astype(int).tolist()
        rows = sorted(set(places))  # np.unique would import numpy.ma, which takes 20 ms
        names, labels, sizes = (fact.format(part) for fact in OF_A_PART)
        facts |= {
            f"{part} images": len(table),
            names: _digest(table.storage.naming(table.rows, len(table))),
            labels: _digest(table.meaning.content(table.classes, table.targets)),
            sizes: " ".join(map(str, table.storage.file_sizes(list(map(table.row, rows))))),
        }
    return facts


def validation_facts(val: Table) -> dict[str, int | str]:
    """Return facts that identify a validation set in any folder: the number, file names and classes of its images."""
    meanings = val.target_names()
    classes = [meanings[target] for target in val.targets.tolist()]
    names = [f"{os.path.basename(val.name(index))} {name}" for index, name in enumerate(classes)]
    content = "\n".join(sorted(names)).encode(errors="surrogateescape")
    return {"num_images": len(val), "digest": hashlib.sha256(content).hexdigest()}


def _digest(content: Iterable[bytes | np.ndarray]) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()[:12]
