"""Store the split of a large data set next to its index, and reuse it at the next start."""

import hashlib
from collections.abc import Callable, Set
from pathlib import Path

import numpy as np

from datasets.index import IndexBuilder, open_or_build
from datasets.types import ImageSet

Columns = dict[str, np.ndarray]  # {part.column: its values}


def look_up_or_store(
    image_set: ImageSet,
    record: dict,
    class_folders: Set[bytes],
    types: dict[str, str],
    draw: Callable[[], tuple[Columns, list[str]]],
) -> tuple[Columns, list[str]]:
    """Return the stored columns of both parts, and the log lines. If none are stored, call `draw` and store them.

    `types`: {part.column: its type}. A column is `row` or `target`.
    """
    index = image_set.index
    known_by = [index.id, *(record.get(each) for each in ("rule", "fraction", "seed", "group_by"))]
    known_by.append(hashlib.sha256(b"\0".join(sorted(class_folders))).hexdigest())
    ending = "split"
    if "folds" in record:  # each fold has its own file, because several folds may run at the same time
        known_by += [record["folds"], record["fold"]]
        ending += f"-{record['fold']}-of-{record['folds']}"

    def build(builder: IndexBuilder) -> dict:
        columns, notes = draw()
        for name, values in columns.items():
            builder.add(name, values)
        return {"notes": notes}

    path: Path = index.path.with_suffix(f".{ending}{index.path.suffix}")
    drawn = open_or_build([path], types, {"split of": known_by}, build)
    return {name: drawn.column(name) for name in types}, drawn.facts["notes"]
