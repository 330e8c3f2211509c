"""Shards on a faulty server: no image is lost or repeated, errors name the cause, and no file contains a secret."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.image_sets import make_set, samples, write_tar
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder
from tests.support.servers import HttpFolder

pytestmark = pytest.mark.slow

NUM_TARS, PER_TAR = 240, 1
BUFFERED = ("DATA.SHUFFLE_BUFFER=10", "DATA.REMOTE_CACHE_GB=0.001")  # the cache holds fewer than 100 of these tars


@pytest.fixture(scope="module")
def many_tars(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for number in range(NUM_TARS):
        write_tar(root / f"train-{number:03d}.tar", samples(PER_TAR * number, PER_TAR))
    write_tar(root / "val-0.tar", samples(900, 6))
    return root


def flags_of(place: str | Path, caches: Path) -> list[str]:
    return ["-dataset", "shards", "-data_path", str(place), "-opts", f"DATA.CACHE_PATH={caches}"]


def test_remote_run_matches_local_run_despite_failing_requests_and_a_kill(tmp_path, start, many_tars):
    start(tmp_path / "disk", *flags_of(many_tars, tmp_path), BUFFERED[0]).done()
    faults = (503, "cut", 500, "drop")
    with HttpFolder(many_tars, fault=lambda number, path: None if number % 5 else faults[number // 5 % 4]) as server:
        flags = flags_of(server.url, tmp_path / "caches")
        killed = start(tmp_path / "remote", *flags, *BUFFERED, signal_at=[17, signal.SIGKILL, [0]])
        assert killed.returncode == -signal.SIGKILL, killed.printed
        start(tmp_path / "remote", *flags, *BUFFERED).done()
        assert len(server.paths) >= 1000 and server.num_faults >= 200
    assert run_hash(run_folder(tmp_path / "remote")) == run_hash(run_folder(tmp_path / "disk"))


def test_unavailable_server_ends_run_that_can_be_resumed(tmp_path, start):
    make_set(tmp_path / "set", num_shards=12)
    limits = ("DATA.SHUFFLE_BUFFER=1",)
    gone = []
    with HttpFolder(tmp_path / "set", fault=lambda number, path: 503 if gone else None) as server:
        flags = flags_of(server.url, tmp_path / "caches")
        start(tmp_path / "o", *flags, *limits, "TRAIN.NUM_EPOCHS=1").done()
        gone.append(True)
        for path in (tmp_path / "caches").rglob("*.tar"):
            path.unlink()
        start(tmp_path / "o", *flags, *limits, impatient=[0.3]).refused(server.url, "503", "tried")
        gone.clear()
        assert start(tmp_path / "o", *flags, *limits).returncode == 0


def test_two_processes_download_each_tar_only_once(tmp_path, start):
    make_set(tmp_path / "set", num_shards=9)
    with HttpFolder(tmp_path / "set") as server:
        start(tmp_path / "o", *flags_of(server.url, tmp_path / "caches"), "TRAIN.NUM_EPOCHS=1", processes=2).done()
        asked = [path for path in server.paths if path.endswith(".tar")]
    assert len(asked) == 3 * 10, "each tar's size for both processes, and its content once"


@pytest.mark.parametrize("url", ["http://me:hunter2@127.0.0.1:1/set", "http://127.0.0.1:1/set?Signature=hunter2"])
def test_url_with_credentials_is_refused_without_printing_them(tmp_path, start, url):
    ended = start(tmp_path / "o", *flags_of(url, tmp_path / "caches")).refused("DATA.DATA_PATH", "~/.netrc")
    assert "hunter2" not in ended.printed
    assert not list(tmp_path.iterdir())


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
