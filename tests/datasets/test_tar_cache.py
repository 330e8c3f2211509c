"""The cache of tars from a server: what is dropped, what is on the disk before it has a name, how long and often is asked."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from datasets.sources import server as asked
from datasets.sources.remote_shards import TarCache
from datasets.sources.server import Server
from datasets.sources.shards import ShardTar
from utils.errors import DataError

SIZE = 1000


@pytest.fixture
def cache(tmp_path) -> TarCache:
    def copy(name, size, file):
        file.write(bytes(size))

    return TarCache(tmp_path, SimpleNamespace(copy=copy, url_of=str), limit=10 * SIZE)


def tar(name: str) -> ShardTar:
    return ShardTar(name, SIZE, 1)


def test_the_tar_that_was_used_longest_ago_is_dropped(cache):
    one, two = tar("a.tar"), tar("b.tar")
    for each in (one, two):
        cache.pull(each)
        os.utime(cache.path(each), (1, 1))
    cache.use(one)
    cache.limit = SIZE
    cache.make_room()
    assert cache.holds(one) and not cache.holds(two)


def test_a_pulled_tar_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("synced") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("named") or replace(*paths))
    cache.pull(tar("a.tar"))
    assert done[:2] == ["synced", "named"]


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server(f"http://127.0.0.1:{silent.getsockname()[1]}/set", 1.0, str)
        ended = []

        def ask():
            try:
                server.read("classes.txt")
            except DataError:
                ended.append(True)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(60)
        assert ended


def test_waits_between_requests_grow(monkeypatch):
    waits, now = [], [0.0]

    def sleep(seconds):
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(asked, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(asked.random.Random, "uniform", lambda self, low, high: 1.0)
    server = Server("http://127.0.0.1:9/set", 120.0, str)
    with pytest.raises(DataError):
        server.read("classes.txt")
    assert waits[:4] == [0.05, 0.1, 0.2, 0.4] and sum(waits) <= 120
