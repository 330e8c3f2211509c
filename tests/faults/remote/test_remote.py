"""Shards on a server: the same images and results as from a local disk, a bounded cache, and faults of the server."""

import io
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import build_eval_data, build_train_data
from datasets.order import Order, Share
from datasets.sources import server as requests
from datasets.sources.remote import NUM_PULLERS, Pull, ServerStorage, TarCache, tars_in_turn
from datasets.sources.server import Server, parse_address
from datasets.sources.shards import ShardTar, checksum_of
from datasets.sources.tar import Tar
from tests.support.configs import CPU
from tests.support.image_sets import load, make_set, samples, settings, shades, write_tar
from tests.support.loading import settings as loader_settings
from tests.support.loading import taken, train_data
from tests.support.networks import in_network, needs_networks
from tests.support.nodes import Node, assert_done
from tests.support.opened import open_sets
from tests.support.refusals import flip
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder, wait_until
from tests.support.servers import HttpFolder, s3_folder
from utils.distributed import Process
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
    return open_sets(settings("shards", url, CACHE_PATH=caches, **data), say=lambda line: None)


def held(caches: str) -> set[str]:
    """Return the cached tars by their names on the server."""
    return {f"{path.name.split('.')[0]}.tar" for path in Path(caches).rglob("*.tar")}


def flags_of(place: str | Path, caches: Path) -> list[str]:
    return ["-dataset", "shards", "-data_path", str(place), "-opts", f"DATA.CACHE_PATH={caches}"]


def assert_same(found, wanted) -> None:
    """Assert that two sets agree in everything that affects a run."""
    for one, other in zip(found, wanted, strict=True):
        assert shades(one) == shades(other) and one.targets.tolist() == other.targets.tolist()
        assert [one.key(index) for index in range(len(one))] == [other.key(index) for index in range(len(other))]
        assert one.classes == other.classes and one.split["rule"] == other.split["rule"]
        orders = [each.epoch_order(3, epoch)[: len(each)].tolist() for each in (one, other) for epoch in range(2)]
        assert orders[:2] == orders[2:]


# --- equal to a local disk ---


@pytest.mark.long
@pytest.mark.parametrize("ranges", [True, False])
def test_http_shards_match_the_local_folder(root, caches, ranges, monkeypatch):
    monkeypatch.setattr(requests, "BLOCK", 9000)  # several requests per tar
    (root / "classes.txt").write_text("ant\nbee\ncat\n")
    with HttpFolder(root, ranges=ranges) as server:
        found = remote(server.url, caches)
        assert_same(found, load("shards", root))
        assert found[0].name(12) == f"{server.url}/train-000001.tar: 0012.png"


def test_braces_in_url_replace_a_missing_server_listing(root, caches):
    with HttpFolder(root, lists=False) as server:
        with pytest.raises(DataError, match=server.url):
            remote(server.url, caches)
        assert_same(remote(f"{server.url}/{{train-{{000000..000002}},val-000000}}.tar", caches), load("shards", root))
        for number in range(2):
            (root / f"train-00000{number}.tar").rename(root / f"photos-{number}.tar")
        both = remote(f"{server.url}/photos-{{0,1}}.tar", caches)  # some are held out
        assert sorted(shades(both[0]) + shades(both[1])) == list(range(20)) and len(both[1])


def test_s3_shards_match_local_shards_in_part_folders(tmp_path, caches, monkeypatch):
    for number in range(4):
        write_tar(tmp_path / "set" / "train" / f"{number}.tar", samples(10 * number, 10))
    with s3_folder(tmp_path / "set", monkeypatch) as url:
        options = {"VAL_FRACTION": 0.3}
        assert_same(remote(url, caches, **options), load("shards", tmp_path / "set", **options))
        with pytest.raises(DataError, match="not found"):
            remote("s3://no-bucket/set", caches)


def test_remote_images_match_local_images_across_ranks_and_resume(tmp_path, caches, monkeypatch):
    make_set(tmp_path / "set", num_shards=9, count=5)
    shared = {"CACHE_PATH": caches, "SHUFFLE_BUFFER": 8, "IMAGE_CHANNELS": 3, "BATCH_SIZE": 8, "DROP_LAST": False}

    def resumed(place: str | Path, rank: int, **loader) -> list[tuple]:
        config = loader_settings("shards", place, **shared, **loader)
        return taken(train_data(config, rank, world_size=2).windows(1, 5))

    with HttpFolder(tmp_path / "set") as server:
        for workers in ("threads", "processes"):
            for rank in range(2):
                found = resumed(server.url, rank, NUM_WORKERS=2, WORKERS=workers)
                assert found == resumed(tmp_path / "set", rank) and len(found) == 4
            for path in Path(caches).rglob("*.tar"):
                path.unlink()
            monkeypatch.setattr(ServerStorage, "will_read", lambda *place: None)  # only forked workers download


@pytest.mark.long
def test_killed_run_on_a_failing_server_matches_local_run(tmp_path, start):
    make_set(tmp_path / "set", num_shards=120, count=2)
    small = ("DATA.SHUFFLE_BUFFER=10", "DATA.REMOTE_CACHE_GB=0.001")
    start(tmp_path / "disk", *flags_of(tmp_path / "set", tmp_path), small[0]).done()
    faults = (503, "cut", 500, "drop")
    with HttpFolder(
        tmp_path / "set", fault=lambda number, path: None if number % 5 else faults[number // 5 % 4]
    ) as server:
        flags = flags_of(server.url, tmp_path / "caches")
        killed = start(tmp_path / "remote", *flags, *small, signal_at=[17, signal.SIGKILL, [0]])
        assert killed.returncode == -signal.SIGKILL, killed.printed
        start(tmp_path / "remote", *flags, *small).done()
        assert server.num_faults >= 50
    assert run_hash(run_folder(tmp_path / "remote")) == run_hash(run_folder(tmp_path / "disk"))


@pytest.mark.long
def test_two_processes_download_each_tar_only_once(tmp_path, start):
    make_set(tmp_path / "set", num_shards=9)
    with HttpFolder(tmp_path / "set") as server:
        start(tmp_path / "o", *flags_of(server.url, tmp_path / "caches"), "TRAIN.NUM_EPOCHS=1", processes=2).done()
        asked = [path for path in server.paths if path.endswith(".tar")]
    assert len(asked) == 3 * 10, "each tar's size for both processes, and its content once"


# --- several machines ---


def make_large_set(root: Path, num_tars: int = 4, count: int = 100) -> int:
    """Write tars of 10 MB, with noise as images. Return their total size."""
    rng = np.random.default_rng(0)
    for tar in range(num_tars):
        files = {}
        for number in range(tar * count, (tar + 1) * count):
            content = io.BytesIO()
            noise = rng.integers(256, size=(170, 200, 3), dtype=np.uint8)
            Image.fromarray(noise).save(content, "PNG", compress_level=0)
            files |= {f"{number:04d}.cls": b"%d" % (number % 3), f"{number:04d}.png": content.getvalue()}
        write_tar(root / f"train-{tar:06d}.tar", files)
    write_tar(root / "val-000000.tar", samples(200, 6))
    load("shards", root)  # writes the indexes
    return sum(path.stat().st_size for path in root.glob("train-*.tar"))


def body_of_tars(server: HttpFolder) -> int:
    return sum(count for (_, path), count in server.sent.items() if path.startswith("/train-") and path.endswith("tar"))


def read_epoch(place: str | Path, caches: str, rank: int, last_step: int = 20, **data) -> list[tuple]:
    """Return the batches of one of two machines in its first epoch of 20 updates."""
    shared = {"SHUFFLE_BUFFER": 130, "IMAGE_CHANNELS": 3, "BATCH_SIZE": 10, "NUM_WORKERS": 2}
    config = loader_settings("shards", place, CACHE_PATH=caches, **shared | data)
    return taken(train_data(config, rank, world_size=2).windows(0, last_step))


@pytest.mark.long
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_two_machines_each_download_half_of_an_epoch(tmp_path, workers):
    size = make_large_set(tmp_path / "set")
    for rank in range(2):
        caches = str(tmp_path / f"caches{rank}")
        with HttpFolder(tmp_path / "set") as server:
            wanted = read_epoch(tmp_path / "set", caches, rank)
            assert read_epoch(server.url, caches, rank, WORKERS=workers) == wanted and len(wanted) == 20
            assert 0.5 * size < body_of_tars(server) <= 0.55 * size
            server.sent.clear()
            assert read_epoch(server.url, caches, rank, WORKERS=workers) == wanted and not body_of_tars(server)
            read_epoch(server.url, caches, rank, last_step=40)
            assert 0.2 * size < body_of_tars(server) <= 0.27 * size, "half of the other half"


@pytest.mark.long
def test_one_machine_downloads_each_tar_in_one_request(tmp_path, monkeypatch):
    make_large_set(tmp_path / "set")
    (tmp_path / "set" / "val-000000.tar").unlink()
    monkeypatch.setattr(ServerStorage, "will_read", lambda *place: None)
    with HttpFolder(tmp_path / "set") as server:
        data = {"SHUFFLE_BUFFER": 130, "IMAGE_CHANNELS": 3, "BATCH_SIZE": 10, "NUM_WORKERS": 0, "VAL_FRACTION": 0.01}
        config = loader_settings("shards", server.url, CACHE_PATH=str(tmp_path / "caches"), **data)
        train, val = open_sets(config)
        server.paths.clear()
        list(build_eval_data(config, val, Process(CPU)))
        taken(build_train_data(config, train, Process(CPU)).windows(0, 30))
        assert sorted(server.paths) == [f"/train-00000{number}.tar" for number in range(4)]


@pytest.mark.long
def test_cache_of_two_machines_stays_within_its_limit(tmp_path):
    size = make_large_set(tmp_path / "set")
    with HttpFolder(tmp_path / "set") as server:
        limits = {"REMOTE_CACHE_GB": 0.3 * size / 1e9, "NUM_WORKERS": 0}
        assert read_epoch(server.url, str(tmp_path / "caches"), 0, **limits) == read_epoch(tmp_path / "set", "", 0)
    files = [path.stat() for path in (tmp_path / "caches").rglob("*.tar*")]
    assert files and sum(512 * each.st_blocks for each in files) <= 0.3 * size


def tar_of_two_ranges(root: Path) -> tuple[ShardTar, bytes, np.ndarray]:
    """Return a tar of 10 MB, its checksum, and two ranges of it."""
    make_large_set(root, num_tars=1)
    path = root / "train-000000.tar"
    tar = ShardTar(path.name, path.stat().st_size, 1)
    return tar, checksum_of(Tar(path)), np.array([[2_000_000, 3_000_000], [7_000_000, 8_000_000]])


def test_ranges_of_a_tar_that_changes_during_the_run_are_not_mixed(tmp_path):
    tar, checksum, ranges = tar_of_two_ranges(tmp_path / "set")
    with HttpFolder(tmp_path / "set") as server:
        cache = TarCache(tmp_path / "tars", Server(server.url, print), limit=1 << 30)
        cache.pull(Pull(tar, checksum, ranges[:1]))
        content = bytearray((server.root / tar.name).read_bytes())
        (server.root / tar.name).write_bytes(content[::-1])
        with pytest.raises(DataError, match=r"train-000000\.tar.*train\.index"):
            cache.pull(Pull(tar, checksum, ranges[1:]))
        assert not cache.files()


@pytest.mark.long
def test_torn_record_of_a_range_is_ignored_and_replaced(tmp_path):
    tar, checksum, ranges = tar_of_two_ranges(tmp_path / "set")
    whole = (tmp_path / "set" / tar.name).read_bytes()
    with HttpFolder(tmp_path / "set") as server:
        cache = TarCache(tmp_path / "tars", Server(server.url, print), limit=1 << 30)
        for number, torn in enumerate((bytes(24), b"\1" * 24, b"\1" * 7)):
            cache.pull(Pull(tar, checksum, ranges[:1]))
            with open(cache.part(tar), "ab") as file:
                file.write(torn)
            server.sent.clear()
            assert cache.has(Pull(tar, checksum, ranges[:1])) and not cache.has(Pull(tar, checksum, ranges))
            cache.pull(Pull(tar, checksum, ranges))
            assert 1_000_000 <= body_of_tars(server) <= 1_020_000, number
            opened = cache.open(tar)
            assert all(opened.read(start, stop - start) == whole[start:stop] for start, stop in ranges.tolist())
            cache.part(tar).unlink()


@pytest.mark.long
@pytest.mark.parametrize("fault", [500, "cut", "drop"])
def test_transient_faults_between_ranges_are_retried(tmp_path, fault):
    tar, checksum, ranges = tar_of_two_ranges(tmp_path / "set")
    with HttpFolder(tmp_path / "set", fault=lambda number, path: None if number % 9 else fault) as server:
        cache = TarCache(tmp_path / "tars", Server(server.url, print), limit=1 << 30)
        cache.pull(Pull(tar, checksum, ranges))
        assert cache.has(Pull(tar, checksum, ranges)) and server.num_faults >= 3


@pytest.mark.long
@needs_networks
def test_two_machines_of_a_run_each_download_half_and_equal_the_local_run(tmp_path, tiny, two_hosts, start):
    size = make_large_set(tmp_path / "set")
    flags = ["-cfg", str(tiny), "-amp", "-output", str(tmp_path / "o"), "-name", "x"]
    more = ("TRAIN.NUM_EPOCHS=1", "DATA.SHUFFLE_BUFFER=130", "DATA.IMAGE_CHANNELS=3")
    start(tmp_path / "disk", *flags_of(tmp_path / "set", tmp_path), *more, processes=2).done()
    with in_network(two_hosts[0][0], lambda: HttpFolder(tmp_path / "set", address="10.77.0.1")) as server:
        nodes = []
        for rank, host in enumerate(two_hosts):
            words = [*flags, *flags_of(server.url, tmp_path / f"caches{rank}"), *more]
            nodes.append(Node(rank, host, tmp_path, False, words))
        assert_done(*[node.start() for node in nodes])
    assert run_hash(tmp_path / "o" / "x") == run_hash(run_folder(tmp_path / "disk"))
    for client in ("10.77.0.1", "10.77.0.2"):
        sent = {path: count for (address, path), count in server.sent.items() if address == client}
        tars = sum(count for path, count in sent.items() if path.startswith("/train-") and path.endswith(".tar"))
        assert 0.45 * size < tars <= 0.55 * size, sent


@pytest.mark.long
def test_two_machines_download_whole_tars_from_a_server_without_ranges(tmp_path):
    size = make_large_set(tmp_path / "set")
    with HttpFolder(tmp_path / "set", ranges=False) as server:
        caches = str(tmp_path / "caches")
        assert read_epoch(server.url, caches, 1) == read_epoch(tmp_path / "set", caches, 1)
        assert body_of_tars(server) == size and len(held(caches)) == 4


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
        path = train.storage.folder.cache.path(tar := train.storage.table.tar(0))
        os.truncate(path, 100)
        assert train.storage.folder.open(tar).size == tar.size == path.stat().st_size, "after a crash"


def test_tar_contradicting_its_index_is_refused_until_fixed(root, caches):
    load("shards", root)
    flip(root / "train-000000.tar", 3000)
    with HttpFolder(root) as server:
        train, _ = remote(server.url, caches)
        with pytest.raises(DataError, match=r"train-000000\.tar.*train\.index"):
            train.read(0)
        assert "train-000000.tar" not in held(caches)
        load("shards", root)
        assert remote(server.url, caches)[0].read(0) is not None


def test_tar_cache_stays_within_limit_and_drops_the_least_recently_used(tmp_path, caches):
    for number in range(8):
        write_tar(tmp_path / "set" / f"train-{number}.tar", samples(10 * number, 10))
    size = (tmp_path / "set" / "train-0.tar").stat().st_size
    with HttpFolder(tmp_path / "set") as server:
        limits = {"VAL_FRACTION": 0.2, "SHUFFLE_BUFFER": 3, "REMOTE_CACHE_GB": 4.5 * size / 1e9}
        train, val = remote(server.url, caches, **limits)
        for image_set in (train, val, train):
            assert shades(image_set) == [int(image_set.key(index)[:4]) for index in range(len(image_set))]
            assert len(held(caches)) <= 4
        opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        assert not [each for each in opened if caches in each and each.endswith(".tar (deleted)")]
        cache, tars = train.storage.folder.cache, [train.storage.table.tar(number) for number in range(3)]
        cache = replace(cache, limit=3 * size)
        for tar in tars:
            cache.pull(Pull(tar))
        for path in cache.files():
            os.utime(path, (1, 1))
        cache.use(tars[1])
        replace(cache, limit=size).make_room()
        assert held(caches) == {"train-1.tar"}


def test_next_tars_are_prefetched_unless_other_processes_download_them(tmp_path, caches):
    for number in range(9):
        write_tar(tmp_path / "set" / f"train-{number}.tar", samples(10 * number, 10))
    write_tar(tmp_path / "set" / "val-0.tar", samples(200, 3))
    size = (tmp_path / "set" / "train-0.tar").stat().st_size
    with HttpFolder(tmp_path / "set") as server:
        train, _ = remote(server.url, caches, REMOTE_CACHE_GB=6.5 * size / 1e9, SHUFFLE_BUFFER=3)
        (groups, _), cache = tars_in_turn(train, 0, 0), train.storage.folder.cache
        order = [f"train-{group}.tar" for group in groups]
        share = Share(Order(len(train), 1, 1, 1, False, 0, train.epoch_order), range(1), 1000)
        for path in cache.files():
            path.unlink()
        first = cache.path(train.storage.table.tar(groups[0]))
        with locked(first.with_name(f".{first.name}.part")):
            train.storage.will_read(train, share, 0)
            wait_until(lambda: held(caches) >= {*order[1 : NUM_PULLERS + 1]})
            assert order[0] not in held(caches)
        train.storage.will_read(train, share, 70)
        following = [f"train-{group}.tar" for group in tars_in_turn(train, 0, 1)[0]]
        wait_until(lambda: set(order[7:] + following[:2]) <= held(caches))
        assert len(held(caches)) <= 6


def cache_of(server: HttpFolder, folder: Path) -> tuple[TarCache, ShardTar]:
    tar = ShardTar("train-000000.tar", (server.root / "train-000000.tar").stat().st_size, 0)
    return TarCache(folder / "tars", Server(server.url, lambda line: None), limit=1 << 30), tar


def test_partial_download_of_a_killed_process_is_ignored(root, tmp_path):
    with HttpFolder(root, fault=lambda number, path: "stall" if number == 1 else None) as server:
        cache, tar = cache_of(server, tmp_path)
        process = multiprocessing.get_context("fork").Process(target=cache.pull, args=(Pull(tar),))
        process.start()
        wait_until(lambda: server.paths)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert cache.files() and not cache.holds(tar)
        cache.pull(Pull(tar))
        assert cache.path(tar).read_bytes() == (root / tar.name).read_bytes()
        assert [path.name for path in cache.files()] == [cache.path(tar).name]


def test_download_that_ends_while_the_cache_is_listed_still_counts(root, tmp_path, monkeypatch):
    with HttpFolder(root) as server:
        cache, tar = cache_of(server, tmp_path)
        cache.pull(Pull(tar))
        whole = cache.path(tar)
        part = whole.rename(whole.with_name(f".{whole.name}.part"))
        monkeypatch.setattr(Path, "rglob", lambda folder, pattern: [part.rename(whole) and part])
        assert [(path, each.st_size) for path, each in cache.files().items()] == [(whole, tar.size)]


def test_full_disk_during_download_names_the_cache_settings(root, tmp_path, monkeypatch):
    with HttpFolder(root) as server:
        cache, tar = cache_of(server, tmp_path)
        monkeypatch.setattr(
            "datasets.sources.remote.sync", lambda file: (_ for _ in ()).throw(OSError(28, "disk full"))
        )
        with pytest.raises(DataError, match=r"DATA\.CACHE_PATH.*DATA\.REMOTE_CACHE_GB"):
            cache.pull(Pull(tar))
        assert not cache.files()


# --- faults of the server ---


@pytest.mark.parametrize("fault", [500, 429, "cut", "stall", "drop"])
def test_transient_server_faults_are_retried(root, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(requests, "SECONDS_OF_SILENCE", 0.3)  # a stall exceeds it
    with HttpFolder(root, fault=lambda number, path: fault if number < 3 else None) as server:
        cache, tar = cache_of(server, tmp_path)
        cache.pull(Pull(tar))
        assert cache.path(tar).read_bytes() == (root / tar.name).read_bytes() and server.num_faults == 2


@pytest.mark.parametrize("fault", [401, 403, 404, 400, 503, "empty"])
def test_lasting_server_fault_names_the_url_and_is_retried_only_if_it_may_end(root, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(requests, "PATIENCE", 0.3)
    with HttpFolder(root, fault=lambda number, path: fault) as server:
        cache, tar = cache_of(server, tmp_path)
        with pytest.raises(DataError, match=f"{server.url}/{tar.name}"):
            cache.pull(Pull(tar))
        assert (len(server.paths) > 1) is (fault in (503, "empty")) and not cache.files()


@pytest.mark.long
def test_unavailable_server_ends_run_that_can_be_resumed(tmp_path, start):
    make_set(tmp_path / "set", num_shards=12)
    gone = []
    with HttpFolder(tmp_path / "set", fault=lambda number, path: 503 if gone else None) as server:
        flags = flags_of(server.url, tmp_path / "caches")
        start(tmp_path / "o", *flags, "TRAIN.NUM_EPOCHS=1").done()
        gone.append(True)
        ended = start(tmp_path / "o", *flags, impatient=[0.3])
        assert ended.returncode == 2 and server.url in ended.printed and "503" in ended.printed
        gone.clear()
        assert start(tmp_path / "o", *flags).returncode == 0


# --- URLs, credentials, packages ---


def test_netrc_password_appears_in_no_run_file(tmp_path, start, monkeypatch):
    make_set(tmp_path / "set")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    os.chmod(tmp_path / "netrc", 0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with HttpFolder(tmp_path / "set", password="me:hunter2") as server:
        ended = start(tmp_path / "o", *flags_of(server.url, tmp_path / "caches"), "TRAIN.NUM_EPOCHS=1").done()
    written = [path for place in ("o", "caches") for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert len(written) > 10 and not [path for path in written if b"hunter2" in path.read_bytes()]
    assert "hunter2" not in ended.printed


def test_credentials_are_removed_from_errors_and_logs_of_requests(tmp_path, monkeypatch):
    secrets, said = ("me:secret@", "X-Amz-Signature=secret", "AKIAIOSFODNN7EXAMPLE"), []
    server = Server("http://127.0.0.1:1/set", said.append)
    monkeypatch.setattr(requests, "PATIENCE", 0.2)

    def fail(*scheme, **options):
        raise OSError(f"https://{secrets[0]}host/a.tar?{secrets[1]}&x=1 for {secrets[2]}")

    monkeypatch.setattr("fsspec.filesystem", fail)
    with pytest.raises(DataError, match=r"host/a\.tar") as caught:
        server.read("classes.txt")
    assert said and not [each for each in secrets if each in str(caught.value) + str(said)]


@pytest.mark.parametrize(
    "scheme, package", [("https", "aiohttp"), ("s3", "s3fs"), ("gs", "gcsfs"), ("hf", "huggingface_hub")]
)
def test_missing_remote_package_is_named(caches, monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"DATA.DATA_PATH.*pip install {package}"):
        remote(f"{scheme}://bucket/set", caches)


def test_server_cannot_name_files_outside_the_cache(root, caches):
    links = (
        '<a href="..%2F..%2Ftrain-9.tar">x</a><a href="train-9%2F..%2F..%2Fx.tar">x</a><a href="%3Ftrain-7.tar">x</a>'
    )
    with HttpFolder(root, links=links) as server:
        assert_same(remote(server.url, caches), load("shards", root))
    assert not [path for path in server.paths if ".." in path]


@pytest.mark.parametrize(
    "url, folder, names",
    [
        ("s3://bucket/set/", "s3://bucket/set", None),
        ("https://server/set/a.tar", "https://server/set", ["a.tar"]),
        ("https://server/a-{008..010}.tar", "https://server", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("gs://b/{x-{0..1},y}.tar", "gs://b", ["x-0.tar", "x-1.tar", "y.tar"]),
    ],
)
def test_url_is_parsed_as_folder_tar_or_webdataset_braces(url, folder, names):
    assert parse_address(url) == (folder, names)


@pytest.mark.parametrize("pattern", ["{0..1.tar", "{9..1}.tar", "{0..1}.zip", "{../x,y}.tar", "{0..99999999999}.tar"])
def test_invalid_tar_braces_are_refused(pattern):
    with pytest.raises(DataError, match=r"DATA\.DATA_PATH"):
        parse_address(f"https://server/{pattern}")
