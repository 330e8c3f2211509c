"""`shards` at a URL: downloads whole tars into a cache of limited size, which all processes of a host share.

A file's name contains the version of the tar, so a file under its final name is current and complete. A tar is written
to a locked file `.NAME.part` and then renamed. fsspec's own file caches are not used: they write to the final name, so
that a killed download looks complete, and their size has no limit.
"""

import contextlib
import functools
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from configs.schema import Config
from datasets.index import ENDING, Index, caches_folder
from datasets.sources import shards
from datasets.sources.root import TRAIN_NAMES, VAL_NAMES, choose_parts
from datasets.sources.shards import CLASSES_FILE, ShardFolder, ShardImages, ShardTable, ShardTar
from datasets.sources.tar import Tar
from datasets.types import ImageSet
from extras.remote.server import NotThereError, Server, parse_address
from utils.errors import DataError, cause_of
from utils.files import free_bytes, locked, names_in, replacing, sync
from utils.text import format_bytes

NUM_REQUESTS = 32  # concurrent requests for sizes
NUM_SCANS = 4  # tars that are downloaded concurrently for the index
NUM_PULLERS = 4  # prefetch threads per process; each downloads one tar at a time
MOST_AHEAD = 256  # largest number of tars to prefetch
SHARE_AHEAD = 0.8  # fraction of the cache's limit for prefetched tars; the rest is for other tars, such as validation
SHARE_OF_DISK = 0.8  # default limit of the cache, as a fraction of the free disk space plus the size of the cache
PART = ".part"  # ending of incomplete files
VERSION_KEYS = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified")  # of S3 and HTTP, GS, HF, others
VERSION_DIGITS = 12  # hexadecimal digits of the version in file names


def read_remote_shards(config: Config, say: Callable[[str], None]) -> tuple[ImageSet | None, ImageSet | None]:
    """Return the training and validation images on the server. A set is None if it has no shards or is not needed."""
    return shards.read_from(ServerFolder(config, say), config)


class TarCache:
    """A cache of at most `limit` bytes for the tars of one folder on a server."""

    def __init__(self, folder: Path, server: Server, limit: int = 0):
        self.folder, self.server, self.limit = folder, server, limit

    def path(self, tar: ShardTar) -> Path:
        return self.folder / f"{tar.name[: -len('.tar')]}.{tar.version:0{VERSION_DIGITS}x}.tar"

    def holds(self, tar: ShardTar) -> bool:
        """Return whether the tar is cached with its full size. After a machine crash, a file may be shorter."""
        try:
            return self.path(tar).stat().st_size == tar.size
        except FileNotFoundError:
            return False

    def use(self, tar: ShardTar) -> None:
        """Mark the tar as just used, because the least recently used tars are deleted first."""
        with contextlib.suppress(OSError):
            os.utime(self.path(tar))

    def pull(self, tar: ShardTar, check: Callable[[Path], None] = lambda path: None, waits: bool = True) -> None:
        """Download the tar unless it is cached. `check` raises DataError for a wrong tar.

        If another process is downloading the tar, wait for that process, or return if `waits` is False.
        """
        path = self.path(tar)
        part = path.with_name(f".{path.name}{PART}")
        try:
            while not self.holds(tar):
                path.parent.mkdir(parents=True, exist_ok=True)
                with locked(part, (lambda: None) if waits else None) as file:
                    if file is None:
                        return
                    if not self.holds(tar):
                        self._download(tar, file, check)
        except OSError as error:
            raise DataError(
                f"{self.server.url_of(tar.name)} cannot be cached in {self.folder} ({cause_of(error)}); set "
                "DATA.CACHE_PATH to a folder with free space, or lower DATA.REMOTE_CACHE_GB"
            ) from error

    def _download(self, tar: ShardTar, file: BinaryIO, check: Callable[[Path], None]) -> None:
        part = Path(file.name)
        file.truncate(tar.size)  # so that its full size counts when another process frees space
        self.make_room()
        try:
            self.server.copy(tar.name, tar.size, file)
            sync(file)
            check(part)
        except BaseException:
            part.unlink()
            raise
        os.replace(part, self.path(tar))

    def files(self) -> dict[Path, os.stat_result]:
        """Return {path: stat} of all cached tars, and of the tars that are being downloaded."""
        found = {}
        for path in self.folder.rglob("*"):
            if path.name.endswith((".tar", f".tar{PART}")):
                with contextlib.suppress(FileNotFoundError):
                    found[path] = path.stat()
        return found

    def make_room(self) -> None:
        """Delete the least recently used tars until the cache is within its limit."""
        found = self.files()
        total = sum(each.st_size for each in found.values())
        for path in sorted(found, key=lambda path: found[path].st_mtime_ns):
            if total > self.limit and path.suffix != PART:
                path.unlink(missing_ok=True)
                total -= found[path].st_size

    def remove_left(self) -> None:
        """Remove partial files that no process is writing."""
        for part in (path for path in self.files() if path.suffix == PART):
            with contextlib.suppress(OSError), locked(part) as file:
                if file is not None:
                    part.unlink()


@functools.lru_cache(2)
def tars_in_turn(images: ShardImages, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tars in the order in which an epoch reads them, and the position of the last image of each."""
    order = images.epoch_order(seed, epoch)
    rows = order if images.rows is None else images.rows[order]
    tar_of_position = np.searchsorted(images.table.starts, rows, "right") - 1
    tars, first = np.unique(tar_of_position, return_index=True)
    last = len(order) - 1 - np.unique(tar_of_position[::-1], return_index=True)[1]
    in_turn = np.argsort(first)
    return tars[in_turn], last[in_turn]


class ServerFolder(ShardFolder):
    """A folder on a server. Each process has threads that prefetch the next tars of the epoch.

    The threads skip a tar that another process of the host is downloading. Nothing waits for or needs the threads.
    """

    drops_tars = True
    num_scans = NUM_SCANS

    def __init__(self, config: Config, say: Callable[[str], None]):
        url, self._names = parse_address(config.DATA.DATA_PATH)
        super().__init__(caches_folder(config) / f"shards-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
        self.title, self.server, self._limit_gb = url, Server(url, say), config.DATA.REMOTE_CACHE_GB
        self.cache = TarCache(self.root / "tars", self.server)
        self._listed: dict[str, dict] = {}
        self._lock, self._num_threads, self._aim = threading.Lock(), 0, (0, 0, -1)
        self._next: list[tuple[ShardTar, bytes]] = []  # (tar, checksum) to prefetch, in reverse order

    def __getstate__(self) -> dict:
        """Return the state for a data loader process, without the lock of this process."""
        return self.__dict__ | {"_lock": None}

    # --- listing the server ---

    def find_tars(self) -> dict[str, list[ShardTar]]:
        names = sorted(self._list() if self._names is None else self._names)
        found = defaultdict(list)
        with ThreadPoolExecutor(NUM_REQUESTS, "server") as pool:
            for tar in pool.map(self._describe, names):
                found[shards.part_of(tar.name)].append(tar)
        if self._names and not {name.lower() for name in found} & {*TRAIN_NAMES, *VAL_NAMES}:
            found = {TRAIN_NAMES[0]: sum(found.values(), [])}  # the URL names the tars, and no name says train or val
        parts = choose_parts(found)
        self._set_limit([tar for name in (parts.train, parts.val) if name for tar in found[name]])
        return found

    def _list(self) -> list[str]:
        """Return the tars in the folder, and in its subfolders that are named like a part (train, val)."""
        self._listed = self.server.listing()
        folders = [name for name, facts in self._listed.items() if facts["type"] == "directory"]
        for name in folders:
            if name.lower() in (*TRAIN_NAMES, *VAL_NAMES):
                self._listed |= self.server.listing(name)
        return [name for name in self._listed if name not in folders and name.lower().endswith(".tar")]

    def _describe(self, name: str) -> ShardTar:
        facts = self._listed.get(name, {})
        if facts.get("size") is None:
            facts = self.server.describe(name)
        version = next((str(facts[key]) for key in VERSION_KEYS if facts.get(key)), None)
        digest = hashlib.sha256(f"{facts['size']} {version}".encode()).hexdigest()
        return ShardTar(name, facts["size"], int(digest[:VERSION_DIGITS], 16))

    def _set_limit(self, tars: list[ShardTar]) -> None:
        """Set the cache limit: DATA.REMOTE_CACHE_GB or, by default, the size of all tars if the disk can hold them."""
        self.cache.remove_left()
        free, total = free_bytes(self.cache.folder), sum(tar.size for tar in tars)
        used = sum(each.st_size for each in self.cache.files().values())
        limit = min(total / SHARE_AHEAD, SHARE_OF_DISK * (free + used))
        self.cache.limit = int(limit if self._limit_gb is None else self._limit_gb * 1e9)
        self.notes = [
            f"{self.title}: {format_bytes(total)} of tars; {self.cache.folder} keeps up to "
            f"{format_bytes(self.cache.limit)} of them, and has {format_bytes(used)}; free disk space: {format_bytes(free)}"
        ]

    def _has(self, name: str) -> bool:
        """Return whether the server has an optional file. Some servers report a missing file as "access denied"."""
        if self._names is None:
            return name in self._listed
        with contextlib.suppress(NotThereError):
            return bool(self.server.describe(name))
        return False

    def classes(self) -> str | None:
        if not self._has(CLASSES_FILE):
            return None
        return names_in(self.server.read(CLASSES_FILE), "surrogateescape", f"{self.title}/{CLASSES_FILE}")

    # --- the index ---

    def older_indexes(self, paths: Sequence[Path], part: str) -> list[Index]:
        """Return the server's index."""
        if not self._has(name := f"{part}{ENDING}"):
            return []
        copy = self.root / f"server-{name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        with replacing(copy, shared=True) as file:
            self.server.copy(name, self.server.describe(name)["size"], file)
        found = super().older_indexes([copy], part)
        copy.unlink()  # the index stays mapped into memory
        return found

    def are_unchanged(self, table: ShardTable, tars: Sequence[ShardTar]) -> bool:
        """Return True, because `_pull` compares checksums when it downloads a tar."""
        return True

    # --- reading ---

    def open(self, tar: ShardTar, checksum: bytes = b"") -> Tar:
        while True:
            self._pull(tar, checksum)
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                opened = Tar(self.cache.path(tar), self.title_of(tar))
                self.cache.use(tar)
                return opened

    def _pull(self, tar: ShardTar, checksum: bytes, waits: bool = True) -> None:
        def check(part: Path) -> None:
            if checksum and shards.checksum_of(Tar(part)) != checksum:
                for index in self.root.glob(f"*{ENDING}"):  # so that the next start downloads the server's index again
                    index.unlink(missing_ok=True)
                raise DataError(
                    f"{self.title_of(tar)} is not the tar that its index describes; rebuild the index on the server "
                    f"(remove {shards.part_of(tar.name)}{ENDING}, or run make_shards.py again), and start again with "
                    "-resume to continue"
                )

        self.cache.pull(tar, check, waits)

    def will_read(self, images: ShardImages, seed: int, epoch: int, position: int) -> None:
        """Whenever a tar is done, prefetch the tars that are needed next, and the first tars of the next epoch."""
        tars, last = tars_in_turn(images, seed, epoch)
        needed = tars[last >= position]
        aim = (seed, epoch, len(needed))
        if aim == self._aim:
            return
        self._aim = aim
        numbers = [*needed.tolist(), *tars_in_turn(images, seed, epoch + 1)[0].tolist()][:MOST_AHEAD]
        checksums = images.table.checksums()
        tars = [(images.table.tar(number), checksums[number]) for number in numbers]
        fitting = np.cumsum([tar.size for tar, _ in tars]) <= SHARE_AHEAD * self.cache.limit
        ahead = [each for each, fits in zip(tars, fitting, strict=True) if fits][::-1]
        for tar, _ in ahead:
            self.cache.use(tar)  # in reverse order, so that the next tar is deleted last, after all other tars
        with self._lock:
            self._next = ahead
            while self._num_threads < NUM_PULLERS:
                self._num_threads += 1
                # A daemon thread, so that the program can exit without waiting for it.
                threading.Thread(target=self._pull_ahead, name="prefetch", daemon=True).start()

    def _pull_ahead(self) -> None:
        while True:
            with self._lock:
                if not self._next:
                    self._num_threads -= 1
                    return
                tar, checksum = self._next.pop()
            # If this download fails, the process that needs the tar reports the reason.
            with contextlib.suppress(DataError, OSError):
                self._pull(tar, checksum, waits=False)
