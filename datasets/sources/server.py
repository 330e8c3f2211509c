"""Requests to the server of `shards` at a URL. fsspec sends them, and they are retried for PATIENCE seconds."""

import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np

from utils.errors import DataError, needing
from utils.text import SCHEMES, redacted

MAX_TARS = 200_000  # largest number of tars in a URL
BRACES = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBERS = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
BLOCK = 16 << 20  # bytes per request; a broken connection loses at most this much
NUM_CONNECTIONS = 4  # concurrent requests for ranges of one tar
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


@dataclass(frozen=True)
class Server:
    """The folder at `url`. Threads and forked processes may share it, because each process has its own connections."""

    url: str
    say: Callable[[str], None]  # logs the first failures
    _failures: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __reduce__(self) -> tuple:
        return Server, (self.url, str)  # other processes print nothing

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def package(self) -> str:
        """The package that fsspec needs for this URL."""
        return PACKAGES[self.scheme]

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def listing(self, folder: str = "") -> dict[str, dict]:
        """Return the names of the files and folders in a folder, each with fsspec's facts (type, size, ...)."""
        url = self.url_of(f"{folder}/" if folder else "")
        entries = {}
        for entry in self._request(url, lambda files: files.ls(url, detail=True)):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            name = unquote(name) if self.package == "aiohttp" else name
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

    def read_ranges(self, name: str, size: int, ranges: np.ndarray) -> Iterator[tuple[int, bytes]]:
        """Yield the start and the bytes of these ranges of a file of this size.

        They are downloaded in groups of about BLOCK bytes. Each range is retried separately. A server that does not
        support ranges sends the whole file, which is then all that is yielded.
        """
        for group in grouped(ranges):
            contents: dict[int, bytes] = {}
            self._request(self.url_of(name), functools.partial(self._read_group, name, size, group, contents))
            for start in group[:, 0].tolist():
                if len(contents[start]) == size:
                    yield 0, contents[start]
                    return
                yield start, contents[start]

    def _read_group(self, name: str, size: int, group: np.ndarray, contents: dict[int, bytes], files: Any) -> None:
        """Add the missing ranges of a group to `contents`, {start: bytes}. Raise the first error after all requests."""
        starts, stops = np.array([pair for pair in group.tolist() if pair[0] not in contents]).T.tolist()
        # hf:// would otherwise read 5 MiB more than it is asked for.
        options = {"batch_size": NUM_CONNECTIONS} if files.async_impl else {"cache_type": "none"}
        results = files.cat_ranges([self.url_of(name)] * len(starts), starts, stops, on_error="return", **options)
        errors = []
        for start, stop, data in zip(starts, stops, results, strict=True):
            if isinstance(data, Exception):
                errors.append(data)
            elif len(data) in (stop - start, size):
                contents[start] = data
            else:
                errors.append(OSError(f"received {len(data):,} of {stop - start:,} bytes from offset {start:,}"))
        if errors:
            raise errors[0]

    def _request(self, url: str, task: Callable[[Any], T]) -> T:
        """Return the task's result. Retry while that may help; then raise DataError with the URL and the remedy."""
        import fsspec

        options = self._options()
        start, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                return task(fsspec.filesystem(self.scheme, **options))  # each process has its own, even after a fork
            except Exception as error:
                reason = self._raise_if_final(url, error)
            spent = time.monotonic() - start
            if spent + wait > PATIENCE:
                raise DataError(f"{url}: {reason}, tried for {spent:.0f} s; check the network and DATA.DATA_PATH")
            if (number := next(self._failures)) in (1, 10, 100, 1000):
                self.say(f"{url}: {reason}; trying again (failed requests of this process: {number})")
            time.sleep(wait * random.Random().uniform(0.5, 1.0))  # random, so that processes do not all retry at once
            wait = min(2 * wait, LONGEST_WAIT)

    def _raise_if_final(self, url: str, error: Exception) -> str:
        """Return the error without credentials. Raise DataError if a retry cannot fix it."""
        if self.package == "aiohttp" and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec raises FileNotFoundError for every failure to get a size
        reason, status = redacted(f"{type(error).__name__}: {error}".replace("\n", " ")), _status_of(error)
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or status in (401, 403):
            raise NotThereError(f"{url}: access is denied ({reason}); put credentials into {SCHEMES[self.scheme]}")
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise NotThereError(f"{url}: not found ({reason}); check the names in DATA.DATA_PATH (-data_path)")
        if status is not None and 400 <= status < 500 and status not in TRANSIENT_STATUS:
            raise DataError(f"{url}: {reason}; check the address in DATA.DATA_PATH (-data_path)")
        return reason

    def _options(self) -> dict:
        """Return the options of fsspec's file system. This class retries instead of the libraries."""
        with needing(self.package, f"DATA.DATA_PATH: {self.url}"):
            match self.package:
                case "s3fs":
                    import s3fs  # noqa: F401

                    limits = {"connect_timeout": SECONDS_TO_CONNECT, "read_timeout": SECONDS_OF_SILENCE}
                    once = {"retries": {"total_max_attempts": 1}}
                    return {"config_kwargs": limits | once, "use_listings_cache": False}
                case "gcsfs":
                    import gcsfs  # noqa: F401

                    return {"use_listings_cache": False}
                case "huggingface_hub":
                    import huggingface_hub  # noqa: F401

                    return {"use_listings_cache": False}
            import aiohttp

            timeout = aiohttp.ClientTimeout(
                total=SECONDS_PER_REQUEST, sock_connect=SECONDS_TO_CONNECT, sock_read=SECONDS_OF_SILENCE
            )
            session = {"timeout": timeout, "headers": {"Accept-Encoding": "identity"}, "trust_env": True}
            return {"client_kwargs": session, "simple_links": False}


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status code of an error from the libraries of fsspec, or None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    # The attributes of aiohttp's and of huggingface_hub's errors.
    return getattr(error, "status", getattr(response, "status_code", None))


def grouped(ranges: np.ndarray) -> Iterator[np.ndarray]:
    """Yield groups of these ranges, of about BLOCK bytes each. Longer ranges are divided.

    The first group has one range, which shows whether the server supports ranges.
    """
    parts = [
        (start, min(start + BLOCK, stop)) for first, stop in ranges.tolist() for start in range(first, stop, BLOCK)
    ]
    sizes = np.array([stop - start for start, stop in parts[1:]], np.int64)
    blocks = (np.cumsum(sizes) - sizes) // BLOCK
    edges = [1, *(np.flatnonzero(np.diff(blocks)) + 2).tolist()]
    yield from (group for group in np.split(np.array(parts, np.int64).reshape(-1, 2), edges) if len(group))
