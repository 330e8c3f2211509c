"""Which parquet files belong to which part of a data set, and whether some of a part are missing."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from datasets.sources.folder import subfolders
from datasets.sources.root import TRAIN_NAMES, VAL_NAMES
from utils.errors import DataError
from utils.text import first_of

ENDING = ".parquet"
# train-00000-of-00294.parquet, train.parquet, imagenet-train-0.parquet
OF_PART = re.compile(rf"(?:.+[-_.])?({'|'.join((*TRAIN_NAMES, *VAL_NAMES))})(?:[-_.\d].*)?", re.IGNORECASE)
OF_COUNT = re.compile(r"(.*?)(\d+)-of-(\d+)(?:-\w+)?")  # at its end some have a checksum
SAFE_VERSION = 15  # up to 14.0.0 types in a file could be pickles (CVE-2023-47248)
DEPTH = 3  # levels of folders that are searched: data/, or default/train/


def parquet() -> ModuleType:
    """pyarrow's module of this name."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("DATA.DATASET: parquet needs the package pyarrow; pip install pyarrow") from error
    if int(pyarrow.__version__.partition(".")[0]) < SAFE_VERSION:
        raise DataError(
            f"DATA.DATASET: pyarrow {pyarrow.__version__} may execute what a file contains; pip install -U pyarrow"
        )
    return pyarrow.parquet


def find_files(root: Path) -> dict[str, list[Path]]:
    """The sorted files of each part: PART-00000-of-00002.parquet, also in folders, or PART/*.parquet.

    Others are parts of their own.
    """
    files = defaultdict(list)
    for path in sorted(_files_below(root, DEPTH)):
        of_name = OF_PART.fullmatch(path.stem)
        known = path.parent != root and path.parent.name.lower() in (*TRAIN_NAMES, *VAL_NAMES)
        part = path.parent.name if known else of_name[1] if of_name else path.stem
        files[part].append(path)
    return files


def _files_below(folder: Path, depth: int) -> Iterable[Path]:
    yield from (path for path in folder.glob(f"*{ENDING}") if not path.name.startswith(".") and path.is_file())
    for name in subfolders(folder) if depth else ():
        yield from _files_below(folder / name, depth - 1)


def missing_files(paths: list[Path]) -> list[str]:
    """A warning of the files that their names count ("-00003-of-00294") but that are not there."""
    found = defaultdict(set)
    for path in paths:
        if match := OF_COUNT.fullmatch(path.stem):
            found[path.parent, match[1], match[3]].add(int(match[2]))
    notes = []
    for (folder, start, count), numbers in found.items():
        width, lacking = len(count), sorted(set(range(int(count))) - numbers)
        if lacking:
            names = [f"{start}{number:0{width}d}-of-{count}{ENDING}" for number in lacking]
            notes.append(f"warning: {folder}: {len(lacking)} of {int(count)} files are missing: {first_of(names)}")
    return notes
