"""The cache of tars from a server: deletion, syncing before renaming, timeouts, and retries."""

import contextlib
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from datasets import load_image_sets
from datasets.sources.shards import ShardTar
from extras.remote import server as asked
from extras.remote import shards as remote_shards
from extras.remote.server import Server
from extras.remote.shards import TarCache
from tests.support.image_sets import load, make_set, settings, shades
from tests.support.refusals import refused
from tests.support.servers import HttpFolder
from utils.errors import DataError

pytestmark = pytest.mark.slow

SIZE = 1000


@pytest.fixture
def cache(tmp_path) -> TarCache:
    def copy(name, size, file, since):
        file.write(bytes(size))

    return TarCache(tmp_path, SimpleNamespace(copy=copy, url_of=str), limit=10 * SIZE)


def tar(name: str) -> ShardTar:
    return ShardTar(name, SIZE, 1)


def test_full_cache_drops_the_least_recently_used_tar(cache):
    one, two = tar("a.tar"), tar("b.tar")
    for each in (one, two):
        cache.pull(each)
        os.utime(cache.path(each), (1, 1))
    cache.use(one)
    cache.limit = SIZE
    cache.make_room()
    assert cache.holds(one) and not cache.holds(two)


def test_space_of_cached_tars_is_counted_as_available_disk_space(tmp_path, monkeypatch):
    make_set(tmp_path / "set")
    with HttpFolder(tmp_path / "set") as server:
        config = settings("shards", server.url, CACHE_PATH=str(tmp_path / "c"), SHUFFLE_BUFFER=1)
        held = load_image_sets(config)[0].folder.cache.size()
        monkeypatch.setattr(remote_shards, "free_bytes", lambda folder: held)
        assert load_image_sets(config)[0].folder.cache.limit >= held


def test_downloaded_tar_is_synced_before_it_is_renamed(cache, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("synced") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("named") or replace(*paths))
    cache.pull(tar("a.tar"))
    assert done[:2] == ["synced", "named"]


def test_silent_server_times_out():
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}/set", 1.0, str)
        with pytest.raises(DataError):
            pool.submit(server.read, "classes.txt").result(60)


def test_waits_between_server_requests_double_at_first(tmp_path, monkeypatch):
    waits, now = [], [0.0]

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(asked, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(asked.random.Random, "uniform", lambda self, low, high: 1.0)
    (tmp_path / "classes.txt").write_text("cat\n")
    with HttpFolder(tmp_path) as folder:
        server = Server(folder.url, 120.0, str)
        server.read("classes.txt")
    server.url = "http://127.0.0.1:9/set"
    with pytest.raises(DataError):  # it has answered before, so its name is right and it may return
        server.read("classes.txt")
    assert waits[:4] == [0.05, 0.1, 0.2, 0.4] and 100 < sum(waits) <= 120


def test_threads_share_one_timeout_for_a_truncated_tar(tmp_path, monkeypatch):
    """Each thread reads one image of the tar."""
    tries, now, lock = [], [0.0], threading.Lock()

    def sleep(seconds):
        with lock:
            now[0] += seconds

    monkeypatch.setattr(asked, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(remote_shards, "time", asked.time)
    make_set(tmp_path / "set", num_shards=1)
    with HttpFolder(tmp_path / "set", fault=lambda number, path: tries.append(path) or "cut") as server:
        size = (tmp_path / "set/train-000000.tar").stat().st_size
        cache = TarCache(tmp_path / "cache", Server(server.url, 60.0, str), limit=10 * size)
        failed = []

        def read():
            try:
                cache.pull(ShardTar("train-000000.tar", size, 1))
            except DataError:
                failed.append(now[0])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: read(), range(8)))
    assert len(failed) == 8 and max(failed) < 2 * 60


@pytest.mark.parametrize("what", ["listing", "file"])
def test_endless_server_answer_is_refused(monkeypatch, what):
    monkeypatch.setattr(asked, "MOST_OF_ANOTHER", 2**20)

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b'<a href="x.tar">' * 4096)

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asks = Server(f"http://127.0.0.1:{server.server_port}/set", 60.0, str)
        with pytest.raises(DataError, match="is larger than"):
            asks.listing() if what == "listing" else asks.read("classes.txt")
        server.shutdown()


def test_tars_dropped_from_the_cache_are_closed(tmp_path):
    make_set(tmp_path / "set", num_shards=12)
    with HttpFolder(tmp_path / "set") as server:
        options = {"CACHE_PATH": str(tmp_path / "c"), "SHUFFLE_BUFFER": 1, "REMOTE_CACHE_GB": 0.001}
        train, _ = load("shards", server.url, **options)
        for path in (tmp_path / "c").rglob("*.tar"):
            path.unlink()
        train.folder.cache.limit = 5 * (tmp_path / "set/train-000000.tar").stat().st_size
        for index in range(len(train)):
            train.read(index)
        opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        assert len([each for each in opened if str(tmp_path / "c") in each and each.endswith(".tar (deleted)")]) == 0


def test_pickled_remote_shards_read_the_same_images(tmp_path):
    make_set(tmp_path / "set")
    with HttpFolder(tmp_path / "set") as server:
        train, _ = load("shards", server.url, CACHE_PATH=str(tmp_path / "c"))
        assert shades(pickle.loads(pickle.dumps(train))) == [*range(30)]


def test_full_disk_during_download_leaves_no_partial_tar(cache, monkeypatch):
    monkeypatch.setattr(cache.server, "copy", Mock(side_effect=OSError(28, "No space left on device")))
    with refused(DataError, "a.tar", "DATA.CACHE_PATH", "DATA.REMOTE_CACHE_GB"):
        cache.pull(tar("a.tar"))
    assert not cache.files()
