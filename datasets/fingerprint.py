"""Facts that identify a data set: in another process, in a resumed run, and when runs are compared."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from datasets.image_set import ImageSet
from utils.runs import OF_A_PART, SIZES, changed_facts

NUM_SIZES = 64  # files of each part whose sizes are compared; all sizes would take minutes on a network disk
CLASSES = "classes and their order"


def data_facts(train: ImageSet | None, val: ImageSet) -> dict[str, int | str]:
    """Return {name of a fact: number or digest} for the training images, if there are any, and the validation images.

    Paths are relative to the data folder. The facts of a million images take milliseconds, because an index stores
    checksums of the names.
    """
    facts: dict[str, int | str] = {
        CLASSES: _digest([name.encode(errors="surrogateescape") + b"\0" for name in val.classes])
    }
    for part, image_set in (("training", train), ("validation", val)):
        is_repeated = part == "validation" and val.trains_on_all
        if image_set is None or not len(image_set) or is_repeated:
            continue
        places = np.linspace(0, len(image_set) - 1, NUM_SIZES).astype(int).tolist()
        rows = sorted(set(places))  # np.unique would import numpy.ma, which takes 20 ms
        names, labels, sizes = (fact.format(part) for fact in OF_A_PART)
        facts |= {
            f"{part} images": len(image_set),
            names: _digest(image_set.storage.naming(image_set.rows, len(image_set))),
            labels: _digest(image_set.meaning.content(image_set.classes, image_set.targets)),
            sizes: " ".join(map(str, image_set.storage.file_sizes(list(map(image_set.row, rows))))),
        }
    return facts


def is_other_data(facts: Mapping[str, Any], val: ImageSet) -> bool:
    """Return whether the file sizes of the validation images differ from the sizes in the facts of a run."""
    return any(fact.startswith(SIZES) for fact in changed_facts(facts, data_facts(None, val)))


def _digest(content: Iterable[bytes | np.ndarray]) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()[:12]
