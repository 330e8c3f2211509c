"""The index of a data set: its file, what damages it, and where it lies."""

import pickle

import numpy as np
import pytest

from datasets.index import file
from datasets.index.file import IndexWriter, open_index
from datasets.index.place import index_paths, open_or_build
from tests.support.image_sets import settings

NAMES = [b"", b"a/b.jpg", "ü".encode(), b"\xff\xfe", b"a/b.jpg"]


def write(path, small=0, facts=None):
    """An index of 5 labels and names and 2 sizes, in chunks; `small`: bytes that stay in memory."""
    writer = IndexWriter(path, {"label": "<i4", "name": file.TEXT, "size": "<u8"})
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
    writer = IndexWriter(tmp_path / "x.index", {"label": "<i4"})
    writer.add("label", np.arange(10_000))
    sent = pickle.dumps(writer.finish({}).column("label"))
    assert len(sent) < 500
    write(tmp_path / "x.index")
    with pytest.raises(file.DataError):
        pickle.loads(sent)


def test_a_damaged_index_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "SMALL", 0)
    path = tmp_path / "x.index"
    write(path)
    content = path.read_bytes()
    assert open_index(path)
    for damaged in (b"", content[:10], content[:-1], content + b"x", b"halfstep index 0" + content[16:]):
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
        built.append(path)
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
