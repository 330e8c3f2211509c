"""Numbers of images in parquet files and in tars."""

import json
import math
from decimal import Decimal

import numpy as np
import pytest

from tests.support.configs import replaced
from tests.support.image_sets import png, write_tar
from tests.support.number_rows import number_settings, numbers_of
from tests.support.opened import open_sets
from tests.support.parquet_files import write_parquet
from tests.support.refusals import refused
from utils.errors import ConfigError, DataError

NAN = math.nan
COUNT = 40


def write_table(path, **columns):
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(COUNT)]
    return write_parquet(path, {"image": images, **columns}, group=9)


def read(path, dataset, columns=("image", "age"), **data):
    return open_sets(replaced(number_settings(path), DATA={"DATASET": dataset, "COLUMNS": columns} | data))


def by_pixels(images) -> dict[int, list[float]]:
    """Return {red of an image: its numbers}, which shows that rows and images belong together."""
    return {int(images.read(index)[0, 0, 0]): numbers_of(images)[index].tolist() for index in range(len(images))}


def test_parquet_columns_of_all_numeric_types_are_numbers_of_their_images(tmp_path):
    ages = [None if number == 3 else number for number in range(COUNT)]
    weights = [Decimal(number) / 4 for number in range(COUNT)]
    sizes = np.float32([1.5 + number % 2 for number in range(COUNT)])
    path = write_table(tmp_path / "train.parquet", age=ages, name=["x"] * COUNT, weight=weights, size=sizes)
    train, val = read(path, "parquet", ("image", "*"))
    assert train.classes == ["age", "weight", "size"]
    found = by_pixels(train) | by_pixels(val)
    expected = {number: [NAN if number == 3 else number, number / 4, sizes[number]] for number in range(COUNT)}
    assert sorted(found) == sorted(expected)
    np.testing.assert_array_equal(
        [found[each] for each in sorted(found)], [expected[each] for each in sorted(expected)]
    )
    assert "missing for 1 image" in " ".join(val.notes)


def test_parquet_has_one_column_label_by_default(tmp_path):
    train, _ = read(write_table(tmp_path / "a.parquet", label=list(range(COUNT))), "parquet", ())
    assert train.classes == ["label"] and all(value == [red] for red, value in by_pixels(train).items())


@pytest.mark.parametrize(
    "columns, asked, named",
    [
        ({"age": ["old"] * COUNT}, "age", ["age", "string"]),
        ({"age": [1.0] * (COUNT - 1) + [math.inf]}, "age", [f"row {COUNT - 1}", "age", "inf"]),
        ({"age": [-1e31] * COUNT}, "age", ["row 0", "-1e+31"]),
        ({"age": [1] * COUNT}, "height", ["height", "age"]),
    ],
    ids=["text", "infinite", "huge", "unknown"],
)
def test_parquet_columns_without_numbers_are_named(tmp_path, columns, asked, named):
    path = write_table(tmp_path / "a.parquet", **columns)
    with refused(DataError, "a.parquet", *named):
        read(path, "parquet", ("image", asked))


def tars(folder, contents: list[dict | str | None]):
    """Write two tars with an image and a .json file for each content, or a .cls file for a text."""
    for part in range(2):
        files = {}
        for number in range(part, len(contents), 2):
            files[f"{number}.png"] = png(number)
            if contents[number] is not None:
                is_text = isinstance(contents[number], str)
                name = f"{number}.cls" if is_text else f"{number}.json"
                files[name] = contents[number].encode() if is_text else json.dumps(contents[number]).encode()
        write_tar(folder / f"train-{part:06d}.tar", files)
    return folder


def test_tars_have_numbers_in_json_files_by_their_keys(tmp_path):
    contents = [{"age": None if number == 4 else number / 2, "other": "x"} for number in range(COUNT)]
    for _ in range(2):  # the second time from the index
        train, val = read(tars(tmp_path, contents), "shards")
        found = by_pixels(train) | by_pixels(val)
        expected = [[NAN if number == 4 else number / 2] for number in range(COUNT)]
        np.testing.assert_array_equal([found[number] for number in range(COUNT)], expected)
        assert train.classes == ["age"]


def test_class_files_beside_json_files_are_no_numbers(tmp_path):
    files = {}
    for number in range(COUNT):
        files |= {f"{number}.cls": b"7", f"{number}.json": b'{"age": %d}' % number, f"{number}.png": png(number)}
    write_tar(tmp_path / "train-000000.tar", files)
    train, _ = read(tmp_path, "shards")
    assert all(value == [red] for red, value in by_pixels(train).items())


def test_cls_files_and_bare_json_numbers_are_single_numbers(tmp_path):
    contents = ["2.5" if number % 2 else number for number in range(COUNT)]
    train, _ = read(tars(tmp_path, contents), "shards", ())
    assert all(value == [2.5 if red % 2 else red] for red, value in by_pixels(train).items())


@pytest.mark.parametrize(
    "content, named",
    [
        (None, ["'6.png'", ".json"]),
        ({"Age": 3}, ["6.json", "Age", "age"]),
        ({"age": "old"}, ["6.json", "old"]),
        ("old", ["6.cls", "old"]),
        ([1, 2], ["6.json"]),
    ],
    ids=["missing", "other key", "text", "text in cls", "two numbers"],
)
def test_sample_without_a_number_is_named(tmp_path, content, named):
    contents: list = [{"age": number} for number in range(COUNT)]
    contents[6] = content
    with refused(DataError, "train-000000.tar", *named):
        read(tars(tmp_path, contents), "shards")


def test_columns_of_tars_need_names(tmp_path):
    with refused(ConfigError, "DATA.COLUMNS"):
        read(tars(tmp_path, [{"age": number} for number in range(COUNT)]), "shards", ("image", "*"))
