"""Input that a newcomer mistypes or an attacker sends is refused immediately, with one message: name, value, remedy."""

import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import load
from datasets import build_order
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError
from engine.checkpoint.find import find_before, find_newest
from models.weights.files import find_file
from tests.support.configs import small_config
from tests.support.forks import DEADLINE
from tests.support.image_sets import error_of, files_with, samples, settings, targets_only, write_tar
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError, UserError
from utils.program import exit_code


def test_repeated_augmentation_above_the_batch_size_is_refused(tmp_path):
    config = small_config(tmp_path, "TRAIN.REPEATED_AUG=9", "DATA.BATCH_SIZE=4", "TRAIN.ACCUM_ITER=2")
    build_order(config, targets_only(np.zeros(99), ["a"]), world_size=2)
    with refused(ConfigError, "TRAIN.REPEATED_AUG", 9, 8):
        build_order(config, targets_only(np.zeros(99), ["a"]), world_size=1)


@pytest.mark.parametrize(
    "ask", [lambda: torch.empty(2**60, dtype=torch.uint8), lambda: np.empty(2**60, np.uint8)], ids=["torch", "numpy"]
)
def test_out_of_memory_error_suggests_settings_to_lower(ask, capsys):
    assert exit_code(lambda arguments: ask(), []) == 2
    said = capsys.readouterr().err
    assert_names(said, "memory", "DATA.BATCH_SIZE", "DATA.IMAGE_SIZE")
    assert said.startswith("error: ") and "Traceback" not in said


# --- paths that are not regular files ---


@pytest.fixture(autouse=True)
def nobody_waits():
    """Fail a test that waits for a pipe, instead of waiting forever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe"))
    signal.alarm(int(DEADLINE))  # seconds; the tests take milliseconds
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path may exceed the length limit of sockets
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


def read_base(path: Path) -> None:
    (path.parent / "x.yaml").write_text(f"BASE: {path.name}")
    load(["-cfg", str(path.parent / "x.yaml")])


READERS = {
    "settings.yaml": lambda path: load(["-cfg", str(path)]),
    "base.yaml": read_base,
    "train-000000.tar": lambda path: open_sets(settings("shards", path.parent)),
    "train_list.txt": lambda path: open_sets(settings("imagenet2012", path.parent)),
    "weights.pth": find_file,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_error_for_special_file_or_folder_names_its_kind(tmp_path, name, kind):
    KINDS[kind](tmp_path / name)
    with refused(UserError, name, kind):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
@pytest.mark.parametrize("data_set", ["csv", "imagenet2012", "shards"])
def test_special_file_as_data_path_is_refused(tmp_path, data_set, kind):
    KINDS[kind](tmp_path / "data")
    assert_names(error_of(data_set, tmp_path / "data"), "DATA.DATA_PATH", tmp_path / "data", kind)


ARCHIVES = ("photos.zip", "photos.tar", "photos.tar.gz", "photos.TGZ", "photos.7z", "photos.rar", "list.csv.gz")


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("data_set", ["imagefolder", "imagenet2012", "caltech101", "csv", "parquet", "shards"])
def test_archive_as_data_path_must_be_unpacked(tmp_path, data_set, name):
    (tmp_path / name).write_bytes(b"PK\3\4")
    names = ["DATA.DATA_PATH", tmp_path / name, "-data_path"]
    if data_set != "shards" or name != "photos.tar":  # shards are tars
        assert_names(error_of(data_set, tmp_path / name), *names, "archive", "unpack")


@pytest.mark.parametrize("data_set", ["imagefolder", "imagenet2012", "caltech101", "shards"])
def test_file_instead_of_a_folder_as_data_path_is_refused(tmp_path, data_set):
    write_tar(tmp_path / "photos.tar", samples(0, 3))
    (tmp_path / "photos.tar").rename(tmp_path / (name := "photos.tar" if data_set == "shards" else "photos.txt"))
    assert_names(error_of(data_set, tmp_path / name), "DATA.DATA_PATH", tmp_path / name, "-data_path", "folder")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("a pipe", "a pipe"), ("a device", "a device"), ("a socket", "OSError"), ("a folder", "IsADirectoryError")],
)
def test_special_file_is_not_read_as_an_image(tmp_path, kind, reason):
    KINDS[kind](tmp_path / "0.png")
    with refused(ImageReadError, reason):
        files_with(tmp_path, ["0.png"], [0], ["a"], Pixels(3)).read(0)


@pytest.mark.parametrize("kind", KINDS)
def test_special_file_named_like_a_checkpoint_is_skipped(tmp_path, kind):
    run = tmp_path / "train-20260102-03-04-05"
    run.mkdir()
    KINDS[kind](run / "last.pth")
    assert find_newest(str(tmp_path), print) is None and find_before(run, 0, print) is None
