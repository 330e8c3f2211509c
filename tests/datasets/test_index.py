"""The index of a data set: its file, what damages it, and where it lies."""

import os
import pickle
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from datasets import index as file
from datasets.index import IndexWriter, Place, index_paths, open_index, open_or_build
from datasets.sources import csv_list, folder, imagenet, parquet, shards
from datasets.sources.images import FileImages
from tests.support.image_sets import draw, error_of, load, make_folders, make_set, samples, settings, shades, write_tar
from tests.support.parquet_files import ANIMALS, make_parquet, rows, write_parquet
from tests.support.refusals import assert_names
from utils.errors import DataError

NAMES = [b"", b"a/b.jpg", "ü".encode(), b"\xff\xfe", b"a/b.jpg"]


def write(path, small=0, facts=None):
    """An index of 5 labels and names and 2 sizes, in chunks; `small`: bytes that stay in memory."""
    writer = IndexWriter(
        Place(path) if isinstance(path, os.PathLike) else path, {"label": "<i4", "name": file.TEXT, "size": "<u8"}
    )
    for chunk in (slice(0, 2), slice(2, 5)):
        writer.add("label", np.arange(5)[chunk])
        writer.add("name", NAMES[chunk])
    writer.add("size", np.array([2**40, 7]))
    return writer.finish(facts or {})


@pytest.fixture(params=[True, False], ids=["memory", "file"])
def index(request, tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 10**6 if request.param else 0)
    made = write(tmp_path / "x.index", facts={"classes": ["\udcff", "b"]})
    assert (made.path is None) is request.param and (tmp_path / "x.index").exists() is not request.param
    return made


def test_an_index_gives_back_what_was_written_in_chunks(index):
    assert index.column("label").tolist() == [0, 1, 2, 3, 4] and index.column("size").tolist() == [2**40, 7]
    names = index.text("name")
    assert [names[i] for i in range(5)] == names.chunk(0, 5) == NAMES and len(names) == 5
    assert [*names.chunks(2)] == [NAMES[:2], NAMES[2:4], NAMES[4:]] and names.chunk(3, 3) == []
    assert index.facts == {"classes": ["\udcff", "b"]}


def test_columns_are_read_only_and_sent_to_other_processes(index):
    with pytest.raises(ValueError, match="read-only"):
        index.column("label")[0] = 1
    for each in (index.column("label"), index.column("label")[1:3]):
        assert pickle.loads(pickle.dumps(each)).tolist() == each.tolist()
    assert pickle.loads(pickle.dumps(index.text("name"))).chunk(0, 5) == NAMES


def test_a_mapped_column_is_sent_as_the_name_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    writer = IndexWriter(Place(tmp_path / "x.index"), {"label": "<i4"})
    writer.add("label", np.arange(10_000))
    sent = pickle.dumps(writer.finish({}).column("label"))
    assert len(sent) < 500
    write(tmp_path / "x.index")
    with pytest.raises(DataError):
        pickle.loads(sent)


def test_a_damaged_index_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    path = tmp_path / "x.index"
    write(path)
    content = path.read_bytes()
    assert open_index(path)
    for damaged in (b"", content[:10], content[:-1], content + b"x", b"halfstep index 1" + content[16:]):
        path.write_bytes(damaged)
        assert open_index(path) is None
    for place in range(0, 100, 7):  # in the header; the columns are not looked at
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert open_index(path) is None
    path.unlink()
    assert open_index(path) is None
    path.mkdir()
    assert open_index(path) is None


def test_an_index_is_built_once_at_the_first_place_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    (tmp_path / "blocked").write_text("not a folder")
    paths = [tmp_path / "blocked" / "x.index", tmp_path / "b" / "x.index"]
    built = []

    def build(path):
        built.append(path and path.path)
        return write(path, facts={"version": 1})

    def get(version=1):
        return open_or_build(paths, lambda index: index.facts["version"] == version, build)

    assert get().path == paths[1] and built == paths
    assert get().path == paths[1] and built == paths
    get(version=2)
    assert built == paths * 2
    assert [each.name for each in (tmp_path / "b").iterdir()] == ["x.index"]
    paths.pop()
    assert get().path is None and built[-1] is None


def test_places_of_an_index_differ_for_data_of_the_same_name(tmp_path):
    first, second = (index_paths(settings("csv", CACHE_PATH=str(tmp_path)), tmp_path / n / "x.index") for n in "ab")
    assert first[0] != second[0] and first[1].parent == second[1].parent == tmp_path and first[1] != second[1]


def make_list(root, lines, name="train_list.txt"):
    (root / name).write_text("".join(f"{line}\n" for line in lines))
    age(root / name)


def age(*paths, seconds=100):
    """Date files and folders back, as if they had not been changed just now."""
    for path in paths:
        os.utime(path, ns=(time.time_ns() - seconds * 10**9,) * 2)


def reads(monkeypatch, function, module):
    """A list that grows with each call of a function of a module."""
    calls, original = [], getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given, **named: calls.append(1) or original(*given, **named))
    return calls


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    for number in range(10):
        draw(tmp_path / f"{number}.jpg", number)
    make_list(tmp_path, [f"{number}.jpg {number % 3}" for number in range(7)])
    make_list(tmp_path, [f"{number}.jpg {number % 3}" for number in range(7, 10)], "val_list.txt")
    return tmp_path, reads(monkeypatch, "read_list_file", imagenet)


@pytest.mark.parametrize("seconds", [0, 3600])
def test_a_change_that_leaves_size_and_date_as_they_were_is_seen(lists, seconds):
    root, parsed = lists
    now = time.time_ns() - seconds * 10**9
    os.utime(root / "train_list.txt", ns=(now, now))
    load("imagenet2012", root)
    content = (root / "train_list.txt").read_text()
    (root / "train_list.txt").write_text(content.replace("0.jpg 0", "0.jpg 1"))
    os.utime(root / "train_list.txt", ns=(now, now))
    assert load("imagenet2012", root)[0].targets[0] == 1 and len(parsed) == 4


def test_what_depends_on_the_settings_is_checked_with_an_index_too(lists):
    root, _ = lists
    load("imagenet2012", root)
    assert_names(error_of("imagenet2012", root, num_classes=2), "train_list.txt, line 3", "MODEL.NUM_CLASSES")
    (root / "0.jpg").unlink()
    assert_names(error_of("imagenet2012", root), "train_list.txt, line 1", "0.jpg")


def test_a_folder_that_became_a_link_out_of_the_data_is_refused_with_an_index_too(lists, tmp_path_factory):
    root, _ = lists
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for place in (root / "more", elsewhere):
        draw(place / "x.jpg", 50)
    make_list(root, ["0.jpg 0", "1.jpg 1", "more/x.jpg 2"])
    load("imagenet2012", root)
    shutil.rmtree(root / "more")
    (root / "more").symlink_to(elsewhere)
    assert_names(error_of("imagenet2012", root), "train_list.txt, line 3", "more/x.jpg")


def test_repeated_paths_are_told_with_an_index_too(lists):
    root, _ = lists
    make_list(root, ["0.jpg 0", "./0.jpg 1", "1.jpg 2", "7.jpg 0"])
    for _ in range(2):
        notes = "".join(load("imagenet2012", root)[1].notes)
        assert "1, 1 of them with another class (0.jpg)" in notes and "1 (7.jpg)" in notes
        train, val = load("imagenet2012", root, evaluate=True)
        assert train is None and "7.jpg" not in "".join(val.notes)
    make_list(root, [f"{number}.jpg {number % 3}" for number in range(10)])
    assert_names(error_of("imagenet2012", root), "val_list.txt")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    make_folders(tmp_path / "data", {"ant": 5, "bee": 5, "bee/more": 3})
    everything = [path for path in (tmp_path / "data").rglob("*") if path.is_dir()]
    age(*everything)
    return tmp_path / "data", reads(monkeypatch, "FolderScan", folder)


@pytest.mark.parametrize("change", ["add", "remove", "rename", "nested", "class"])
def test_folders_are_listed_once_until_one_changes(folders, change):
    root, listed = folders
    first = load("imagefolder", root)
    again = load("imagefolder", root)
    assert len(listed) == 1 and (root / "images.index").exists()
    for before, after in zip(first, again, strict=True):
        assert before.targets.tolist() == after.targets.tolist() and shades(before) == shades(after)
        assert before.notes == after.notes
    {
        "add": lambda: draw(root / "ant" / "new.png"),
        "remove": (root / "ant" / "01.JPEG").unlink,
        "rename": lambda: (root / "ant" / "01.JPEG").rename(root / "ant" / "x.png"),
        "nested": lambda: draw(root / "bee" / "more" / "new.png"),
        "class": lambda: draw(root / "cat" / "new.png"),
    }[change]()
    age(*(path for path in root.rglob("*") if path.is_dir() and path.stat().st_mtime > time.time() - 50), seconds=50)
    after = load("imagefolder", root)
    assert sum(map(len, after)) == 13 + {"remove": -1, "rename": 0}.get(change, 1) and len(listed) == 2


def test_folders_that_changed_just_now_are_listed_when_that_is_over(folders, monkeypatch):
    root, listed = folders
    draw(root / "ant" / "new.png")
    slept = []

    def add_one_more(seconds):
        slept.append(seconds)
        draw(root / "ant" / "newer.png")

    monkeypatch.setattr(time, "sleep", add_one_more)
    assert sum(map(len, load("imagefolder", root))) == 15
    assert len(listed) == 2 and 1.5 < slept[0] <= 2 and len(slept) == 1


def test_a_split_is_drawn_once_for_each_fraction_and_seed(folders, monkeypatch):
    root, _ = folders
    hashed = reads(monkeypatch, "split_keys", FileImages)
    first = load("imagefolder", root, VAL_FRACTION=0.3)
    count = len(hashed)
    again = load("imagefolder", root, VAL_FRACTION=0.3)
    assert len(hashed) == count > 0
    monkeypatch.setattr(file, "SMALL", 10**6)
    (root / "images.index").unlink()
    in_memory = load("imagefolder", root, VAL_FRACTION=0.3)
    for one, other, third in zip(first, again, in_memory, strict=True):
        assert shades(one) == shades(other) == shades(third)
        assert one.targets.tolist() == other.targets.tolist() == third.targets.tolist()
        assert one.notes == other.notes == third.notes and one.split == other.split == third.split
    monkeypatch.setattr(file, "SMALL", 0)
    wanted = [shades(each) for each in load("imagefolder", root, VAL_FRACTION=0.35)]
    assert wanted != [shades(each) for each in first]
    load("imagefolder", root, VAL_FRACTION=0.3)
    assert [shades(each) for each in load("imagefolder", root, VAL_FRACTION=0.35)] == wanted


def test_a_set_sent_to_a_loader_process_takes_no_copy_of_its_columns_along(folders):
    root, _ = folders
    train, val = load("imagefolder", root, VAL_FRACTION=0.3)
    for image_set in (train, val):
        sent = pickle.dumps(image_set)
        received = pickle.loads(sent)
        assert shades(received) == shades(image_set) and received.targets.tolist() == image_set.targets.tolist()
        assert all(path.encode() not in sent for path in (train.key(0), val.key(0)))


def test_no_file_is_written_for_a_small_set(tmp_path):
    make_folders(tmp_path / "data", {"ant": 5, "bee": 5})
    before = sorted(tmp_path.rglob("*"))
    load("imagefolder", tmp_path / "data", CACHE_PATH=str(tmp_path / "cache"))
    assert sorted(tmp_path.rglob("*")) == before


# --- the index of every kind of data ---


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
    make_folders(root, {"ant": 5, "bee": 5})
    age(*(path for path in root.rglob("*") if path.is_dir()))


# {data set: (writes it, the module and function that reads its files again, a change of it)}
KINDS = {
    "imagenet2012": (make_lists, (imagenet, "read_list_file"), lambda root: make_list(root, ["8.jpg 2"], "val_list.txt")),
    "csv": (make_csv, (csv_list, "read_csv_file"), lambda root: make_list(root, ["image_path,target", *(f"{number}.jpg,{number % 2}" for number in range(9))], "train.csv")),
    "imagefolder": (make_classes, (folder, "FolderScan"), lambda root: draw(root / "ant" / "new.png")),
    "shards": (make_set, (shards, "scan"), lambda root: write_tar(root / "train-000001.tar", samples(100, 4))),
    "parquet": (make_parquet, (parquet, "_read_rows"), lambda root: write_parquet(root / "data" / "train-00001-of-00002.parquet", rows(range(3)), {"label": ANIMALS})),
}  # fmt: skip


def everything_of(dataset: str, root: Path, **data) -> list:
    """What a run depends on."""
    found = []
    for part in load(dataset, root, VAL_FRACTION=0.3, **data):
        keys = [part.key(index) for index in range(len(part))]
        orders = [part.epoch_order(3, epoch)[: len(part)].tolist() for epoch in range(2)]
        found.append((shades(part), part.targets.tolist(), part.classes, keys, orders))
    return found


@pytest.mark.parametrize("dataset", KINDS)
def test_an_index_is_kept_until_its_data_changes_and_an_older_or_broken_one_is_made_anew(
    tmp_path, monkeypatch, dataset
):
    make, (module, function), change = KINDS[dataset]
    monkeypatch.setattr(file, "SMALL", 0)
    make(tmp_path / "data")
    calls = reads(monkeypatch, function, module)
    first = everything_of(dataset, tmp_path / "data")
    count = len(calls)
    assert count and everything_of(dataset, tmp_path / "data") == first and len(calls) == count
    for index in (tmp_path / "data").rglob("*.index"):
        index.write_bytes(index.read_bytes().replace(file.MAGIC, b"halfstep index 1\n"))
    assert everything_of(dataset, tmp_path / "data") == first and len(calls) == 2 * count
    change(tmp_path / "data")
    assert everything_of(dataset, tmp_path / "data") != first and len(calls) > 2 * count


@pytest.mark.parametrize("dataset", KINDS)
def test_where_the_data_cannot_be_written_to_the_index_lies_in_the_folder_of_caches(tmp_path, monkeypatch, dataset):
    make, (module, function), _ = KINDS[dataset]
    monkeypatch.setattr(file, "SMALL", 0)
    make(tmp_path / "data")
    locked = file.locked

    def refuse(path, wait=None):  # as a read-only disk does, even to the superuser who may run this test
        if tmp_path / "data" in path.parents:
            raise PermissionError(13, "Read-only file system")
        return locked(path, wait)

    monkeypatch.setattr(file, "locked", refuse)
    calls, before = reads(monkeypatch, function, module), sorted((tmp_path / "data").rglob("*"))
    first = everything_of(dataset, tmp_path / "data", CACHE_PATH=str(tmp_path / "cache"))
    count = len(calls)
    assert everything_of(dataset, tmp_path / "data", CACHE_PATH=str(tmp_path / "cache")) == first
    assert count == len(calls) and list((tmp_path / "cache").glob("*.index"))
    assert sorted((tmp_path / "data").rglob("*")) == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_build_that_is_killed_leaves_nothing_that_a_next_start_reads(tmp_path, monkeypatch, call):
    make_set(tmp_path)
    wanted = everything_of("shards", tmp_path)
    for index in tmp_path.glob("*.index"):
        index.unlink()
    pid = os.fork()
    if not pid:
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        everything_of("shards", tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.glob("*.index")) and list(tmp_path.glob(".*.part"))
    assert everything_of("shards", tmp_path) == wanted and not list(tmp_path.glob(".*.part"))


def test_of_two_that_start_at_once_one_builds_and_the_other_waits_for_it(tmp_path, monkeypatch):
    make_set(tmp_path)
    begun, scan, calls = threading.Event(), shards.scan, []

    def slow(tar):
        begun.set()
        calls.append(tar.title)
        time.sleep(0.3)
        return scan(tar)

    monkeypatch.setattr(shards, "scan", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(everything_of, "shards", tmp_path)
        assert begun.wait(60)
        second = pool.submit(everything_of, "shards", tmp_path)
        assert first.result() == second.result()
    assert len(calls) == len(set(calls)) == 4
