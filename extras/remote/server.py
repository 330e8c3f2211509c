"""Access to a folder of shards on a server through fsspec: its address, its listing, and the bytes of its files.

A failed request is retried for a limited time. fsspec's own file caches are not used: they write to the final name, so
that a killed download looks complete, and their size has no limit.
"""

import asyncio
import errno
import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote

from utils.errors import DataError, needing
from utils.text import format_bytes, redacted

MAX_TARS, MAX_BRACES = 200_000, 20  # largest numbers of tars and of braces in a URL
BRACES = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\}")
NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
BLOCK = 16 << 20  # bytes per request; a broken connection loses at most this much
SECONDS_TO_CONNECT, SECONDS_OF_SILENCE = 10.0, 30.0
PATIENCE = 120.0  # seconds for which a failing request is retried before the run ends
SHORTEST_LIMIT = 60.0  # seconds; a request always gets at least this long in total
# The largest responses in bytes, for tars and for other files, because some servers never stop sending.
MOST_OF_A_TAR, MOST_OF_ANOTHER = 2**32, 2**28
SECONDS_TO_FIND = 3.0  # timeout for a server that has never answered, usually because its name is mistyped
FIRST_WAIT, LONGEST_WAIT = 0.05, 15.0  # seconds between retries; the wait doubles each time
PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs"}
# Error classes of aiohttp, botocore and ssl, by name, so that none of these packages needs to be imported.
NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
NO_CREDENTIALS |= {"SSOError", "TokenRetrievalError", "ConfigParseError", "ConfigNotFound", "InvalidConfigError"}
NO_CONNECTION = {"ClientConnectorError", "EndpointConnectionError", "gaierror", "ConnectionRefusedError"}
# Errors that a retry cannot fix: bad certificates, malformed names, redirects to other schemes, redirect loops.
LASTING = {"ClientSSLError", "ClientConnectorCertificateError", "SSLError", "SSLCertVerificationError"}
LASTING |= {"ParamValidationError", "InvalidURL", "NonHttpUrlClientError", "ValueError", "RecursionError"}
TRANSIENT_STATUS = {408, 421, 425, 429}  # status codes below 500 after which a retry can succeed
# errno values from s3fs that a retry cannot fix: another region, a malformed request, a malformed name.
LASTING_ERRNO = {errno.EINVAL, errno.ENAMETOOLONG, errno.EPERM, getattr(errno, "EREMCHG", errno.EINVAL)}
# Remedies for the error messages: the first for HTTP, the second for S3.
CREDENTIALS = (
    "if the server needs a password, put the password into ~/.netrc; otherwise ask the server's administrator",
    "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, set FSSPEC_S3_ANON=true",
)
ADDRESS = (
    "check the host in DATA.DATA_PATH, the network, HTTPS_PROXY behind a proxy, and SSL_CERT_FILE",
    "check the bucket in DATA.DATA_PATH, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, and the network",
)
T = TypeVar("T")


class Address(NamedTuple):
    """The folder on the server and the names of its tars; None means all tars that the server lists."""

    folder: str
    names: list[str] | None


def parse_address(url: str) -> Address:
    """Parse the URL of a folder, a tar, or several tars: `https://server/{train-{000000..000146},val-{00..06}}.tar`."""
    before = url.partition("{")[0]
    if before == url and not url.lower().endswith(".tar"):
        return Address(url.rstrip("/"), None)
    folder = before.rpartition("/")[0]
    names = [] if url.count("{") > MAX_BRACES else list(itertools.islice(expand(url[len(folder) + 1 :]), MAX_TARS + 1))
    if len(names) > MAX_TARS or url.count("{") > MAX_BRACES:
        raise DataError(
            f"DATA.DATA_PATH: {url} expands to more than {MAX_TARS:,} tars, or has over {MAX_BRACES} braces; use a "
            "simpler pattern"
        )
    names = sorted(set(names))
    for name in names or [url]:
        if not name.lower().endswith(".tar") or ".." in name.split("/") or set("{}") & set(name):
            raise DataError(
                f"DATA.DATA_PATH: {url} expands to {name!r}, which is not a .tar below {folder}; write for example "
                "train-{000000..000146}.tar"
            )
    return Address(folder, names)


def expand(pattern: str) -> Iterator[str]:
    """Yield the expansions of a pattern: {000..146} is a range with leading zeros, {train,val-{0..9}} a choice."""
    braces = BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    choices: Iterable[str] = braces[1].split(",")
    if numbers := NUMBERS.fullmatch(braces[1]):
        first, last = (int(each[:18]) for each in numbers.groups())  # 18 digits already exceed MAX_TARS
        choices = (f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1))
    for choice in choices:
        yield from expand(f"{pattern[: braces.start()]}{choice}{pattern[braces.end() :]}")


# --- errors ---


class ShortAnswerError(Exception):
    """An error for a response with fewer bytes than requested."""


class NotThereError(DataError):
    """An error for a file or folder that does not exist or that the user is not allowed to read."""


class Trouble(NamedTuple):
    """A failed request: the message (without credentials) and remedy for the user, and whether a retry would fail."""

    words: str
    remedy: str
    lasts: bool
    kind: type[DataError] = DataError  # the exception to raise


def judge(error: BaseException, scheme: str) -> Trouble:
    """Return the message and remedy for an error of fsspec or its libraries, and whether a retry would fail."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec raises FileNotFoundError for every failure to get the size of a file
    names, status = {each.__name__ for each in type(error).__mro__}, _status_of(error)
    words = redacted(f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " "))
    if names & NO_CREDENTIALS or isinstance(error, PermissionError) or status in (401, 403):
        return Trouble(f"access is denied ({words})", CREDENTIALS[scheme == "s3"], True, NotThereError)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Trouble(f"not found ({words})", "check the names in DATA.DATA_PATH (-data_path)", True, NotThereError)
    is_refused = status is not None and status < 500 and status not in TRANSIENT_STATUS
    lasts = is_refused or isinstance(error, OSError) and error.errno in LASTING_ERRNO or bool(names & LASTING)
    return Trouble(words, ADDRESS[scheme == "s3"], lasts)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status code of an error from aiohttp or botocore, or None if it has none."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(error, "status", None)


# --- the server ---


class ListedFile(NamedTuple):
    """A file or folder in a listing. `size` and `version` are None if the listing does not include them."""

    name: str  # without the folder
    is_folder: bool
    size: int | None = None
    version: str | None = None


class Server:
    """The folder at `url`. Threads and forked processes may share it, because each process has its own connections."""

    def __init__(self, url: str, patience: float, say: Callable[[str], None]):
        """Prepare requests. `patience`: seconds for which a request is retried; `say`: logs the first failures."""
        self.url, self.patience, self.say = url.rstrip("/"), patience, say
        self.scheme = url.partition("://")[0]
        self._num_failed, self._has_answered = 0, False
        self._options = self._make_options()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"say": str, "_options": None}  # other processes print nothing

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._options = self._make_options()  # not pickled, because they contain a local class

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def listing(self, folder: str = "") -> list[ListedFile]:
        """Return the files and folders in a folder."""
        url = self.url_of(folder) + "/"
        found = []
        for each in self._request(url, lambda files: files.ls(url, detail=True)):
            name = each["name"].rstrip("/").rpartition("/")[2]
            name, no_file = (name, "/") if self.scheme == "s3" else (unquote(name), "/?#")
            # The name becomes a file name in the cache, so the name must not lead out of the cache.
            if not name.startswith(".") and not set(no_file) & set(name):
                found.append(ListedFile(name, each["type"] == "directory", each.get("size"), _version_of(each)))
        return found

    def describe(self, name: str) -> ListedFile:
        """Return the size and version of a file."""
        info = self._request(self.url_of(name), lambda files: files.info(self.url_of(name)))
        if info.get("size") is None:
            raise DataError(f"{self.url_of(name)}: the server does not report the file's size; use another server")
        return ListedFile(name, False, info["size"], _version_of(info))

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        return self._request(self.url_of(name), lambda files: files.cat_file(self.url_of(name)))

    def copy(self, name: str, size: int, file: BinaryIO, since: float | None = None) -> None:
        """Download a file of this size in requests of BLOCK bytes. Each request is retried separately.

        `since`: the time.monotonic() when the wait for this file began, if the caller waited for another process first.
        """
        url = self.url_of(name)
        while (start := file.tell()) < size:
            end = min(start + BLOCK, size)

            def read(files: Any, start: int = start, end: int = end) -> bytes:
                data = files.cat_file(url, start=start, end=end)
                if len(data) == size:  # a server without range requests sends the whole file
                    return data[start:]
                if len(data) != end - start:
                    raise ShortAnswerError(f"received {len(data):,} of {end - start:,} bytes from offset {start:,}")
                return data

            file.write(self._request(url, read, since))
            since = None

    def _request(self, url: str, task: Callable[[Any], T], since: float | None = None) -> T:
        """Return the task's result. Retry while that may help; then raise DataError with the URL and the remedy."""
        import fsspec

        start, wait = time.monotonic() if since is None else since, FIRST_WAIT
        while True:
            try:
                found = task(fsspec.filesystem(self.scheme, **self._options))  # one per process, even after a fork
                self._has_answered = True
                return found
            except Exception as error:
                trouble, names = judge(error, self.scheme), {each.__name__ for each in type(error).__mro__}
            is_found = self._has_answered or not names & NO_CONNECTION
            patience = self.patience if is_found else min(self.patience, SECONDS_TO_FIND)
            spent = time.monotonic() - start
            if trouble.lasts or spent + wait > patience:
                tried = "" if trouble.lasts else f", tried for {spent:.0f} s"
                raise trouble.kind(f"{url}: {trouble.words}{tried}; {trouble.remedy}")
            self._num_failed += 1
            if self._num_failed in (1, 10, 100, 1000):
                self.say(f"{url}: {trouble.words}; trying again (failed requests of this process: {self._num_failed})")
            time.sleep(wait * random.Random().uniform(0.5, 1.0))  # random, so that processes do not all retry at once
            wait = min(2 * wait, LONGEST_WAIT)

    def _make_options(self) -> dict:
        package = PACKAGES[self.scheme]
        with needing(package, f"DATA.DATA_PATH: {self.url}"):
            __import__(package)
        silence = min(SECONDS_OF_SILENCE, self.patience)
        if self.scheme == "s3":
            # botocore makes one attempt, because this class retries. By default s3fs makes five within two seconds.
            limits = {"connect_timeout": SECONDS_TO_CONNECT, "read_timeout": silence}
            return {"config_kwargs": limits | {"retries": {"total_max_attempts": 1}}, "use_listings_cache": False}
        import aiohttp

        most = max(self.patience, SHORTEST_LIMIT)  # seconds per request; some servers send a byte every few seconds
        timeout = aiohttp.ClientTimeout(total=most, sock_connect=SECONDS_TO_CONNECT, sock_read=silence)
        headers = {"Accept-Encoding": "identity"}
        return {
            "client_kwargs": {
                "timeout": timeout,
                "headers": headers,
                "trust_env": True,
                "response_class": response_class(silence),
            },
            "simple_links": False,
        }


@functools.lru_cache
def response_class(seconds: float) -> type:
    """Return a response class for aiohttp that waits `seconds` for the headers and limits the size of the body."""
    import aiohttp

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            async with asyncio.timeout(seconds):  # endless headers never trigger the read timeout
                return await super().start(connection)

        async def read(self) -> bytes:
            most = MOST_OF_A_TAR if self.url.path.endswith(".tar") else MOST_OF_ANOTHER
            content = bytearray()
            async for chunk in self.content.iter_any():
                content += chunk
                if len(content) > most:
                    self.close()
                    raise ValueError(f"the response is larger than {format_bytes(most)}")
            return bytes(content)

        async def text(self, encoding: str | None = None, errors: str = "replace") -> str:
            return (await self.read()).decode(encoding or "utf-8", errors)

    return Response


def _version_of(info: dict) -> str | None:
    return next((str(info[key]) for key in ("ETag", "LastModified", "Last-Modified") if info.get(key)), None)
