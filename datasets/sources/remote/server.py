"""A folder on a server, by fsspec: its listing, and bytes of its files, each request repeated while the server fails."""

import random
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote

from datasets.sources.remote.trouble import NotThereError, ShortAnswerError, Trouble, judge
from utils.errors import DataError

BLOCK = 16 << 20  # bytes of a request: what is lost when a connection breaks
SECONDS_TO_CONNECT, SECONDS_OF_SILENCE = 10.0, 30.0
FIRST_WAIT, LONGEST_WAIT = 0.05, 15.0  # seconds between tries, doubled from one to the next
SECONDS_TO_FIND = 3.0  # for which a server is looked for that has never answered
PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs"}
T = TypeVar("T")


class Listed(NamedTuple):
    """A file or folder of a listing. `size` and `version` are None where the listing does not say them."""

    name: str  # without the folder's
    is_folder: bool
    size: int | None = None
    version: str | None = None


class Server:
    """The folder at `url`. Threads and forked processes may share one: fsspec keeps connections of each process."""

    def __init__(self, url: str, patience: float, say: Callable[[str], None]):
        """`patience`: seconds for which a request is repeated; `say` is told of the first failures."""
        self.url, self.patience, self.say = url.rstrip("/"), patience, say
        self.scheme = url.partition("://")[0]
        self._has_answered, self._num_failed = False, 0
        self._options = self._make_options()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"say": _say_nothing}

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def listing(self, folder: str = "") -> list[Listed]:
        """The files and folders in a folder."""
        url = self.url_of(folder) + "/"
        found = []
        for each in self._request(url, lambda files: files.ls(url, detail=True)):
            name = each["name"].rstrip("/").rpartition("/")[2]
            name = name if self.scheme == "s3" else unquote(name)
            # It becomes the name of a file here, and must not lead out of the cache.
            if "/" not in name and not name.startswith("."):
                found.append(Listed(name, each["type"] == "directory", each.get("size"), _version_of(each)))
        return found

    def describe(self, name: str) -> Listed:
        """Size and version of a file."""
        info = self._request(self.url_of(name), lambda files: files.info(self.url_of(name)))
        if info.get("size") is None:
            raise DataError(f"{self.url_of(name)}: the server does not tell its size; use another server")
        return Listed(name, False, info["size"], _version_of(info))

    def read(self, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        try:
            return self._request(self.url_of(name), lambda files: files.cat_file(self.url_of(name)))
        except NotThereError:
            return None

    def copy(self, name: str, size: int, file: BinaryIO) -> None:
        """Write a file of this size, in requests of BLOCK bytes, which are repeated one by one."""
        url = self.url_of(name)
        while (start := file.tell()) < size:
            end = min(start + BLOCK, size)

            def read(files: Any, start: int = start, end: int = end) -> bytes:
                data = files.cat_file(url, start=start, end=end)
                if len(data) == size:  # also the answer of a server that knows no ranges
                    return data[start:]
                if len(data) != end - start:
                    raise ShortAnswerError(f"{len(data):,} of {end - start:,} bytes from byte {start:,} on")
                return data

            file.write(self._request(url, read))

    def _request(self, url: str, task: Callable[[Any], T]) -> T:
        """The task's result, tried again while that may help; DataError with the URL and the remedy otherwise."""
        start, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                result = task(self._files())
                self._has_answered = True
                return result
            except Exception as error:
                trouble = judge(error, self.scheme)
            spent = time.monotonic() - start
            patience = self.patience
            if trouble.no_connection and not self._has_answered:
                patience = min(patience, SECONDS_TO_FIND)
            if trouble.lasts or spent + wait > patience:
                raise _failure(url, trouble, spent)
            self._num_failed += 1
            if self._num_failed in (1, 10, 100, 1000):
                self.say(f"{url}: {trouble.words}; trying again (failed requests of this process: {self._num_failed})")
            time.sleep(wait * random.Random().uniform(0.5, 1.0))  # not in step with other processes
            wait = min(2 * wait, LONGEST_WAIT)

    def _files(self) -> Any:
        """The file system of this process, which fsspec makes anew after a fork."""
        import fsspec

        return fsspec.filesystem(self.scheme, **self._options)

    def _make_options(self) -> dict:
        package = PACKAGES[self.scheme]
        try:
            __import__(package)
        except ImportError as error:
            raise DataError(
                f"DATA.DATA_PATH: {self.url} is read with {package}, which cannot be imported ({error}); "
                f"pip install {package}"
            ) from error
        silence = min(SECONDS_OF_SILENCE, self.patience)
        if self.scheme == "s3":
            # One try of botocore, as tries are counted here; s3fs has five of its own, within two seconds.
            return {
                "config_kwargs": {
                    "connect_timeout": SECONDS_TO_CONNECT,
                    "read_timeout": silence,
                    "retries": {"total_max_attempts": 1},
                },
                "use_listings_cache": False,
            }
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS_TO_CONNECT, sock_read=silence)
        headers = {"Accept-Encoding": "identity"}
        return {"client_kwargs": {"timeout": timeout, "headers": headers, "trust_env": True}, "simple_links": False}


def _failure(url: str, trouble: Trouble, spent: float) -> DataError:
    tried = "" if trouble.lasts else f", tried for {spent:.0f} s (DATA.REMOTE_PATIENCE)"
    return trouble.kind(f"{url}: {trouble.words}{tried}; {trouble.remedy}")


def _version_of(info: dict) -> str | None:
    return next((str(info[key]) for key in ("ETag", "LastModified", "Last-Modified") if info.get(key)), None)


def _say_nothing(line: str) -> None:
    """Of a copy in another process."""
