"""`shards` at a URL: downloads tars, or the images of them that a machine reads, into a cache of limited size.

All processes of a host share the cache.

The file of a cached tar has the version of the tar in its name. A whole tar is under its final name. An incomplete tar
is the locked file `.NAME.part`, which has the ranges of some images at their places. fsspec's own file caches are not
used: they write to the final name, so that a killed download looks complete, and their size has no limit.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from configs.schema import Config
from datasets.image_set import ImageSet, Table
from datasets.index import ENDING, Index, caches_folder, open_index
from datasets.order import Share
from datasets.sources.layout import TRAIN_NAMES, VAL_NAMES, choose_parts
from datasets.sources.server import NotThereError, Server, parse_address
from datasets.sources.shards import (
    CLASSES_FILE,
    MAX_OPEN_TARS,
    ShardFolder,
    ShardStorage,
    ShardTable,
    ShardTar,
    check_keys,
    checksum_of,
    part_of,
    pieces_of,
    read_from,
)
from datasets.sources.tar import Tar
from utils.errors import DataError, cause_of
from utils.files import free_bytes, locked, names_in, replacing, sync
from utils.text import format_bytes

# --- ranges of a tar ---


RECORD = np.dtype([("start", "<u8"), ("stop", "<u8"), ("check", "<u8")])  # a range that an incomplete tar has
CHECK = 0x9E3779B97F4A7C15  # start ^ stop ^ check of a record; zeros, which a crash may leave, are no record


def merged(ranges: np.ndarray, gap: int = 0) -> np.ndarray:
    """Return int64 [N, 2]: the ranges (start, stop) in order. Those at most `gap` bytes apart become one range."""
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    stops = np.maximum.accumulate(ranges[:, 1])
    begins = np.ones(len(ranges) + 1, bool)
    begins[1:-1] = ranges[1:, 0] > stops[:-1] + gap
    return np.stack([ranges[begins[:-1], 0], stops[begins[1:]]], axis=1)


def are_inside(ranges: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Return bool [N]: whether each range lies in one of the merged ranges `outer`."""
    if not len(outer):
        return np.zeros(len(ranges), bool)
    place = np.searchsorted(outer[:, 0], ranges[:, 0], "right") - 1
    return (place >= 0) & (outer[place, 1] >= ranges[:, 1])


class CachedTar(Tar):
    """An open tar of the cache. If it is incomplete, it has some ranges at their places, and their records at its end.

    Ranges and records are in one file, so that they are deleted together. A record is written when its range is on the
    disk.
    """

    def __init__(self, path: Path, tar: ShardTar, title: str = ""):
        super().__init__(path, title)
        self.is_part, self.size = path.suffix == PART, tar.size
        self.ranges = np.array([[0, tar.size]])
        self.refresh()

    def refresh(self) -> None:
        """Read the records, to which other processes add."""
        if self.is_part:
            end = os.fstat(self.descriptor).st_size
            content = self.read(self.size, max(end - self.size, 0))
            records = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize)
            records = records[records["start"] ^ records["stop"] ^ records["check"] == np.uint64(CHECK)]
            self.ranges = merged(np.stack([records["start"], records["stop"]], axis=1).astype(np.int64))

    def lacks(self, ranges: np.ndarray) -> np.ndarray:
        """Return those of the ranges that the cache does not have."""
        if not are_inside(ranges, self.ranges).all():
            self.refresh()
        return ranges[~are_inside(ranges, self.ranges)]

    def has(self, start: int, size: int) -> bool:
        return not self.is_part or not len(self.lacks(np.array([[start, start + size]])))

    def is_deleted(self) -> bool:
        return os.fstat(self.descriptor).st_nlink == 0


def add_records(file: BinaryIO, size: int, ranges: np.ndarray) -> None:
    """Add records of these ranges to an incomplete tar of `size` bytes. They replace a torn record at its end."""
    records = np.zeros(len(ranges), RECORD)
    records["start"], records["stop"] = ranges.T
    records["check"] = records["start"] ^ records["stop"] ^ np.uint64(CHECK)
    end = os.fstat(file.fileno()).st_size
    file.seek(end - (end - size) % RECORD.itemsize)
    file.write(records.tobytes())
    file.flush()


def reserve(file: BinaryIO, ranges: np.ndarray) -> None:
    """Allocate disk space for these ranges, so that it counts when another process frees space.

    Some systems and file systems cannot do that. There, a download only counts as it grows.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    for start, stop in ranges[ranges[:, 1] > ranges[:, 0]].tolist():
        try:
            os.posix_fallocate(file.fileno(), start, stop - start)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def used_bytes(status: os.stat_result) -> int:
    """Return the disk space of a file, which may have holes."""
    return min(status.st_size, 512 * status.st_blocks)


# --- the cache of tars ---


NUM_REQUESTS = 32  # concurrent requests for sizes
NUM_SCANS = 4  # tars that are downloaded concurrently for the index
NUM_PULLERS = 4  # prefetch threads per process; each downloads one tar at a time
GAP = 16 << 10  # images at most this many bytes apart are downloaded together with the bytes between them
MOST_AHEAD = 256  # largest number of tars to prefetch
SHARE_AHEAD = 0.8  # fraction of the cache's limit for prefetched tars; the rest is for other tars, such as validation
SHARE_OF_DISK = 0.8  # default limit of the cache, as a fraction of the free disk space plus the size of the cache
PART = ".part"  # ending of incomplete tars
VERSION_KEYS = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified")  # of S3 and HTTP, GS, HF, others
VERSION_DIGITS = 12  # hexadecimal digits of the version in file names


class Pull(NamedTuple):
    """A tar to download, or some ranges of it."""

    tar: ShardTar
    checksum: bytes = b""  # of the tar in the index, if it is known
    ranges: np.ndarray | None = None  # [N, 2]: start and stop of each; None: the whole tar

    @property
    def num_bytes(self) -> int:
        return self.tar.size if self.ranges is None else int(np.diff(self.ranges).sum())


@dataclass(frozen=True)
class TarCache:
    """A cache of at most `limit` bytes for the tars of one folder on a server."""

    folder: Path
    server: Server
    limit: int

    def path(self, tar: ShardTar) -> Path:
        return self.folder / f"{tar.name[: -len('.tar')]}.{tar.version:0{VERSION_DIGITS}x}.tar"

    def part(self, tar: ShardTar) -> Path:
        """Return the path of the tar while it is incomplete."""
        path = self.path(tar)
        return path.with_name(f".{path.name}{PART}")

    def holds(self, tar: ShardTar) -> bool:
        """Return whether the tar is cached with its full size. After a machine crash, a file may be shorter."""
        try:
            return self.path(tar).stat().st_size == tar.size
        except FileNotFoundError:
            return False

    def has(self, pull: Pull) -> bool:
        """Return whether the cache has the tar, or its ranges."""
        if self.holds(pull.tar):
            return True
        try:
            return pull.ranges is not None and not len(self.open(pull.tar).lacks(pull.ranges))
        except FileNotFoundError:
            return False

    def open(self, tar: ShardTar) -> CachedTar:
        """Open a tar, or what the cache has of it. Raise FileNotFoundError if it has nothing."""
        path = self.path(tar) if self.holds(tar) else self.part(tar)
        return CachedTar(path, tar, self.server.url_of(tar.name))

    def use(self, tar: ShardTar) -> None:
        """Mark the tar as just used, because the least recently used tars are deleted first."""
        for path_of in (self.path, self.part):
            with contextlib.suppress(OSError):
                os.utime(path_of(tar))
                return

    def pull(self, pull: Pull, waits: bool = True) -> None:
        """Download the tar, or its ranges, unless they are cached. Raise DataError for a tar with another checksum.

        If another process is downloading the tar, wait for that process, or return if `waits` is False.
        """
        part = self.part(pull.tar)
        try:
            while not self.has(pull):
                part.parent.mkdir(parents=True, exist_ok=True)
                with locked(part, (lambda: None) if waits else None) as file:
                    if file is None:
                        return
                    if self.holds(pull.tar):  # another process has completed it, and `locked` has made an empty file
                        part.unlink()
                    elif not self.has(pull):
                        self._download(pull, file, part)
        except OSError as error:
            raise DataError(
                f"{self.server.url_of(pull.tar.name)} cannot be cached in {self.folder} ({cause_of(error)}); set "
                "DATA.CACHE_PATH to a folder with free space, or lower DATA.REMOTE_CACHE_GB"
            ) from error

    def _download(self, pull: Pull, file: BinaryIO, part: Path) -> None:
        """Add the tar, or its ranges, to the incomplete tar in a locked file."""
        size = pull.tar.size
        file.truncate(max(size, os.fstat(file.fileno()).st_size))
        cached = CachedTar(part, pull.tar, self.server.url_of(pull.tar.name))
        ranges = np.array([[0, size]])
        if pull.ranges is not None:
            pieces = pieces_of(size) if pull.checksum else pull.ranges[:0]
            ranges = merged(cached.lacks(np.concatenate([pull.ranges, pieces])), GAP)
        try:
            self.make_room(int(np.diff(ranges).sum()))
            reserve(file, ranges)
            self.make_room()  # another process may have done the same
            ranges = self._copy(pull.tar, file, ranges)
            sync(file)
            is_right = not pull.checksum or (
                checksum_of(cached) == pull.checksum and self._is_unchanged(pull.tar, cached)
            )
        except BaseException:
            if not len(cached.ranges):
                part.unlink()
            raise
        if not is_right:
            part.unlink()
            raise self._contradiction(pull.tar)
        if are_inside(np.array([[0, size]]), merged(np.concatenate([cached.ranges, ranges]))).all():
            file.truncate(size)
            os.replace(part, self.path(pull.tar))
        else:
            add_records(file, size, ranges)

    def _copy(self, tar: ShardTar, file: BinaryIO, ranges: np.ndarray) -> np.ndarray:
        """Download ranges to their places in a file. Return what was downloaded: all, if the server has no ranges."""
        for start, data in self.server.read_ranges(tar.name, tar.size, ranges):
            file.seek(start)
            file.write(data)
            if len(data) == tar.size:
                return np.array([[0, tar.size]])
        return ranges

    def _is_unchanged(self, tar: ShardTar, cached: CachedTar) -> bool:
        """Return whether a random piece that was downloaded earlier is still the same on the server."""
        if not len(cached.ranges):
            return True
        piece = random.Random().choice(pieces_of(tar.size))
        (start, data), *_ = self.server.read_ranges(tar.name, tar.size, piece[None])
        return data == cached.read(start, len(data))

    def _contradiction(self, tar: ShardTar) -> DataError:
        for index in self.folder.parent.glob(f"*{ENDING}"):  # so that the next start downloads the server's index again
            index.unlink(missing_ok=True)
        return DataError(
            f"{self.server.url_of(tar.name)} is not the tar that its index describes; rebuild the index on the server "
            f"(remove {part_of(tar.name)}{ENDING}, or run halfstep make-shards again), and start again with -resume to "
            "continue"
        )

    def files(self) -> dict[Path, os.stat_result]:
        """Return {path: stat} of all cached tars, also of incomplete ones."""
        status_of = {}
        for path in self.folder.rglob("*"):
            if path.name.endswith((".tar", f".tar{PART}")):
                finished = path.with_name(path.name.removeprefix(".").removesuffix(PART))
                for name in (path, finished):  # a download may end between the listing and stat
                    with contextlib.suppress(FileNotFoundError):
                        status_of[name] = name.stat()
                        break
        return status_of

    def make_room(self, num_bytes: int = 0) -> None:
        """Delete the least recently used tars until the cache has space for this many bytes within its limit.

        A tar that is being downloaded stays.
        """
        status_of = self.files()
        total = num_bytes + sum(map(used_bytes, status_of.values()))
        for path in sorted(status_of, key=lambda path: status_of[path].st_mtime_ns):
            if total <= self.limit:
                return
            with contextlib.suppress(OSError), locked(path) as file:
                if file is not None:
                    path.unlink()
                    total -= used_bytes(status_of[path])


class Prefetch:
    """Threads of this process that download the next tars. Nothing waits for them or needs them.

    They skip a tar that another process of the host is downloading.
    """

    def __init__(self):
        self._lock, self._num_threads = threading.Lock(), 0
        self._next: list[tuple[TarCache, Pull]] = []  # in reverse order

    def start(self, cache: TarCache, pulls: Sequence[Pull]) -> None:
        """Download these tars in this order instead of the ones before."""
        with self._lock:
            self._next = [(cache, pull) for pull in reversed(pulls)]
            while self._num_threads < NUM_PULLERS:
                self._num_threads += 1
                # A daemon thread, so that the program can exit without waiting for it.
                threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._next:
                    self._num_threads -= 1
                    return
                cache, pull = self._next.pop()
            # If this download fails, the process that needs the tar reports the reason.
            with contextlib.suppress(DataError, OSError):
                cache.pull(pull, waits=False)


PREFETCH = Prefetch()


# --- the folder of shards ---


@dataclass(frozen=True, eq=False)
class ServerFolder(ShardFolder):
    """A folder of shards on a server. `root` has its indexes and the cache."""

    server: Server
    cache: TarCache
    files: frozenset[str] | None  # names of the files in the folder; None: the server does not list them
    num_scans = NUM_SCANS

    def _has(self, name: str) -> bool:
        """Return whether the server has an optional file. Some servers report a missing file as "access denied"."""
        if self.files is not None:
            return name in self.files
        with contextlib.suppress(NotThereError):
            return bool(self.server.describe(name))
        return False

    def classes(self) -> str | None:
        if not self._has(CLASSES_FILE):
            return None
        return names_in(self.server.read(CLASSES_FILE), "surrogateescape", f"{self.title}/{CLASSES_FILE}")

    def older_indexes(self, paths: Sequence[Path]) -> Iterator[Index]:
        """Yield the server's index."""
        name = paths[0].name
        if not self._has(name):
            return
        copy = self.root / f"server-{name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        size = self.server.describe(name)["size"]
        with replacing(copy, shared=True) as file:
            for _, data in self.server.read_ranges(name, size, np.array([[0, size]])):
                file.write(data)
        index = open_index(copy)
        copy.unlink()  # the index stays mapped into memory
        if index:
            yield index

    def are_unchanged(self, table: ShardTable, tars: Sequence[ShardTar]) -> bool:
        """Return True, because the cache compares checksums when it downloads a tar."""
        return True

    def open(self, tar: ShardTar, checksum: bytes = b"") -> Tar:
        while True:
            self.cache.pull(Pull(tar, checksum))
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                self.cache.use(tar)
                return self.cache.open(tar)

    def storage(self, table: ShardTable, shuffle_buffer: int) -> "ServerStorage":
        return ServerStorage(self, table, shuffle_buffer)


class OpenTars:
    """The open tars of this process. A tar is closed when the last thread has finished reading from it."""

    def __init__(self):
        self._tars: dict[tuple[TarCache, ShardTar], CachedTar] = {}

    def get(self, cache: TarCache, tar: ShardTar) -> CachedTar:
        """Return an open tar. Raise FileNotFoundError if the cache has nothing of it."""
        opened = self._tars.get((cache, tar))
        if opened is None:
            # An open tar stays on the disk even after it is deleted to make room for this one.
            kept = [(key, each) for key, each in list(self._tars.items()) if not each.is_deleted()]
            self._tars = dict(kept[1 - MAX_OPEN_TARS :])
            cache.use(tar)
            opened = self._tars[cache, tar] = cache.open(tar)
        return opened

    def close(self, cache: TarCache, tar: ShardTar) -> None:
        self._tars.pop((cache, tar), None)


OPEN_TARS = OpenTars()


class ServerStorage(ShardStorage):
    """Images inside tars on a server. If several machines share the images, each downloads only the ones it reads."""

    def __init__(self, folder: ServerFolder, table: ShardTable, shuffle_buffer: int):
        super().__init__(folder, table, shuffle_buffer)
        self.cache = folder.cache
        # bool [rows] for each purpose: the images that this machine reads. Without any, it reads all of them.
        self._shares: dict[str, np.ndarray] = {}
        self._aim: tuple | None = None  # what is being prefetched

    def read_file(self, row: int, number: int) -> bytes:
        start, size, tar = int(self.table.offsets[row]), int(self.table.sizes[row]), self.table.tar(number)
        while True:
            with contextlib.suppress(FileNotFoundError):  # no process has downloaded it, or another process deleted it
                opened = OPEN_TARS.get(self.cache, tar)
                if opened.has(start, size):
                    return opened.read(start, size)
            OPEN_TARS.close(self.cache, tar)  # it may now be another file
            self.cache.pull(self.pull(number, self._rows_with(row)))

    def close_tar(self, number: int) -> None:
        OPEN_TARS.close(self.cache, self.table.tar(number))

    def _rows_with(self, row: int) -> np.ndarray | None:
        """Return bool [rows]: the images to download if this one is missing; None: all images."""
        if not self._shares:
            return None
        shares = [share for share in self._shares.values() if share[row]]
        rows = np.any(shares, axis=0) if shares else np.zeros(len(self), bool)
        rows[row] = True
        return rows

    def pull(self, number: int, rows: np.ndarray | None) -> Pull:
        """Return the download of these rows of a tar, or of the whole tar."""
        tar, checksum = self.table.tar(number), self.table.checksum(number)
        if rows is None:
            return Pull(tar, checksum)
        start, stop = self.table.starts[number : number + 2].tolist()
        chosen = start + np.flatnonzero(rows[start:stop])
        offsets = self.table.offsets[chosen]
        return Pull(tar, checksum, np.stack([offsets, offsets + self.table.sizes[chosen]], axis=1))

    def mask(self, part: ImageSet, indices: np.ndarray) -> np.ndarray:
        """Return bool [rows]: whether each row is one of these images of a part."""
        mask = np.zeros(len(self), bool)
        mask[indices if part.rows is None else part.rows[indices]] = True
        return mask

    def will_evaluate(self, part: ImageSet, indices: np.ndarray) -> None:
        if len(indices) < len(part):
            self._shares["evaluation"] = self.mask(part, indices)

    def will_read(self, part: ImageSet, share: Share, step: int) -> None:
        """Whenever a tar is done, prefetch the tars that are needed next, and the first tars of the next epoch."""
        epoch, position = share.order.place(step)
        pulls, last = pulls_in_turn(part, share, epoch)
        is_needed = last >= position
        aim = (share, epoch, int(is_needed.sum()))
        if aim == self._aim:
            return
        self._aim = aim
        if are_several(share):
            self._shares["training"] = self.mask(part, images_of(share, epoch))
        ahead = [*itertools.compress(pulls, is_needed), *pulls_in_turn(part, share, epoch + 1)[0]][:MOST_AHEAD]
        fits = np.cumsum([pull.num_bytes for pull in ahead]) <= SHARE_AHEAD * self.cache.limit
        ahead = ahead[: int(fits.sum())]
        for pull in reversed(ahead):
            self.cache.use(pull.tar)  # so that the next tar is deleted last, after all other tars
        PREFETCH.start(self.cache, ahead)


def tars_in_turn(part: ImageSet, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tars in the order in which an epoch reads them, and the position of the last image of each."""
    order = part.epoch_order(seed, epoch)
    rows = order if part.rows is None else part.rows[order]
    tar_of_position = np.searchsorted(part.storage.table.starts, rows, "right") - 1
    tars, first = np.unique(tar_of_position, return_index=True)
    last = len(order) - 1 - np.unique(tar_of_position[::-1], return_index=True)[1]
    in_turn = np.argsort(first)
    return tars[in_turn], last[in_turn]


def are_several(share: Share) -> bool:
    """Return whether there are several machines."""
    return len(share.ranks) < share.order.world_size


@functools.lru_cache(2)
def images_of(share: Share, epoch: int) -> np.ndarray:
    """Return the indices of the images that a machine reads in an epoch, in the order in which they are read."""
    first = epoch * share.order.steps_per_epoch
    steps = range(first, min(first + share.order.steps_per_epoch, share.end))
    pieces = (piece for step in steps for rank in share.ranks for piece in share.order.pieces(step, rank))
    return np.concatenate([np.zeros(0, np.int64), *(piece.indices for piece in pieces)])


@functools.lru_cache(2)
def pulls_in_turn(part: ImageSet, share: Share, epoch: int) -> tuple[list[Pull], np.ndarray]:
    """Return the downloads of this machine in the order in which an epoch reads the tars.

    The array has the position of the last image of each tar in the order of all machines.
    """
    tars, last = tars_in_turn(part, share.order.seed, epoch)
    rows = part.storage.mask(part, images_of(share, epoch)) if are_several(share) else None
    pulls = [part.storage.pull(number, rows) for number in tars.tolist()]
    is_read = np.array([pull.num_bytes > 0 for pull in pulls], bool)
    return list(itertools.compress(pulls, is_read)), last[is_read]


# --- opening ---


def read_remote_shards(
    config: Config, only_validation: bool, say: Callable[[str], None]
) -> tuple[Table | None, Table | None]:
    """Return training and validation shards on a server, or all shards and None."""
    check_keys(config, is_on_server=True)
    url, names = parse_address(config.DATA.DATA_PATH)
    server = Server(url, say)
    listed = list_files(server) if names is None else {}
    tars = find_tars(server, names or [name for name in listed if name.lower().endswith(".tar")], listed)
    if names and not {name.lower() for name in tars} & {*TRAIN_NAMES, *VAL_NAMES}:
        tars = {TRAIN_NAMES[0]: sum(tars.values(), [])}  # the URL names the tars, and no name says train or val
    root = caches_folder(config) / f"shards-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    cache, note = open_cache(config, server, root / "tars", tars)
    files = frozenset(listed) if names is None else None
    folder = ServerFolder(root, url, tars, (note,), server, cache, files)
    return read_from(folder, config, only_validation)


def list_files(server: Server) -> dict[str, dict]:
    """Return the facts about the files in the folder, and in its subfolders that are named like a part (train, val)."""
    listed = server.listing()
    folders = [name for name, facts in listed.items() if facts["type"] == "directory"]
    for name in folders:
        if name.lower() in (*TRAIN_NAMES, *VAL_NAMES):
            listed |= server.listing(name)
    return {name: facts for name, facts in listed.items() if name not in folders}


def find_tars(server: Server, names: Iterable[str], listed: Mapping[str, dict]) -> dict[str, list[ShardTar]]:
    """Return the tars of each part. `listed`: the facts that are known about some of them."""

    def describe(name: str) -> ShardTar:
        facts = listed.get(name, {})
        if facts.get("size") is None:
            facts = server.describe(name)
        version = next((str(facts[key]) for key in VERSION_KEYS if facts.get(key)), None)
        digest = hashlib.sha256(f"{facts['size']} {version}".encode()).hexdigest()
        return ShardTar(name, facts["size"], int(digest[:VERSION_DIGITS], 16))

    tars = defaultdict(list)
    with ThreadPoolExecutor(NUM_REQUESTS, "server") as pool:
        for tar in pool.map(describe, sorted(names)):
            tars[part_of(tar.name)].append(tar)
    return tars


def open_cache(
    config: Config, server: Server, folder: Path, tars: Mapping[str, Sequence[ShardTar]]
) -> tuple[TarCache, str]:
    """Return the cache of these tars, and a line for the log about its size.

    Its limit is DATA.REMOTE_CACHE_GB or, by default, the size of all tars if the disk can hold them.
    """
    parts = choose_parts(tars)
    total = sum(tar.size for name in (parts.train, parts.val) if name for tar in tars[name])
    free = free_bytes(folder)
    used = sum(map(used_bytes, TarCache(folder, server, 0).files().values()))
    limit = min(total / SHARE_AHEAD, SHARE_OF_DISK * (free + used))
    if config.DATA.REMOTE_CACHE_GB is not None:
        limit = config.DATA.REMOTE_CACHE_GB * 1e9
    cache = TarCache(folder, server, int(limit))
    note = (
        f"{server.url}: {format_bytes(total)} of tars; {folder} keeps up to {format_bytes(cache.limit)} of them, and "
        f"has {format_bytes(used)}; free disk space: {format_bytes(free)}"
    )
    return cache, note
