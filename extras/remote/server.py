"""Requests to a folder of shards on a server through fsspec, retried for PATIENCE seconds, and the URLs of shards."""

import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote

from utils.errors import DataError, needing
from utils.text import SCHEMES, redacted

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
        found = {}
        for each in self._request(url, lambda files: files.ls(url, detail=True)):
            name = each["name"].rstrip("/").rpartition("/")[2]
            name = unquote(name) if PACKAGES[self.scheme] == "aiohttp" else name
            # The name becomes a file name in the cache, so the name must not lead out of the cache.
            if not name.startswith(".") and not set("/?#") & set(name):
                found[f"{folder}/{name}" if folder else name] = each
        return found

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
                words = self._raise_if_final(url, error)
            spent = time.monotonic() - start
            if spent + wait > self.patience:
                raise DataError(f"{url}: {words}, tried for {spent:.0f} s; check the network and DATA.DATA_PATH")
            self._num_failed += 1
            if self._num_failed in (1, 10, 100, 1000):
                self.say(f"{url}: {words}; trying again (failed requests of this process: {self._num_failed})")
            time.sleep(wait * random.Random().uniform(0.5, 1.0))  # random, so that processes do not all retry at once
            wait = min(2 * wait, LONGEST_WAIT)

    def _raise_if_final(self, url: str, error: Exception) -> str:
        """Return the error without credentials. Raise DataError if a retry cannot fix it."""
        if PACKAGES[self.scheme] == "aiohttp" and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec raises FileNotFoundError for every failure to get a size
        words, status = redacted(f"{type(error).__name__}: {error}".replace("\n", " ")), _status_of(error)
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__ or status in (401, 403):
            raise NotThereError(f"{url}: access is denied ({words}); put credentials into {SCHEMES[self.scheme]}")
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise NotThereError(f"{url}: not found ({words}); check the names in DATA.DATA_PATH (-data_path)")
        if status is not None and 400 <= status < 500 and status not in TRANSIENT_STATUS:
            raise DataError(f"{url}: {words}; check the address in DATA.DATA_PATH (-data_path)")
        return words

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
    return getattr(
        error, "status", getattr(response, "status_code", None)
    )  # attributes of aiohttp's and of huggingface_hub's errors
