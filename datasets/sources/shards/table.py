"""The samples of all tars of one part of a set, in columns: one file beside the tars, which all processes map."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from configs.schema import Config
from datasets.index import ENDING, TEXT, Index, IndexWriter, index_paths, open_or_build
from datasets.sources.shards.folder import ShardFolder
from datasets.sources.shards.index import VERSION, Shard
from utils.bar import shown

NUM_THREADS = 16  # which mostly wait for the disk
AT_ONCE = 256  # tars
OF_SAMPLES = {"label": "<i4", "offset": "<i8", "size": "<i8", "name": TEXT}  # tar by tar
OF_TARS = {"tar": TEXT, "tar.size": "<i8", "tar.mtime_ns": "<i8", "tar.cut": "u1", "tar.first": "<i8"}

T = TypeVar("T")


class ShardTable:
    """All samples of some tars. A row is a sample; the rows of a tar follow one another."""

    def __init__(self, index: Index):
        self.index = index
        self.labels, self.offsets, self.sizes = (index.column(name) for name in ("label", "offset", "size"))
        self.names, self.tars = index.text("name"), index.text("tar")
        self.tar_sizes, self.tar_dates = index.column("tar.size"), index.column("tar.mtime_ns")
        self.starts = index.column("tar.first")  # of each tar the first row, and the number of rows

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def cut(self) -> np.ndarray:
        """The numbers of the tars that are cut off."""
        return np.flatnonzero(self.index.column("tar.cut"))

    def tar_of(self, row: int) -> int:
        """The number of the tar with this sample."""
        return int(np.searchsorted(self.starts, row, "right")) - 1

    def tar_name(self, tar: int) -> str:
        """Its path below the folder of the set."""
        return os.fsdecode(self.tars[tar])

    def sample_name(self, row: int) -> str:
        return os.fsdecode(self.names[row])


def write_table(path: Path | None, shards: Iterable[tuple[str, Shard]]) -> Index:
    """The index of these shards with the names of their tars. `path` as for IndexWriter."""
    writer = IndexWriter(path, OF_SAMPLES | OF_TARS)
    num_samples = 0
    for name, shard in shards:
        for column in ("label", "offset", "size"):
            writer.add(column, shard.samples[column])
        writer.add("name", shard.samples["name"].tolist())
        of_tar = (os.fsencode(name), shard.size, shard.mtime_ns, shard.cut, num_samples)
        for column, value in zip(OF_TARS, of_tar, strict=True):
            writer.add(column, [value])
        num_samples += len(shard.samples)
    writer.add("tar.first", [num_samples])
    return writer.finish({"version of shards": VERSION})


def read_table(config: Config, folder: ShardFolder, part: str, tars: Sequence[Path]) -> tuple[ShardTable, bool]:
    """The samples of these tars of a part, and whether a next start can do without scanning them again.

    The index of an earlier start is used if the tars have the sizes and dates of then. Otherwise it is made anew of those
    of the single tars.
    """
    root, were_saved = folder.root, []
    names = [os.path.relpath(path, root) for path in tars]

    def is_current(index: Index) -> bool:
        if index.facts.get("version of shards") != VERSION:
            return False
        table = ShardTable(index)
        if table.tars.chunk(0, len(table.tars)) != list(map(os.fsencode, names)):
            return False
        found = np.array(list(_in_parallel(folder.size_and_date, tars)))
        return bool((found == np.stack([table.tar_sizes, table.tar_dates], 1)).all())

    def load() -> Iterator[tuple[str, Shard]]:
        found = shown(_in_parallel(folder.load, tars), f"index of {root}", len(tars), unit="tars")
        for name, (shard, was_saved) in zip(names, found, strict=True):
            were_saved.append(was_saved)
            yield name, shard

    paths = index_paths(config, root / f"{part}{ENDING}")
    index = open_or_build(paths, is_current, lambda path: write_table(path, load()))
    return ShardTable(index), index.path is not None or all(were_saved)


def _in_parallel(task: Callable[[Path], T], paths: Sequence[Path]) -> Iterator[T]:
    """The results in the order of the paths, a bounded number of which are held."""
    with ThreadPoolExecutor(NUM_THREADS, "shards") as pool:
        for first in range(0, len(paths), AT_ONCE):
            yield from pool.map(task, paths[first : first + AT_ONCE])
