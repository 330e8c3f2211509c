"""Tar shards: reading, indexing, and refused files."""

import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from datasets.image_set import ImageSet
from datasets.pixels import Pixels
from datasets.sources import shards
from datasets.sources.tar import Tar
from tests.support.cases import cases_of, content_of, names_of
from tests.support.image_sets import error_of, load, make_set, png, samples, settings, shades, write_tar
from tests.support.refusals import assert_names, flip, refused
from tests.support.runs import ROOT
from utils.errors import ConfigError, DataError


def train_only(root: Path):
    return ImageSet.of(shards.read_shards(settings("shards", root), False)[0], Pixels(3))


# --- reading ---


def test_shards_are_read_from_part_folders_with_class_names(tmp_path):
    write_tar(tmp_path / "train" / "b.tar", samples(10, 10))
    write_tar(tmp_path / "train" / "a.tar", samples(0, 10))
    (tmp_path / "classes.txt").write_text("ant\r\nbee\r\ncat\r\nbee\r\n", "utf-8-sig")
    train, val = load("shards", tmp_path, VAL_FRACTION=0.2)
    assert sorted(shades(train) + shades(val)) == list(range(20)) and len(val)
    assert shades(train) == sorted(shades(train)) and train.classes == ["ant", "bee (1)", "cat", "bee (3)"]
    for data, named in ((b"ant\n\nbee\n", "line 2"), ("ant\nbee\n".encode("utf-16"), "zero byte")):
        (tmp_path / "classes.txt").write_bytes(data)
        with refused((ConfigError, DataError), "classes.txt", named):
            load("shards", tmp_path)


def test_shard_labels_come_only_from_cls_or_json_files(tmp_path):
    files = {
        "./deep/a.JPG": png(1),
        "./deep/a.cls": b" 2\n",
        "./deep/a.json": b'{"label": 1}',
        "b.webp": png(2),
        "b.json": b'{"cls": 1, "more": [true]}',
        "b.seg.png": png(3),
        "b.pyd": b"\x80\x04.",
        "b.pkl": b"\x80\x04.",
        "c.json": b'{"about": "the data"}',
        "d.png": png(4),
        "d.json": b'{"label": 0, "cls": 7}',
        "._b.png": b"of a Mac",
        "readme.txt": b"hello",
    }
    write_tar(tmp_path / "train-0.tar", files)
    train = train_only(tmp_path)
    found = [(train.name(index).rpartition(": ")[2], int(train.targets[index])) for index in range(len(train))]
    assert found == [("./deep/a.JPG", 2), ("b.webp", 1), ("d.png", 0)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_format_gives_long_names_and_skips_links(tmp_path, tar_format):
    name = f"{'f' * 90}/{'g' * 60}/{'n' * (250 if tar_format != tarfile.USTAR_FORMAT else 90)}"
    files = {f"{name}.png": png(7), f"{name}.cls": b"0", "ümlaut.png": png(8), "ümlaut.cls": b"1"}
    with tarfile.open(path := tmp_path / "train-0.tar", "w", format=tar_format) as tar:
        for link, kind in [("x.png", tarfile.SYMTYPE), ("y.png", tarfile.LNKTYPE), ("z.png", tarfile.DIRTYPE)]:
            member = tarfile.TarInfo(link)
            member.type, member.linkname, member.size = kind, "/etc/hostname", 5000  # the size counts only for files
            tar.addfile(member)
        for each, content in files.items():
            member = tarfile.TarInfo(each)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    train = train_only(tmp_path)
    assert shades(train) == [7, 8] and [train.key(index) for index in range(2)] == [f"{name}.png", "ümlaut.png"]
    with tarfile.open(path) as tar:
        wanted = [(member.offset_data, member.size) for member in tar if member.name in (f"{name}.png", "ümlaut.png")]
    found = shards.scan(Tar(path))
    assert list(zip(found.offsets, found.sizes, strict=True)) == wanted


def test_documented_shard_writer_makes_readable_shards(tmp_path):
    written = {}
    exec(re.search(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(encoding="utf-8"), re.S)[1], written)
    for part, numbers in (("train", range(25)), ("val", range(200, 206))):
        written["write_shards"](((png(number), number % 3) for number in numbers), tmp_path / part, per_shard=10)
    (tmp_path / "train-000001.tar.gz").touch()  # the compressed file from which a tar was unpacked
    train, val = load("shards", tmp_path)
    assert shades(train) == list(range(25)) and shades(val) == list(range(200, 206))
    assert train.targets.tolist() == [number % 3 for number in range(25)]


# --- refused files ---


@pytest.mark.parametrize("files", cases_of("mistakes-in_a_tar"))
def test_wrong_shard_sample_is_reported_with_its_tar(tmp_path, files):
    named = (file.split("=") for file in content_of(files).split())
    write_tar(tmp_path / "train-0.tar", {name: content.encode() for name, content in named})
    assert_names(error_of("shards", tmp_path), *names_of("mistakes-in_a_tar", files))


def test_invalid_sets_of_shards_are_reported(tmp_path):
    assert_names(error_of("shards", tmp_path), "DATA.DATA_PATH", tmp_path, "train-000000.tar")
    for number in range(3):
        write_tar(tmp_path / f"train-{number:06d}.tar", {"readme.txt": b"hello"})
    assert_names(error_of("shards", tmp_path), tmp_path / "train-000000.tar", "2 more")
    make_set(tmp_path)
    write_tar(tmp_path / "val-000000.tar", samples(0, 8, num_classes=7))
    assert_names(error_of("shards", tmp_path), tmp_path / "val-000000.tar", "0003.png", "class 3")
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert_names(error_of("shards", tmp_path), tmp_path / "val-000000.tar", "label 6", tmp_path / "classes.txt", "3")
    with tarfile.open(tmp_path / "train-1.tar", "w") as tar:
        (member := tarfile.TarInfo("x.png")).type = tarfile.GNUTYPE_SPARSE
        tar.addfile(member)
    assert_names(error_of("shards", tmp_path), tmp_path / "train-1.tar", "'x.png'", "sparse")
    (tmp_path / "train-1.tar").unlink()
    for name in ("train-1.tar.gz", "train-1.tar"):
        (tmp_path / name).write_bytes(b"\x1f\x8b" * 300)
        assert_names(error_of("shards", tmp_path), tmp_path / name, "compressed")


@pytest.mark.parametrize("position", [0, 512, 3000, 3072, -1536, -600])
def test_truncated_tar_is_refused(tmp_path, position):
    path = write_tar(tmp_path / "train-0.tar", samples(0, 3))
    end = 0
    if position < 0:
        with tarfile.open(path) as tar:
            end = max(member.offset_data + 512 for member in tar)  # before the blocks that end the tar
    path.write_bytes(path.read_bytes()[: position + end])
    assert_names(error_of("shards", tmp_path), path, "truncated")


def test_damaged_tar_header_is_reported_with_its_offset(tmp_path):
    path = write_tar(tmp_path / "train-0.tar", samples(0, 3))
    train = train_only(tmp_path)
    flip(path, 1024 + 10)  # in the second header's name, after a 512-byte header and a block of content
    os.utime(path, ns=(1, 1))
    with refused(DataError, path, "-resume"):
        train.read(0)
    assert_names(error_of("shards", tmp_path), path, "1024")


# --- the index; test_index.py has the tests for every data set ---


@pytest.fixture
def scanned(monkeypatch) -> list[str]:
    """Return a list of the names of scanned tars."""
    names, scan = [], shards.scan
    monkeypatch.setattr(shards, "scan", lambda tar, *given: names.append(Path(tar.title).name) or scan(tar, *given))
    return names


def test_index_of_a_renamed_tar_is_rejected(tmp_path, scanned):
    path = write_tar(tmp_path / "train-0.tar", samples(0, 3))
    train_only(tmp_path)
    path.rename(tmp_path / "train-1.tar")
    assert shades(train_only(tmp_path)) == [0, 1, 2] and scanned == ["train-0.tar", "train-1.tar"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 2000])  # the whole tar is compared, or only pieces of it
def test_copied_tar_keeps_its_index_unless_changed(tmp_path, scanned, count):
    write_tar(tmp_path / "data" / "train-0.tar", samples(0, 10) | {f"{n}.txt": b"x" * 512 for n in range(count)})
    wanted = shades(train_only(tmp_path / "data"))
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    copied = tmp_path / "copy" / "train-0.tar"
    os.utime(copied, ns=(1, 1))
    scanned.clear()
    assert shades(train_only(tmp_path / "copy")) == wanted and not scanned
    content = bytearray(copied.read_bytes())
    content[-5000:] = content[:5000]
    copied.write_bytes(content)
    os.utime(copied, ns=(2, 2))
    train_only(tmp_path / "copy")
    assert scanned == ["train-0.tar"]


def test_reading_a_tar_continues_after_a_partial_system_read(tmp_path, monkeypatch):
    path, pread = write_tar(tmp_path / "a.tar", samples(0, 3)), os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 300), offset))
    whole = path.read_bytes()
    assert Tar(path).read(512, 1000) == whole[512:1512] and Tar(path).read(700, 10**6) == whole[700:]


def test_tars_without_samples_are_refused_by_name_and_number(tmp_path):
    write_tar(tmp_path / "train-0.tar", {"readme.txt": b"hello"})
    found = error_of("shards", tmp_path)
    assert_names(found, tmp_path / "train-0.tar")
    assert "more" not in found
    write_tar(tmp_path / "train-1.tar", {"readme.txt": b"hello"})
    assert_names(error_of("shards", tmp_path), tmp_path / "train-0.tar", "1 more")
