"""`shards` at a URL: downloads whole tars into a cache of limited size, which all processes of a host share.

fsspec sends the requests, which are retried for PATIENCE seconds.

A file's name contains the version of the tar, so a file under its final name is current and complete. A tar is written
to a locked file `.NAME.part` and then renamed. fsspec's own file caches are not used: they write to the final name, so
that a killed download looks complete, and their size has no limit.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

import numpy as np

from configs.schema import Config
from datasets.image_set import ImageSet, Table
from datasets.index import ENDING, Index, caches_folder
from datasets.sources import shards
from datasets.sources.layout import TRAIN_NAMES, VAL_NAMES, choose_parts
from datasets.sources.shards import CLASSES_FILE, ShardFolder, ShardStorage, ShardTable, ShardTar
from datasets.sources.tar import Tar
from utils.errors import DataError, cause_of, needing
from utils.files import free_bytes, locked, names_in, replacing, sync
from utils.text import SCHEMES, format_bytes, redacted

# --- requests to the server ---


MAX_TARS = 200_000  # largest number of tars in a URL
BRACES = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBERS = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
BLOCK = 16 << 20  # bytes per request; a broken connection loses at most this much
PATIENCE = 120.0  # seconds for which a failing request is retried before the run ends
SECONDS_TO_CONNECT, SECONDS_OF_SILENCE, SECONDS_PER_REQUEST = 10.0, 30.0, 120.0
FIRST_WAIT, LONGEST_WAIT = 0.05, 15.0  # seconds between retries; the wait doubles each time
PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}
TRANSIENT_STATUS = {408, 425, 429}  # status codes below 500 after which a retry can succeed
T = TypeVar("T")


def parse_address(url: str) -> tuple[str, list[str] | None]:
    """Return the folder of a URL and the names of its tars, or None if the URL names no tars.

    Several tars are written in braces: `https://server/{train-{000000..000146},val-{00..06}}.tar`.
    """
    before = url.partition("{")[0]
    if before == url and not url.lower().endswith(".tar"):
        return url.rstrip("/"), None
    folder = before.rpartition("/")[0]
    names = list(itertools.islice(expand(url[len(folder) + 1 :]), MAX_TARS + 1))
    if len(names) > MAX_TARS:
        raise DataError(f"DATA.DATA_PATH: {url} expands to more than {MAX_TARS:,} tars; use a simpler pattern")
    for name in names or [url]:
        if not name.lower().endswith(".tar") or ".." in name.split("/") or set("{}") & set(name):
            raise DataError(
                f"DATA.DATA_PATH: {url} expands to {name!r}, which is not a .tar below {folder}; write for example "
                "train-{000000..000146}.tar"
            )
    return folder, sorted(set(names))


def expand(pattern: str) -> Iterator[str]:
    """Yield the expansions of a pattern: {000..146} is a range with leading zeros, {train,val-{0..9}} a choice."""
    braces = BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    if numbers := NUMBERS.fullmatch(braces[1]):
        choices = (f"{number:0{len(numbers[1])}d}" for number in range(int(numbers[1]), int(numbers[2]) + 1))
    for choice in choices:
        yield from expand(f"{pattern[: braces.start()]}{choice}{pattern[braces.end() :]}")


class NotThereError(DataError):
    """An error for a file or folder that does not exist or that the user is not allowed to read."""


class Server:
    """The folder at `url`. Threads and forked processes may share it, because each process has its own connections."""

    def __init__(self, url: str, say: Callable[[str], None]):
        """Prepare requests. `say` logs the first failures."""
        self.url, self.say, self.patience = url, say, PATIENCE
        self.scheme = url.partition("://")[0]
        self._num_failed, self._options = 0, self._make_options()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"say": str}  # other processes print nothing

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def listing(self, folder: str = "") -> dict[str, dict]:
        """Return the names of the files and folders in a folder, each with fsspec's facts (type, size, ...)."""
        url = self.url_of(f"{folder}/" if folder else "")
        entries = {}
        for entry in self._request(url, lambda files: files.ls(url, detail=True)):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            name = unquote(name) if PACKAGES[self.scheme] == "aiohttp" else name
            # The name becomes a file name in the cache, so the name must not lead out of the cache.
            if not name.startswith(".") and not set("/?#") & set(name):
                entries[f"{folder}/{name}" if folder else name] = entry
        return entries

    def describe(self, name: str) -> dict:
        """Return fsspec's facts about a file."""
        facts = self._request(self.url_of(name), lambda files: files.info(self.url_of(name)))
        if facts.get("size") is None:
            raise DataError(f"{self.url_of(name)}: the server does not report the file's size; use another server")
        return facts

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        return self._request(self.url_of(name), lambda files: files.cat_file(self.url_of(name)))

    def copy(self, name: str, size: int, file: BinaryIO) -> None:
        """Download a file of this size in requests of BLOCK bytes. Each request is retried separately."""
        url = self.url_of(name)

        def read(files: Any) -> bytes:
            data = files.cat_file(url, start=start, end=end)
            data = data[start:end] if len(data) == size else data  # a server without ranges sends the whole file
            if len(data) != end - start:
                raise OSError(f"received {len(data):,} of {end - start:,} bytes from offset {start:,}")
            return data

        while (start := file.tell()) < size:
            end = min(start + BLOCK, size)
            file.write(self._request(url, read))

    def _request(self, url: str, task: Callable[[Any], T]) -> T:
        """Return the task's result. Retry while that may help; then raise DataError with the URL and the remedy."""
        import fsspec

        start, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                return task(fsspec.filesystem(self.scheme, **self._options))  # one per process, even after a fork
            except Exception as error:
                reason = self._raise_if_final(url, error)
            spent = time.monotonic() - start
            if spent + wait > self.patience:
                raise DataError(f"{url}: {reason}, tried for {spent:.0f} s; check the network and DATA.DATA_PATH")
            self._num_failed += 1
            if self._num_failed in (1, 10, 100, 1000):
                self.say(f"{url}: {reason}; trying again (failed requests of this process: {self._num_failed})")
            time.sleep(wait * random.Random().uniform(0.5, 1.0))  # random, so that processes do not all retry at once
            wait = min(2 * wait, LONGEST_WAIT)

    def _raise_if_final(self, url: str, error: Exception) -> str:
        """Return the error without credentials. Raise DataError if a retry cannot fix it."""
        if PACKAGES[self.scheme] == "aiohttp" and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec raises FileNotFoundError for every failure to get a size
        reason, status = redacted(f"{type(error).__name__}: {error}".replace("\n", " ")), _status_of(error)
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or status in (401, 403):
            raise NotThereError(f"{url}: access is denied ({reason}); put credentials into {SCHEMES[self.scheme]}")
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise NotThereError(f"{url}: not found ({reason}); check the names in DATA.DATA_PATH (-data_path)")
        if status is not None and 400 <= status < 500 and status not in TRANSIENT_STATUS:
            raise DataError(f"{url}: {reason}; check the address in DATA.DATA_PATH (-data_path)")
        return reason

    def _make_options(self) -> dict:
        """Return the options of fsspec's file system. This class retries instead of the libraries."""
        package = PACKAGES[self.scheme]
        with needing(package, f"DATA.DATA_PATH: {self.url}"):
            __import__(package)
        if package == "s3fs":
            limits = {"connect_timeout": SECONDS_TO_CONNECT, "read_timeout": SECONDS_OF_SILENCE}
            return {"config_kwargs": limits | {"retries": {"total_max_attempts": 1}}, "use_listings_cache": False}
        if package != "aiohttp":
            return {"use_listings_cache": False}
        import aiohttp

        seconds = {"total": SECONDS_PER_REQUEST, "sock_connect": SECONDS_TO_CONNECT, "sock_read": SECONDS_OF_SILENCE}
        session = {"timeout": aiohttp.ClientTimeout(**seconds), "headers": {"Accept-Encoding": "identity"}}
        return {"client_kwargs": session | {"trust_env": True}, "simple_links": False}


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status code of an error from the libraries of fsspec, or None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # The attributes of aiohttp's and of huggingface_hub's errors.
    return getattr(error, "status", getattr(response, "status_code", None))


# --- the cache of tars ---


NUM_REQUESTS = 32  # concurrent requests for sizes
NUM_SCANS = 4  # tars that are downloaded concurrently for the index
NUM_PULLERS = 4  # prefetch threads per process; each downloads one tar at a time
MOST_AHEAD = 256  # largest number of tars to prefetch
SHARE_AHEAD = 0.8  # fraction of the cache's limit for prefetched tars; the rest is for other tars, such as validation
SHARE_OF_DISK = 0.8  # default limit of the cache, as a fraction of the free disk space plus the size of the cache
PART = ".part"  # ending of incomplete files
VERSION_KEYS = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified")  # of S3 and HTTP, GS, HF, others
VERSION_DIGITS = 12  # hexadecimal digits of the version in file names


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
        status_of = {}
        for path in self.folder.rglob("*"):
            if path.name.endswith((".tar", f".tar{PART}")):
                finished = path.with_name(path.name.removeprefix(".").removesuffix(PART))
                for name in (path, finished):  # a download may end between the listing and stat
                    with contextlib.suppress(FileNotFoundError):
                        status_of[name] = name.stat()
                        break
        return status_of

    def make_room(self) -> None:
        """Delete the least recently used tars until the cache is within its limit."""
        status_of = self.files()
        total = sum(each.st_size for each in status_of.values())
        for path in sorted(status_of, key=lambda path: status_of[path].st_mtime_ns):
            if total > self.limit and path.suffix != PART:
                path.unlink(missing_ok=True)
                total -= status_of[path].st_size

    def remove_left(self) -> None:
        """Remove partial files that no process is writing."""
        for part in (path for path in self.files() if path.suffix == PART):
            with contextlib.suppress(OSError), locked(part) as file:
                if file is not None:
                    part.unlink()


# --- the folder of shards ---


@functools.lru_cache(2)
def tars_in_turn(part: ImageSet, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tars in the order in which an epoch reads them, and the position of the last image of each."""
    order = part.epoch_order(seed, epoch)
    rows = order if part.rows is None else part.rows[order]
    tar_of_position = np.searchsorted(part.storage.table.starts, rows, "right") - 1
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
        known_by = hashlib.sha256(url.encode()).hexdigest()[:16]
        super().__init__(caches_folder(config) / f"shards-{known_by}", config)
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
        tars = defaultdict(list)
        with ThreadPoolExecutor(NUM_REQUESTS, "server") as pool:
            for tar in pool.map(self._describe, names):
                tars[shards.part_of(tar.name)].append(tar)
        if self._names and not {name.lower() for name in tars} & {*TRAIN_NAMES, *VAL_NAMES}:
            tars = {TRAIN_NAMES[0]: sum(tars.values(), [])}  # the URL names the tars, and no name says train or val
        parts = choose_parts(tars)
        self._set_limit([tar for name in (parts.train, parts.val) if name for tar in tars[name]])
        return tars

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
            f"{format_bytes(self.cache.limit)} of them, and has {format_bytes(used)}; free disk space: "
            f"{format_bytes(free)}"
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
        indexes = super().older_indexes([copy], part)
        copy.unlink()  # the index stays mapped into memory
        return indexes

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
                    f"(remove {shards.part_of(tar.name)}{ENDING}, or run halfstep make-shards again), and start again "
                    "with -resume to continue"
                )

        self.cache.pull(tar, check, waits)

    def will_read(self, storage: ShardStorage, part: ImageSet, seed: int, epoch: int, position: int) -> None:
        """Whenever a tar is done, prefetch the tars that are needed next, and the first tars of the next epoch."""
        tars, last = tars_in_turn(part, seed, epoch)
        needed = tars[last >= position]
        aim = (seed, epoch, len(needed))
        if aim == self._aim:
            return
        self._aim = aim
        numbers = [*needed.tolist(), *tars_in_turn(part, seed, epoch + 1)[0].tolist()][:MOST_AHEAD]
        checksums = storage.table.checksums()
        tars = [(storage.table.tar(number), checksums[number]) for number in numbers]
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


def read_remote_shards(
    config: Config, only_validation: bool, say: Callable[[str], None]
) -> tuple[Table | None, Table | None]:
    """Return training and validation shards on a server, or all shards and None."""
    return shards.read_from(ServerFolder(config, say), config, only_validation)
