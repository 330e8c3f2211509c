"""The index of a data set: its file, damage, rebuilding, and location."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from datasets import index
from datasets.image_set import Table
from datasets.index import IndexBuilder, Texts, index_paths, open_index, open_or_build
from datasets.pixels import Pixels
from datasets.sources import csv_list, folder, listing, parquet, shards
from tests.support.image_sets import (
    draw,
    error_of,
    files_with,
    load,
    make_folders,
    make_set,
    samples,
    settings,
    shades,
    write_tar,
)
from tests.support.parquet_files import ANIMALS, make_parquet, rows, write_parquet
from tests.support.refusals import assert_names

NAMES = [b"", b"a/b.jpg", "ü".encode(), b"\xff\xfe", b"a/b.jpg"]


@pytest.fixture(autouse=True)
def no_index_is_small(monkeypatch):
    """Write an index file for every data set, however small."""
    monkeypatch.setattr(index, "SMALL", 0)


COLUMNS = {"label": "<i4", "name": index.TEXT, "size": "<u8", "empty": index.TEXT}


def build(builder: IndexBuilder) -> dict:
    """Add 5 labels and names and 2 sizes, in chunks."""
    for chunk in (slice(0, 2), slice(2, 5)):
        builder.add("label", np.arange(5)[chunk])
        builder.add("name", NAMES[chunk])
    builder.add("size", np.array([2**40, 7]))
    return {"classes": ["\udcff", "b"]}


def write(path: Path):
    return open_or_build([path], COLUMNS, {"of": 1}, build)


@pytest.mark.parametrize("small", [10**6, 0])
def test_index_is_read_back_unchanged(tmp_path, monkeypatch, small):
    monkeypatch.setattr(index, "SMALL", small)
    monkeypatch.setattr(index, "CHUNK", 2)
    for found in (write(tmp_path / "x.index"), write(tmp_path / "x.index")):
        assert (found.path is None) == bool(small) != (tmp_path / "x.index").exists()
        names, labels = found.text("name"), found.column("label")
        assert labels.tolist() == [0, 1, 2, 3, 4] and found.column("size").tolist() == [2**40, 7]
        assert [names[i] for i in range(5)] == names.chunk(0, 5) == NAMES and len(names) == 5
        assert [*names.chunks()] == [NAMES[:2], NAMES[2:4], NAMES[4:]] and names.chunk(3, 3) == []
        assert found.facts == {"made_of": {"of": 1}, "classes": ["\udcff", "b"]} and len(found.text("empty")) == 0
        assert names.digest() == Texts.of(NAMES).digest()
        assert pickle.loads(pickle.dumps(names)).chunk(0, 5) == NAMES


def test_index_file_is_read_by_the_safetensors_library(tmp_path):
    write(tmp_path / "x.index")
    found = load_file(tmp_path / "x.index")
    assert found["label"].tolist() == [0, 1, 2, 3, 4] and found["size"].tolist() == [2**40, 7]
    assert bytes(found["name"]) == b"".join(NAMES)


def test_damaged_index_is_not_opened(tmp_path):
    path = tmp_path / "x.index"
    write(path)
    content = path.read_bytes()
    assert open_index(path)
    for damaged in (b"", content[:10], content[:-1], content + b"x", content.replace(b"index 4", b"index 3")):
        path.write_bytes(damaged)
        assert open_index(path) is None
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = open_index(path)  # not None if the byte is in the offset of an empty column
        assert (
            found is None or found.text("name").chunk(0, 5) == NAMES and found.column("label").tolist() == [*range(5)]
        )
    path.unlink()
    assert open_index(path) is None
    path.mkdir()
    assert open_index(path) is None


def test_index_goes_to_the_second_folder_if_the_first_disk_is_full(tmp_path, monkeypatch):
    paths = [tmp_path / name / "x.index" for name in ("data", "cache")]

    def sync_full(file):
        if paths[0].parent in Path(file.name).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(index, "sync", sync_full)
    found = open_or_build(paths, COLUMNS, {}, build)
    assert found.path == paths[1] and found.text("name").chunk(0, 5) == NAMES and open_index(paths[0]) is None


def test_index_path_depends_on_data_folder_not_on_its_link(tmp_path):
    (tmp_path / "c").symlink_to("b")
    config = settings("csv", CACHE_PATH=str(tmp_path))
    first, second, third = (index_paths(config, tmp_path / name / "x.index") for name in "abc")
    assert (
        first[0] != second[0] and first[1].parent == second[1].parent == tmp_path and first[1] != second[1] == third[1]
    )


# --- indexes of every kind of data ---


def make_list(root: Path, lines: list[str], name: str = "train_list.txt") -> None:
    (root / name).write_text("".join(f"{line}\n" for line in lines))


def make_lists(root: Path) -> None:
    for part, numbers in (("train", range(7)), ("val", range(7, 10))):
        for number in numbers:
            draw(root / f"{number}.jpg", number)
        make_list(root, [f"{number}.jpg {number % 3}" for number in numbers], f"{part}_list.txt")


def make_csv(root: Path) -> None:
    for number in range(10):
        draw(root / f"{number}.jpg", number)
    make_list(root, ["image_path,target", *(f"{number}.jpg,{number % 3}" for number in range(10))], "train.csv")


def make_classes(root: Path) -> None:
    make_folders(root, {"ant": 5, "bee": 5, "bee/more": 3})


# {data set: (its writer, the module and function that reads its files, a change to it)}
KINDS = {
    "imagenet2012": (
        make_lists,
        (listing, "read_list_file"),
        lambda root: make_list(root, ["8.jpg 2"], "val_list.txt"),
    ),
    "csv": (
        make_csv,
        (csv_list, "read_csv_file"),
        lambda root: make_list(
            root, ["image_path,target", *(f"{number}.jpg,{number % 2}" for number in range(9))], "train.csv"
        ),
    ),
    "imagefolder": (make_classes, (folder, "FolderScan"), lambda root: draw(root / "ant" / "new.png")),
    "shards": (make_set, (shards, "scan"), lambda root: write_tar(root / "train-000001.tar", samples(100, 4))),
    "parquet": (
        make_parquet,
        (parquet, "_read_rows"),
        lambda root: write_parquet(root / "data" / "train-00001-of-00002.parquet", rows(range(3)), {"label": ANIMALS}),
    ),
}


def everything_of(dataset: str, root: Path, **data) -> list:
    """Return everything that affects a run."""
    found = []
    for part in load(dataset, root, VAL_FRACTION=0.3, **data):
        keys = [part.key(index) for index in range(len(part))]
        orders = [part.epoch_order(3, epoch)[: len(part)].tolist() for epoch in range(2)]
        found.append((shades(part), part.targets.tolist(), part.classes, keys, orders, part.split))
    return found


def reads(monkeypatch, function, module) -> list:
    """Return a list that grows with each call of a function of a module."""
    calls, original = [], getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given, **named: calls.append(1) or original(*given, **named))
    return calls


@pytest.mark.parametrize("dataset", KINDS)
def test_index_is_rebuilt_after_data_or_format_change(tmp_path, monkeypatch, dataset):
    make, (module, function), change = KINDS[dataset]
    make(tmp_path / "data")
    calls = reads(monkeypatch, function, module)
    first = everything_of(dataset, tmp_path / "data")
    count = len(calls)
    assert count and everything_of(dataset, tmp_path / "data") == first and len(calls) == count
    for path in (tmp_path / "data").rglob("*.index"):
        path.write_bytes(path.read_bytes().replace(b"index 4", b"index 3"))
    assert everything_of(dataset, tmp_path / "data") == first and len(calls) == 2 * count
    change(tmp_path / "data")
    assert everything_of(dataset, tmp_path / "data") != first and len(calls) > 2 * count


@pytest.mark.parametrize("dataset", KINDS)
def test_index_of_read_only_data_is_in_cache_folder(tmp_path, monkeypatch, dataset):
    make, (module, function), _ = KINDS[dataset]
    make(tmp_path / "data")
    save = index.Index.save

    def refuse(found, path):  # acts like a read-only disk, even for a superuser
        if tmp_path / "data" in path.parents:
            raise PermissionError(13, "Read-only file system")
        save(found, path)

    monkeypatch.setattr(index.Index, "save", refuse)
    calls, before = reads(monkeypatch, function, module), sorted((tmp_path / "data").rglob("*"))
    first = everything_of(dataset, tmp_path / "data", CACHE_PATH=str(tmp_path / "cache"))
    count = len(calls)
    assert everything_of(dataset, tmp_path / "data", CACHE_PATH=str(tmp_path / "cache")) == first
    assert count == len(calls) and list((tmp_path / "cache").glob("*.index"))
    assert sorted((tmp_path / "data").rglob("*")) == before
    monkeypatch.setattr(index.Index, "save", lambda found, path: refuse(found, tmp_path / "data" / "any"))
    in_memory = everything_of(dataset, tmp_path / "data", CACHE_PATH=str(tmp_path / "nowhere"))
    assert in_memory == first and len(calls) > count


# --- changes that the index of one kind must detect ---


@pytest.mark.parametrize("change", ["remove", "rename", "nested", "class", "unlink"])
def test_images_of_changed_folders_are_listed_again(tmp_path, tmp_path_factory, change):
    make_classes(tmp_path)
    draw((elsewhere := tmp_path_factory.mktemp("elsewhere")) / "linked" / "x.png")
    (tmp_path / "bee" / "link").symlink_to(elsewhere / "linked")
    first, again = load("imagefolder", tmp_path), load("imagefolder", tmp_path)
    assert [each.notes for each in first] == [each.notes for each in again]
    {
        "remove": (tmp_path / "ant" / "01.JPEG").unlink,
        "rename": lambda: (tmp_path / "ant" / "01.JPEG").rename(tmp_path / "ant" / "x.png"),
        "nested": lambda: draw(tmp_path / "bee" / "more" / "new.png"),
        "class": lambda: draw(tmp_path / "cat" / "new.png"),
        "unlink": lambda: (elsewhere / "linked").rename(elsewhere / "gone"),
    }[change]()
    after = load("imagefolder", tmp_path)
    assert sum(map(len, after)) == 14 + {"remove": -1, "rename": 0, "unlink": -1}.get(change, 1)
    assert change != "rename" or "ant/x.png" in {part.key(index) for part in after for index in range(len(part))}


def test_index_does_not_skip_checks_that_depend_on_settings(tmp_path, tmp_path_factory):
    root, elsewhere = tmp_path, tmp_path_factory.mktemp("elsewhere")
    make_lists(root)
    for place in (root / "more", elsewhere):
        draw(place / "x.jpg", 50)
    make_list(root, ["0.jpg 0", "1.jpg 1", "more/x.jpg 2"])
    load("imagenet2012", root)
    make_list(root, ["image_path,target,other", *(f"{each}.jpg,{each % 3},{each % 2}" for each in range(10))], "x.csv")
    for name, count in (("target", 3), ("other", 2)):
        assert len(load("csv", root / "x.csv", COLUMNS=("image_path", name))[0].classes) == count
    assert_names(error_of("imagenet2012", root, num_classes=2), "train_list.txt, line 3", "MODEL.NUM_CLASSES")
    shutil.rmtree(root / "more")
    (root / "more").symlink_to(elsewhere)
    assert_names(error_of("imagenet2012", root), "train_list.txt", "more/")
    (root / "more").unlink()
    (root / "0.jpg").unlink()
    assert_names(error_of("imagenet2012", root), "train_list.txt", "0.jpg")


def test_repeated_paths_are_reported_with_and_without_an_index(tmp_path):
    make_lists(tmp_path)
    make_list(tmp_path, ["0.jpg 0", "./0.jpg 1", "1.jpg 2", "7.jpg 0", "0.jpg 0"])
    for _ in range(2):
        notes = "".join(load("imagenet2012", tmp_path)[1].notes)
        assert "on 2 lines (0.jpg" in notes and "1 image in common (7.jpg)" in notes
        train, val = load("imagenet2012", tmp_path, evaluate=True)
        assert train is None and "7.jpg" not in "".join(val.notes)
    make_list(tmp_path, [f"{number}.jpg {number % 3}" for number in range(10)])
    assert_names(error_of("imagenet2012", tmp_path), "val_list.txt")


def test_split_is_drawn_once_per_fraction_and_once_for_all_folds(tmp_path, monkeypatch):
    make_classes(tmp_path)
    hashed = reads(monkeypatch, "split_keys", Table)
    wanted = [everything_of("imagefolder", tmp_path, FOLD=fold) for fold in (None, "0/3", "1/3")]
    count = len(hashed)
    for fold, parts in zip((None, "0/3", "1/3"), wanted, strict=True):
        assert everything_of("imagefolder", tmp_path, FOLD=fold) == parts
    assert len(hashed) == count == 2 and wanted[0] != wanted[1] != wanted[2]
    larger = [shades(each) for each in load("imagefolder", tmp_path, VAL_FRACTION=0.6)]
    assert larger != [part[0] for part in wanted[0]]
    monkeypatch.setattr(index, "SMALL", 10**6)
    for path in tmp_path.glob("*.index"):
        path.unlink()
    assert everything_of("imagefolder", tmp_path) == wanted[0], "the split must be the same without an index file"
    assert not list(tmp_path.glob("*.index"))


def test_part_has_the_keys_of_all_its_images_in_any_chunks(tmp_path, monkeypatch):
    whole = files_with(tmp_path, [f"{number}.png" for number in range(9)], [0] * 9, ["a"], Pixels(3))
    part = whole.take(np.array([8, 1, 2, 3, 7]))
    for chunk in (100, 2, 1):
        monkeypatch.setattr("datasets.index.CHUNK", chunk)
        assert [key for keys in part.all_keys() for key in keys] == [b"8.png", b"1.png", b"2.png", b"3.png", b"7.png"]
