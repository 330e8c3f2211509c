"""Where tar shards are: finding them, their indexes, and what a folder on a server does otherwise."""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePath

from datasets.index import FileStamp
from datasets.sources.folder import subfolders
from datasets.sources.root import TRAIN_NAMES, VAL_NAMES
from datasets.sources.shards.index import Shard, load_index, save_index, scan
from datasets.sources.shards.tar import Tar
from datasets.types import ImageSet
from utils.errors import DataError

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# train-000000.tar, train-00000-of-00002.tar, imagenet-train-0.tar
OF_PART = re.compile(rf"(?:.+[-_.])?({'|'.join((*TRAIN_NAMES, *VAL_NAMES))})[-_.\d]*(?:of[-_\d]+)?\.tar", re.IGNORECASE)


class ShardFolder:
    """Where shards are: in a folder on a disk. One on a server overrides all of this, and keeps copies in `root`."""

    notes: Sequence[str] = ()  # lines for the log

    def __init__(self, root: Path):
        self.root = root

    def find_tars(self) -> dict[str, list[Path]]:
        """The sorted paths of the tars of each part."""
        return find_tars(self.root)

    def size_and_date(self, path: Path) -> tuple[int, int]:
        """Of a tar: if one of them is another, the tar has changed. Threads call it concurrently, as they do `load`."""
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns

    def load(self, path: Path) -> tuple[Shard, bool]:
        """The samples of a tar, and whether the next call can do without scanning the tar."""
        shard = load_index(path)
        if shard is not None:
            return shard, True
        shard = scan(path)
        return shard, save_index(shard)

    def open(self, tar: FileStamp) -> Tar:
        """The tar, opened."""
        return Tar(tar.path)

    def will_read(self, images: ImageSet, seed: int, epoch: int, position: int) -> None:
        """As ImageSet.will_read."""

    def shown(self, text: str) -> str:
        """A message with the paths as the user knows them."""
        return text


def find_tars(root: Path) -> dict[str, list[Path]]:
    """The sorted tars of each part: PART-000000.tar, also with a prefix, and PART/*.tar. Others are parts of their own."""
    tars = defaultdict(list)
    for path in sorted([*root.iterdir(), *(each for name in subfolders(root) for each in (root / name).iterdir())]):
        name = path.name.removesuffix(_compression(path))
        if path.name.startswith(".") or not name.lower().endswith(".tar"):
            continue
        key = part_of(path.relative_to(root).with_name(name))
        if not _compression(path):
            tars[key].append(path)
        elif key.lower() in (*TRAIN_NAMES, *VAL_NAMES) and not path.with_suffix("").exists():
            raise DataError(
                f"{path} is compressed, so it cannot be read by position; unpack it to {path.with_suffix('').name} "
                "(images hardly shrink)"
            )
    return tars


def part_of(tar: PurePath) -> str:
    """The part that a tar belongs to by its path below the root."""
    part = OF_PART.fullmatch(tar.name)
    return tar.parent.name or (part[1] if part else tar.stem)


def _compression(path: Path) -> str:
    return path.suffix if path.suffix in COMPRESSED else ""
