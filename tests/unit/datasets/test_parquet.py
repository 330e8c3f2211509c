"""Parquet files: the choice of files and columns, refused files, and how row groups are read."""

import contextlib
import json
import os
import pickle
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import numpy as np
import pyarrow.parquet
import pytest

from datasets import opening
from datasets.sources import parquet
from datasets.sources.parquet import GroupCache, read_columns
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import error_of, load, png, shades
from tests.support.parquet_files import ANIMALS, make_parquet, rows, write_parquet
from tests.support.refusals import assert_names, refused
from tests.support.weight_files import Payload
from utils.errors import ConfigError, DataError

# --- reading ---


@pytest.mark.parametrize(
    "names",
    [
        ["train.parquet", "validation.parquet"],
        ["train/a.parquet", "test/b.parquet"],
        ["default/train/0000.parquet", "default/validation/0000.parquet"],
        ["data/birds-train-00000-of-00001-0ab1.parquet", "data/birds-valid-00000-of-00001-0ab2.parquet"],
    ],
)
def test_train_and_val_parquet_files_are_recognized_by_their_paths(tmp_path, names):
    for name, numbers in zip(names, (range(9), range(20, 23)), strict=True):
        write_parquet(tmp_path / name, rows(numbers))
    train, val = load("parquet", tmp_path)
    assert (shades(train), shades(val)) == (list(range(9)), [20, 21, 22])
    assert train.classes == ["0", "1", "2"] and not train.meaning.numbering.are_names
    assert train.file(7) == (".png", png(7))


def test_single_parquet_file_is_split_by_image_name(tmp_path):
    path = write_parquet(tmp_path / "all.parquet", rows(range(40)))
    train, val = load("parquet", path, VAL_FRACTION=0.3)
    assert sorted(shades(train) + shades(val)) == list(range(40)) and len(val) > 1
    assert shades(load("parquet", tmp_path, VAL_FRACTION=0.3)[1]) == shades(val)  # the only file in its folder
    first, more = rows(range(100, 120)), rows(range(40))
    write_parquet(tmp_path / "more.parquet", {name: first[name] + more[name] for name in first})
    assert set(shades(val)) <= set(shades(load("parquet", tmp_path / "more.parquet", VAL_FRACTION=0.3)[1]))
    assert_names(error_of("parquet", tmp_path), "DATA.DATA_PATH", "train-00000-of-00002.parquet")


def test_repeated_parquet_names_and_classes_stay_distinct(tmp_path):
    columns = rows(range(6))
    columns["image"][5]["path"] = "0000.png"
    path = write_parquet(tmp_path / "train.parquet", columns, {"label": ["crane", "cat", "crane"]})
    train, val = load("parquet", path, VAL_FRACTION=0.3)
    keys = [part.key(index) for part in (train, val) for index in range(len(part))]
    assert sorted(keys) == [f"train.parquet: {row}" for row in range(6)]
    assert train.classes == ["crane (0)", "cat", "crane (2)"]


def plain_binary() -> dict:
    return {"image": [png(number) for number in range(6)], "label": [number % 3 for number in range(6)]}


def as_dictionary(values: list) -> pyarrow.Array:
    return pyarrow.array(values).dictionary_encode()


@pytest.mark.parametrize(
    "columns",
    [
        plain_binary(),
        plain_binary() | {"image": pyarrow.array(plain_binary()["image"], pyarrow.large_binary())},
        rows(range(6)) | {"width": [6] * 6, "thumbnail_size": ["small"] * 6},
        rows(range(6)) | {"label": pyarrow.array([0, 1, 2, 0, 1, 2], pyarrow.uint8())},
        rows(range(6)) | {"label": as_dictionary([0, 1, 2, 0, 1, 2])},
        rows(range(6)) | {"label": ["ant", "bee", "cat"] * 2},
        rows(range(6)) | {"label": as_dictionary(["ant", "bee", "cat"] * 2)},
    ],
)
def test_all_parquet_image_and_label_types_are_read(tmp_path, columns):
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", columns)
    train, _ = load("parquet", tmp_path)
    assert shades(train) == list(range(6)) and train.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert train.classes in (ANIMALS, ["0", "1", "2"])


def test_text_classes_are_collected_from_all_parquet_files(tmp_path):
    for name, labels in {"train-0": ["bee", "cat"], "train-1": ["ant", "bee"], "val": ["ant", "cat"]}.items():
        write_parquet(tmp_path / f"{name}.parquet", rows(range(2)) | {"label": labels})
    train, _ = load("parquet", tmp_path)
    assert [train.classes[target] for target in train.targets] == ["bee", "cat", "ant", "bee"]


def test_columns_setting_selects_parquet_columns_with_other_names(tmp_path):
    columns = {"img": rows(range(6))["image"], "fine_label": [5, 4, 3, 2, 1, 0], "label": [0] * 6}
    for part in ("train", "val"):
        write_parquet(tmp_path / f"{part}.parquet", columns, {"fine_label": list("abcdef")})
    assert_names(error_of("parquet", tmp_path), "image", "img", "fine_label", "DATA.COLUMNS")
    train, _ = load("parquet", tmp_path, COLUMNS=("img", "fine_label"))
    assert train.targets.tolist() == [5, 4, 3, 2, 1, 0] and train.classes == list("abcdef")


# --- refused files ---


def test_duplicate_parquet_columns_are_refused(tmp_path):
    table = pyarrow.table(rows(range(4)))
    pyarrow.parquet.write_table(table.append_column("label", table["label"]), tmp_path / "train.parquet")
    assert_names(error_of("parquet", tmp_path), "label", "DATA.COLUMNS")


@pytest.mark.parametrize("change", cases_of("mistakes-in_parquet_columns"))
def test_unusable_parquet_rows_and_columns_are_named(tmp_path, change):
    """Replace the last values of a column by these."""
    columns, (name, text) = rows(range(6)), change.split("=")
    values = json.loads(text)
    columns[name][-len(values) :] = values
    path = write_parquet(tmp_path / "train.parquet", columns)
    assert_names(error_of("parquet", path), *names_of("mistakes-in_parquet_columns", change))


def test_mismatched_parts_and_empty_parquet_files_are_refused(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", rows(range(6)), {"label": ["a", "b"]})
    assert_names(error_of("parquet", tmp_path), str(path), "row 2", 2)
    write_parquet(path, rows(range(6)))
    other = write_parquet(tmp_path / "val.parquet", rows(range(8), num_classes=4))
    assert_names(error_of("parquet", tmp_path), str(other), "row 3", 3)
    for columns, classes in (
        (rows(range(6)), {"label": ["a", "b", "c"]}),
        (rows(range(6)) | {"label": list("abcabc")}, None),
    ):
        write_parquet(path, columns, classes)
        assert_names(error_of("parquet", tmp_path), str(other), str(path))
    empty = pyarrow.parquet.read_table(path).slice(0, 0)
    for file, place in ((other, tmp_path), (path, path)):
        pyarrow.parquet.write_table(empty, file)
        assert_names(error_of("parquet", place), str(file))
        other.unlink(missing_ok=True)


def test_error_names_truncated_damaged_or_foreign_parquet_file(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", rows(range(40)))
    content = path.read_bytes()
    names = [place for place in range(len(content)) if content.startswith(b"bytes", place)]  # in the column of images
    no_text, no_column = (
        bytes(each ^ flipped if place - 1 in names else each for place, each in enumerate(content))
        for flipped in (128, 1)
    )
    for wrong in (content[: len(content) // 2], b"", b"PAR1 and more", no_text, no_column):
        path.write_bytes(wrong)
        assert_names(error_of("parquet", path), str(path))
    middle = len(content) // 4
    path.write_bytes(content[:middle] + bytes(1000) + content[middle + 1000 :])
    with refused(DataError, str(path)):
        for part in load("parquet", path):
            shades(part)


def test_error_for_missing_or_unsafe_pyarrow_names_install_command(tmp_path, monkeypatch):
    make_parquet(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow, "__version__", "14.0.0")
        assert_names(error_of("parquet", tmp_path), "14.0.0", "pip install -U pyarrow")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with refused(ConfigError, "DATA.DATASET", "pip install pyarrow"):
        load("parquet", tmp_path)


def test_pickled_parquet_extension_type_is_not_loaded(tmp_path):
    """Before pyarrow 14.0.1, files could do this."""
    marker = tmp_path / "executed"
    hidden = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Payload(marker.touch)),
    }
    table = pyarrow.table(rows(range(6)))
    field = table.schema.field("label").with_metadata(hidden)
    pyarrow.parquet.write_table(table.cast(table.schema.set(1, field)), tmp_path / "train.parquet")
    assert sum(map(len, load("parquet", tmp_path))) == 6 and not marker.exists()


# --- row groups ---


def test_parquet_file_replaced_during_a_run_ends_the_run(tmp_path):
    make_parquet(tmp_path)
    train, _ = load("parquet", tmp_path)
    assert int(train.read(0)[0, 0, 0]) == 0
    path = tmp_path / "data" / "train-00000-of-00002.parquet"
    write_parquet(path, rows(range(100, 110)), {"label": ANIMALS})
    with refused(DataError, path, "-resume"):
        train.read(9)  # an image in another row group


def test_failed_row_group_read_is_retried_once(tmp_path, monkeypatch):
    columns = rows(range(6)) | {"image": [*plain_binary()["image"][:5], None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path := tmp_path / "train.parquet", write_statistics=False)
    with patch.object(opening, "MOST_SEARCHED", 0):
        train, val = load("parquet", path, VAL_FRACTION=0.5)
    read, failing = pyarrow.parquet.ParquetFile.read_row_group, [OSError(5, "Input/output error")]

    def read_row_group(file, *given, **named):
        if failing:
            raise failing.pop()
        return read(file, *given, **named)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr("datasets.sources.images.RETRY_AFTER", (0.0,))
    with refused(DataError, path, "row 5"):
        shades(train) + shades(val)
    assert not failing


def test_epoch_order_keeps_rows_of_a_row_group_close_together(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", rows(range(200)), group=10)
    write_parquet(tmp_path / "val.parquet", rows(range(3)))
    train, _ = load("parquet", tmp_path, SHUFFLE_BUFFER=20)
    order = np.asarray(train.epoch_order(3, 1)[:200])
    assert sorted(order) == list(range(200)) and (order != np.asarray(train.epoch_order(3, 2)[:200])).any()
    places = [np.flatnonzero(order // 10 == group) for group in range(20)]
    assert max(place.max() - place.min() for place in places) < 10 + 2 * 20
    assert str(path) in train.name(0)
    assert [read_columns(path, ["label"], group).num_rows for group in (None, 0, 19)] == [200, 10, 10]
    order, mixed = (
        np.asarray(each[:200]) // 10 for each in (train.epoch_order(3, 0), train.storage.order_to_write(None, 200, 3))
    )
    assert np.count_nonzero(np.diff(mixed)) > np.count_nonzero(np.diff(order))  # the order for shards mixes more


def test_small_cache_still_reads_row_groups_once(tmp_path, monkeypatch):
    write_parquet(tmp_path / "train.parquet", rows(range(200)), group=20)
    write_parquet(tmp_path / "val.parquet", rows(range(3)))
    read, reads = parquet.read_columns, []
    monkeypatch.setattr(parquet, "read_columns", lambda *given, **named: reads.append(given) or read(*given, **named))
    whole = load("parquet", tmp_path)[0].storage.num_bytes
    for num_bytes, again in ((2 * whole, range(1)), (whole // 2, range(5, 11))):
        monkeypatch.setattr(parquet, "CACHE_BYTES", num_bytes)
        monkeypatch.setattr(parquet, "GROUPS", GroupCache())
        train, _ = load("parquet", tmp_path, SHUFFLE_BUFFER=10**6)
        for epoch, wanted in enumerate((range(10, 11), again)):
            reads.clear()
            for index in train.epoch_order(0, epoch)[:200]:
                train.read(int(index))
            assert len(reads) in wanted


def test_parquet_rows_sorted_by_class_cause_a_warning(tmp_path):
    columns = rows(range(90), num_classes=30)
    path = write_parquet(tmp_path / "train.parquet", columns)
    assert "warning" not in "\n".join(load("parquet", path, SHUFFLE_BUFFER=9)[1].notes)
    write_parquet(path, columns | {"label": sorted(columns["label"])})
    assert_names("\n".join(load("parquet", path, SHUFFLE_BUFFER=9)[1].notes), "warning", 9, "halfstep make-shards")
    assert "warning" not in "\n".join(load("parquet", path, SHUFFLE_BUFFER=90)[1].notes), "this buffer mixes all rows"


def test_threads_share_cached_row_groups_and_drop_the_oldest():
    cache, reads, meet = GroupCache(), [], threading.Barrier(4)

    def get(key: str) -> str:
        meet.wait()
        return cache.get(key, 2, lambda: reads.append(key) or key)

    with ThreadPoolExecutor(4) as pool:
        for key in "abacab":
            assert set(pool.map(get, [key] * 4)) == {key}
    assert reads == ["a", "b", "c", "b"]
    with pytest.raises(OSError, match="disk"):
        cache.get("x", 2, lambda: (_ for _ in ()).throw(OSError("disk")))
    assert cache.get("x", 2, lambda: "read again") == "read again"


def test_forked_process_never_waits_for_reads_of_parent_threads():
    cache, begun, goes_on = GroupCache(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.get, "a", 2, lambda: begun.set() or goes_on.wait(60))
        assert begun.wait(60)
        if not (pid := os.fork()):
            signal.alarm(20)
            os._exit(cache.get("a", 2, lambda: 7))
        goes_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_contradictory_parquet_footer_is_refused_without_a_crash(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", rows(range(6)))
    whole, start = path.read_bytes(), len(path.read_bytes()) - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    types = (each.start() for each in re.finditer(rb"\x15\x0c", whole) if each.start() > start)  # field 1: BYTE_ARRAY
    for place in types:
        path.write_bytes(whole[: place + 1] + b"\x7e" + whole[place + 2 :])
        with contextlib.suppress(OSError):
            metadata = pyarrow.parquet.read_metadata(path)
            if metadata.row_group(0).column(0).physical_type != metadata.schema.column(0).physical_type:
                break
    else:
        pytest.fail("no such byte")
    with refused(DataError, path, "damaged"):
        load("parquet", tmp_path)
