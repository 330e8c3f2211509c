"""HTTP and S3 servers on this machine that serve a folder, and fail as a test tells them to."""

import base64
import contextlib
import functools
import html
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from tests.support.forks import DEADLINE

# An HTTP status to answer with; "cut": half of the body; "stall": half, then nothing; "empty": no body; "drop": no
# answer.
Fault = int | str | None
AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "photos"


class HttpFolder(ThreadingHTTPServer):
    """Serves a folder at `url`. Calls `fault(number, path)` at each request, counted from 1."""

    daemon_threads = True

    def __init__(self, root: Path, fault: Callable[[int, str], Fault] = lambda number, path: None, **abilities):
        """`abilities`: `lists` folders, supports `ranges`, needs a `password` (USER:PASSWORD), lists more `links`.

        `address` is the one at which it listens, in the network namespace of the calling thread.
        """
        self.root, self.fault = root, fault
        self.lists, self.ranges = abilities.get("lists", True), abilities.get("ranges", True)
        self.password: str | None = abilities.get("password")
        self.links: str = abilities.get("links", "")
        self.paths: list[str] = []  # paths of all requests
        self.num_faults = 0
        self.sent: Counter[tuple[str, str]] = Counter()  # bytes for each client and path
        self._lock, self._is_over = threading.Lock(), threading.Event()
        address = abilities.get("address", "127.0.0.1")
        super().__init__((address, 0), _Handler)
        self.url = f"http://{address}:{self.server_port}"

    def __enter__(self) -> "HttpFolder":
        threading.Thread(target=functools.partial(self.serve_forever, poll_interval=0.01), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._is_over.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Ignore errors: killed clients close their connections."""

    def stall(self) -> None:
        """Block until the server ends."""
        self._is_over.wait(DEADLINE)

    def count(self, client: str, path: str, num_bytes: int) -> None:
        with self._lock:
            self.sent[client, path] += num_bytes

    def next_fault(self, path: str) -> Fault:
        with self._lock:
            self.paths.append(path)
            fault = self.fault(len(self.paths), path)
            self.num_faults += fault is not None
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpFolder

    def do_GET(self) -> None:
        path = unquote(self.path)
        fault, file = self.server.next_fault(path), self.server.root / path.strip("/")
        if fault == "drop":
            self.close_connection = True
            return None
        if self.server.password and not self._is_known():
            return self._answer(401, b"")
        if isinstance(fault, int):
            return self._answer(fault, b"a fault")
        if file.is_dir():
            return self._list(file) if self.server.lists else self._answer(403, b"")
        if not file.is_file():
            return self._answer(404, b"")
        stat, status, first, count = file.stat(), 200, 0, -1
        about = {"ETag": f'"{stat.st_mtime_ns}"'}
        if self.server.ranges and (span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, status = int(span[1]), 206
            count = int(span[2]) + 1 - first if span[2] else -1
            if first >= stat.st_size:
                return self._answer(416, b"")
        with open(file, "rb") as opened:
            opened.seek(first)
            content = opened.read(count)
        return self._answer(status, b"" if fault == "empty" else content, about, fault)

    do_HEAD = do_GET

    def _list(self, folder: Path) -> None:
        """Respond with a page of links to the files of a folder."""
        names = (f"{each.name}/" if each.is_dir() else each.name for each in sorted(folder.iterdir()))
        links = "".join(f'<a href="{quote(name)}">{html.escape(name)}</a>\n' for name in names)
        self._answer(200, f"<html>{links}{self.server.links}</html>".encode(), {"Content-Type": "text/html"})

    def _answer(self, status: int, body: bytes, about: dict | None = None, fault: Fault = None) -> None:
        self.send_response(status)
        for key, value in (about or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body[: len(body) // 2] if fault else body
        self.server.count(self.client_address[0], unquote(self.path), len(body))
        self.wfile.write(body)
        if fault:
            self.wfile.flush()
            self.close_connection = True
        if fault == "stall":
            self.server.stall()

    def _is_known(self) -> bool:
        told = self.headers.get("Authorization", "").removeprefix("Basic ")
        return base64.b64decode(told).decode() == self.server.password

    def log_message(self, *words) -> None:
        """Print nothing to stderr."""


@contextlib.contextmanager
def s3_folder(root: Path, monkeypatch) -> Iterator[str]:
    """Serve a folder as a bucket of an S3 server, yield its s3:// URL, and set the environment for that server."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (AWS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # cached file systems of another test use another server
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for file in (each for each in root.rglob("*") if each.is_file()):
            client.put_object(Bucket=BUCKET, Key=f"set/{file.relative_to(root)}", Body=file.read_bytes())
        yield f"s3://{BUCKET}/set"
    finally:
        server.stop()
