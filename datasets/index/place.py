"""Where the index of a data set lies, opening or building it there, and what is said of that."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from configs.schema import Config
from datasets.index.file import SMALL, Index, IndexWriteError, open_index
from utils.bar import shown
from utils.text import format_bytes

ENDING = ".index"
T = TypeVar("T")


def caches_folder(config: Config) -> Path:
    """DATA.CACHE_PATH, or where it is not set `cache` below SAVE."""
    return Path(config.DATA.CACHE_PATH or Path(config.SAVE) / "cache").expanduser()


def index_paths(config: Config, beside: Path) -> list[Path]:
    """Where an index may lie: `beside` the data, in the folder of caches, in the machine's folder of temporary files.

    A small one is written nowhere, and no folder is made for it.
    """
    known_by = hashlib.sha256(os.fsencode(os.path.realpath(beside))).hexdigest()[:16]
    name = f"{beside.name.removesuffix(ENDING)}-{known_by}{ENDING}"
    caches = caches_folder(config)
    own = Path(tempfile.gettempdir()) / f"halfstep-{os.getuid()}"
    with contextlib.suppress(FileNotFoundError):
        if own.lstat().st_uid != os.getuid():  # made by another user, who could put a wrong index there
            return [beside, caches / name]
    return [beside, caches / name, own / name]


def open_or_build(
    paths: Sequence[Path], is_current: Callable[[Index], bool], build: Callable[[Path | None], Index]
) -> Index:
    """The first current index at one of these places, or one that `build` makes at the first that can be written to.

    `build(path)` makes it with an IndexWriter of that path; None: in memory. In a run rank 0 comes here first
    (Process.after_first), so that the others find what it built.
    """
    for path in paths:
        if (index := open_index(path)) and is_current(index):
            return index
    for path in paths:
        with contextlib.suppress(IndexWriteError):
            return build(path)
    return build(None)


def progress(items: Iterable[T], title: str, total: int, unit: str) -> Iterable[T]:
    """The items as they come, with a bar where a person looks at a terminal."""
    return shown(items, title, total, unit=f"{unit}s")


def note_of_memory(index: Index, title: str) -> list[str]:
    """A line for the log where every process has to hold a large index itself."""
    if index.path is not None or index.num_bytes <= SMALL:
        return []
    return [
        f"warning: the index of {title} cannot be written anywhere, so each process builds it and holds its "
        f"{format_bytes(index.num_bytes)}; set DATA.CACHE_PATH to a writable folder"
    ]
