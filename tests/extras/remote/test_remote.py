"""Shards on a server: the same images as from a local disk, a cache of limited size, and refused input."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.exceptions import ConfigParseError, TokenRetrievalError, UnauthorizedSSOTokenError

from datasets import load_image_sets
from datasets.sources.shards import ShardTar
from extras.remote.server import NotThereError, Server, judge, parse_address
from extras.remote.shards import NUM_PULLERS, ServerFolder, TarCache
from tests.support.cases import cases_of, content_of, names_of, value_of
from tests.support.image_sets import load, make_set, samples, settings, shades, write_tar
from tests.support.refusals import assert_names, flip, refused
from tests.support.runs import wait_until
from tests.support.seen import seen
from tests.support.seen import settings as seen_settings
from tests.support.servers import HttpFolder, forget_credentials, s3_folder
from utils.errors import ConfigError, DataError
from utils.files import locked

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path) -> Path:
    make_set(tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def caches(tmp_path) -> str:
    return str(tmp_path / "caches")


def remote(url: str, caches: str, **data):
    return load_image_sets(settings("shards", url, CACHE_PATH=caches, **data), say=lambda line: None)


def held(caches: str) -> set[str]:
    """Return the cached tars by their names on the server."""
    return {f"{path.name.split('.')[0]}.tar" for path in Path(caches).rglob("*.tar")}


def assert_same(found, wanted) -> None:
    """Assert that two sets agree in everything that affects a run."""
    for one, other in zip(found, wanted, strict=True):
        assert shades(one) == shades(other) and one.targets.tolist() == other.targets.tolist()
        assert [one.key(index) for index in range(len(one))] == [other.key(index) for index in range(len(other))]
        assert one.classes == other.classes and one.split["rule"] == other.split["rule"]
        orders = [each.epoch_order(3, epoch)[: len(each)].tolist() for each in (one, other) for epoch in range(2)]
        assert orders[:2] == orders[2:]


# --- equal to a local disk ---


@pytest.mark.parametrize("ranges", [True, False])
def test_http_shards_match_the_local_folder(root, caches, ranges, monkeypatch):
    monkeypatch.setattr("extras.remote.server.BLOCK", 9000)  # several requests per tar
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    with HttpFolder(root, ranges=ranges) as server:
        found = remote(server.url, caches)
        assert_same(found, load("shards", root))
        assert found[0].name(12) == f"{server.url}/train-000001.tar: 0012.png"


def test_split_of_remote_training_shards_equals_split_of_local_shards(tmp_path, caches):
    for number in range(4):
        write_tar(tmp_path / "train" / f"{number}.tar", samples(10 * number, 10))
    with HttpFolder(tmp_path) as server:
        assert_same(remote(server.url, caches, VAL_FRACTION=0.3), load("shards", tmp_path, VAL_FRACTION=0.3))


def test_braces_in_url_replace_a_missing_server_listing(root, caches):
    with HttpFolder(root, lists=False) as server:
        with refused(DataError, server.url, "-data_path", "{000000..000146}"):
            remote(server.url, caches)
        assert_same(remote(f"{server.url}/{{train-{{000000..000002}},val-000000}}.tar", caches), load("shards", root))
        for number in range(2):
            (root / f"train-00000{number}.tar").rename(root / f"photos-{number}.tar")
        both = remote(f"{server.url}/photos-{{0,1}}.tar", caches)  # some are held out
        assert sorted(shades(both[0]) + shades(both[1])) == list(range(20)) and len(both[1])


def test_s3_shards_match_local_shards_and_s3_errors_name_remedy(root, caches, monkeypatch):
    with s3_folder(root, monkeypatch) as url:
        assert_same(remote(url, caches), load("shards", root))
        with refused(DataError, "s3://no-bucket/set", "bucket"):
            remote("s3://no-bucket/set", caches)
        forget_credentials(monkeypatch)
        with refused(DataError, url, "AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
            remote(url, caches)


def test_remote_images_match_local_images_across_ranks_and_resume(tmp_path, caches, monkeypatch):
    make_set(tmp_path / "set", num_shards=9, count=5)
    common = {"DATASET": "shards", "CACHE_PATH": caches, "SHUFFLE_BUFFER": 8}
    whole = seen(seen_settings(common | {"DATA_PATH": str(tmp_path / "set")}, {}))
    with HttpFolder(tmp_path / "set") as server:
        for workers in ("threads", "processes"):
            loader = {"NUM_WORKERS": 2, "WORKERS": workers, "DATA_PATH": server.url}
            resumed = seen(seen_settings(common | loader, {}), world_size=2, micro_batches=2, first=1)
            assert resumed == {key: each for key, each in whole.items() if key[0] >= 1} and resumed
            for path in Path(caches).rglob("*.tar"):
                path.unlink()
            monkeypatch.setattr(ServerFolder, "will_read", lambda *place: None)  # only forked workers download


# --- the index and the cache ---


def test_threads_download_each_needed_tar_of_an_indexed_set_once(root, caches):
    load("shards", root)
    with HttpFolder(root) as server, ThreadPoolExecutor(8) as pool:
        train, _ = remote(server.url, caches)
        assert not held(caches)
        server.paths.clear()
        meet = threading.Barrier(8)
        assert [*pool.map(lambda index: meet.wait() >= 0 and int(train.read(index)[0, 0, 0]), range(8))] == [*range(8)]
        assert server.paths == ["/train-000000.tar"] and held(caches) == {"train-000000.tar"}
        remote(server.url, caches)
        assert not [path for path in server.paths if path.endswith(".index")]


def test_tar_is_downloaded_again_only_after_a_change(root, caches):
    with HttpFolder(root) as server:
        for _ in range(2):
            train, _ = remote(server.url, caches)
            assert shades(train) == list(range(30))
        bodies = len(server.paths)
        write_tar(root / "train-000001.tar", samples(100, 10))
        os.utime(root / "train-000001.tar", ns=(1, 1))
        train, _ = remote(server.url, caches)
        assert shades(train) == [*range(10), *range(100, 110), *range(20, 30)]
        assert len([path for path in server.paths[bodies:] if path == "/train-000001.tar"]) == 2  # its size, its bytes
        path = train.folder.cache.path(tar := train.table.tar(0))
        os.utime(path, (1, 1))
        assert train.folder.open(tar) and path.stat().st_mtime > 1, "otherwise it would be deleted next"
        os.truncate(path, 100)
        assert train.folder.open(tar).size == tar.size == path.stat().st_size, "a crash of the machine may truncate it"
        left, pulled = (path.with_name(f".{name}.tar.part") for name in ("left", "pulled"))
        left.write_bytes(b"of a process that was killed")
        with locked(pulled):
            remote(server.url, caches)
            assert pulled.exists() and not left.exists()


def test_tar_contradicting_its_index_is_refused_until_fixed(root, caches):
    load("shards", root)
    path = root / "train-000000.tar"
    flip(path, 3000)
    with HttpFolder(root) as server:
        train, _ = remote(server.url, caches)
        with refused(DataError, f"{server.url}/train-000000.tar", "train.index", "-resume"):
            train.read(0)
        assert "train-000000.tar" not in held(caches)
        load("shards", root)
        assert remote(server.url, caches)[0].read(0) is not None


def test_tar_cache_stays_within_limit_and_reloads_dropped_tars(tmp_path, caches):
    for number in range(8):
        write_tar(tmp_path / "set" / f"train-{number}.tar", samples(10 * number, 10))
    size = (tmp_path / "set" / "train-0.tar").stat().st_size
    limits = {"VAL_FRACTION": 0.2, "SHUFFLE_BUFFER": 3}
    with HttpFolder(tmp_path / "set") as server:
        with refused(ConfigError, "DATA.REMOTE_CACHE_GB", "DATA.SHUFFLE_BUFFER", "DATA.CACHE_PATH"):
            remote(server.url, caches, REMOTE_CACHE_GB=1.5 * size / 1e9 + 1e-9, **limits | {"SHUFFLE_BUFFER": 30})
        train, val = remote(server.url, caches, REMOTE_CACHE_GB=4.5 * size / 1e9, **limits)
        for image_set in (train, val, train):
            assert shades(image_set) == [int(image_set.key(index)[:4]) for index in range(len(image_set))]
            assert len(held(caches)) <= 4


def test_next_tars_are_prefetched_unless_other_processes_download_them(tmp_path, caches):
    for number in range(9):
        write_tar(tmp_path / "set" / f"train-{number}.tar", samples(10 * number, 10))
    write_tar(tmp_path / "set" / "val-0.tar", samples(200, 3))
    size = (tmp_path / "set" / "train-0.tar").stat().st_size
    with HttpFolder(tmp_path / "set") as server:
        train, _ = remote(server.url, caches, REMOTE_CACHE_GB=6.5 * size / 1e9, SHUFFLE_BUFFER=3)
        groups, cache = train.epoch_order(0, 0).groups, train.folder.cache
        order = [f"train-{group}.tar" for group in groups]
        with contextlib.ExitStack() as others:
            for path in cache.files():
                path.unlink()
            for path in (cache.path(train.table.tar(group)) for group in groups[:NUM_PULLERS]):
                others.enter_context(locked(path.with_name(f".{path.name}.part")))
            train.will_read(0, 0, 0)
            wait_until(lambda: held(caches) >= {order[NUM_PULLERS]})
        train.will_read(0, 0, 15)
        wait_until(lambda: set(order[1:6]) <= held(caches))
        train.will_read(0, 0, 70)
        following = [f"train-{group}.tar" for group in train.epoch_order(0, 1).groups]
        wait_until(lambda: set(order[7:] + following[:2]) <= held(caches))
        assert len(held(caches)) <= 6


def cache_of(server: HttpFolder, folder: Path, silence: float = 30.0) -> tuple[TarCache, ShardTar]:
    name = "train-000000.tar"
    client = Server(server.url, silence, lambda line: None)
    client.patience = 30.0
    cache = TarCache(folder / "tars", client, limit=1 << 30)
    return cache, ShardTar(name, (server.root / name).stat().st_size, 0)


def test_partial_download_of_a_killed_process_is_ignored(root, tmp_path):
    with HttpFolder(root, fault=lambda number, path: "stall" if number == 1 else None) as server:
        cache, tar = cache_of(server, tmp_path)
        process = multiprocessing.get_context("fork").Process(target=cache.pull, args=(tar,))
        process.start()
        wait_until(lambda: server.paths)
        assert cache.pull(tar, waits=False) is False, "another process is downloading it"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert not cache.holds(tar)
        assert cache.pull(tar) and cache.path(tar).read_bytes() == (root / tar.name).read_bytes()
        assert [path.name for path in cache.files()] == [cache.path(tar).name]


# --- faults ---


@pytest.mark.parametrize("fault", [500, 429, "cut", "stall"])
def test_transient_server_faults_are_retried(root, tmp_path, fault):
    with HttpFolder(root, fault=lambda number, path: fault if number < 3 else None) as server:
        cache, tar = cache_of(server, tmp_path, silence=0.3)
        cache.pull(tar)  # a stall exceeds the timeout
        assert cache.path(tar).read_bytes() == (root / tar.name).read_bytes() and server.num_faults == 2


@pytest.mark.parametrize("answer", cases_of("remote-mistakes_of_a_server"))
def test_permanent_server_fault_raises_data_error_after_limited_retries(root, tmp_path, monkeypatch, answer):
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    for module in ("server", "shards"):
        monkeypatch.setattr(f"extras.remote.{module}.time", clock)
    fault = int(answer) if answer.isdecimal() else answer
    with HttpFolder(root, fault=lambda number, path: fault) as server:
        cache, tar = cache_of(server, tmp_path)
        cache.server.patience = 0.3
        with refused(DataError, *names_of("remote-mistakes_of_a_server", answer)):
            cache.pull(tar)
        assert (len(server.paths) > 2) is (fault in (503, "empty")) and not cache.files()


def test_endless_response_headers_time_out(root, tmp_path):
    with HttpFolder(root, fault=lambda number, path: "early") as server:
        cache, tar = cache_of(server, tmp_path, silence=0.3)
        cache.server.patience, start = 0.3, time.monotonic()
        with refused(DataError, f"{server.url}/{tar.name}", "tried"):
            cache.pull(tar)
        assert time.monotonic() - start < 20


@pytest.mark.parametrize("name", ["classes.txt", "train.index"])
def test_denied_optional_file_is_an_error_only_if_server_lists_it(root, caches, name):
    """S3 reports missing files as denied."""
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    load("shards", root)
    with HttpFolder(root, fault=lambda number, path: 403 if path == f"/{name}" else None) as server:
        with refused(DataError, f"{server.url}/{name}", "403", "~/.netrc"):
            remote(server.url, caches)
        server.lists = False
        train, _ = remote(f"{server.url}/{{train-{{000000..000002}},val-000000}}.tar", caches)
        assert len(train) == 30 and train.classes == (
            ["0", "1", "2"] if name == "classes.txt" else ["ant", "bee", "cat"]
        )


def test_causes_of_unreachable_remote_data_are_named(root, caches, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    slept = []
    with monkeypatch.context() as patched:
        clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
        patched.setattr("extras.remote.server.time", clock)
        for url in ("http://127.0.0.1:1/set", "http://no-such-host.invalid/set"):
            slept.clear()
            with refused(DataError, url, "DATA.DATA_PATH", "network"):
                remote(url, caches)
            assert 0 < sum(slept) <= 3, "less than the two minutes of PATIENCE, because it has never answered"
    path = root / "train-000001.tar"
    path.write_bytes(path.read_bytes()[:5000])
    with HttpFolder(root) as server:
        with refused(DataError, "DATA.CACHE_PATH", server.url):
            remote(server.url, str(tmp_path / "file"))
        with refused(DataError, f"{server.url}/train-000001.tar", "truncated"):
            remote(server.url, caches)


def test_missing_remote_package_is_named(caches, monkeypatch):
    for url, package in (("https://server/set", "aiohttp"), ("s3://bucket/set", "s3fs")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with refused(ConfigError, "DATA.DATA_PATH", url, f"pip install {package}"):
            remote(url, caches)


def test_credentials_are_removed_from_errors_of_libraries():
    secrets = ("me:secret@", "X-Amz-Signature=secret", "AKIAIOSFODNN7EXAMPLE")
    error = OSError(f"https://{secrets[0]}host/a.tar?{secrets[1]}&x=1 for {secrets[2]}")
    said = judge(error, "https").words
    assert_names(said, "host/a.tar")
    assert not [each for each in secrets if each in said]


@pytest.mark.parametrize(
    "error", [UnauthorizedSSOTokenError(), TokenRetrievalError(provider="x", error_msg="x"), ConfigParseError(path="x")]
)
def test_expired_or_unreadable_s3_credentials_are_not_retried(error):
    trouble = judge(error, "s3")
    assert trouble.lasts and trouble.kind is NotThereError
    assert_names(trouble.remedy, "AWS_PROFILE")


def test_server_cannot_name_files_outside_the_cache(root, caches, tmp_path):
    (root / "x.tar").write_bytes((root / "train-000000.tar").read_bytes())
    with HttpFolder(
        root,
        links='<a href="..%2F..%2Ftrain-9.tar">x</a><a href="train-9%2F..%2F..%2Fx.tar">x</a>'
        '<a href="?x=train-8.tar">x</a><a href="x#train-8.tar">x</a><a href="%3Ftrain-7.tar">x</a>',
    ) as server:
        assert_same(remote(server.url, caches), load("shards", root))
    assert not [path for path in server.paths if ".." in path]


# --- names in URLs ---


@pytest.mark.parametrize("url", cases_of("remote-urls_of_tars"))
def test_url_is_parsed_as_folder_tar_or_webdataset_braces(url):
    folder, names = parse_address(url)
    assert f"{folder}: {names}" == value_of("remote-urls_of_tars", url)


@pytest.mark.parametrize("name", cases_of("remote-mistakes_of_braces"))
def test_invalid_tar_braces_are_refused(name):
    with refused(DataError, *names_of("remote-mistakes_of_braces", name)):
        parse_address(f"https://server/{content_of(name)}")
