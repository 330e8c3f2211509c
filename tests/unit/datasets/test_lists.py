"""Images named by list files and CSV files, and errors in their lines."""

import os
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest

from configs.schema import Config
from datasets import SavedData
from datasets.fingerprint import data_facts
from datasets.index import equal_rows
from datasets.sources import csv_list, listing
from datasets.targets.class_labels import numbered_classes
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import replaced
from tests.support.image_sets import draw, error_of, load, settings, shades
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from utils.errors import DataError


def make_lists(root: Path, train: str, val: str = "val.jpg 0\n") -> None:
    (root / "train_list.txt").write_text(train, encoding="utf-8")
    (root / "val_list.txt").write_text(val, encoding="utf-8")
    for shade, name in enumerate(["a.jpg", "n01/my holiday photo.jpg", "n02/c.jpg", "val.jpg"]):
        draw(root / name, shade)


@pytest.mark.parametrize("line", cases_of("mistakes-in_a_list"))
def test_wrong_list_line_is_reported_with_its_number(tmp_path, line):
    root = tmp_path / "data"
    root.mkdir()
    draw(tmp_path / "elsewhere" / "c.jpg")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    make_lists(root, f"a.jpg 0\n\n{line}\n")
    num_classes = None if "1000" in line or "99" in line else 3
    assert_names(error_of("imagenet2012", root, num_classes=num_classes), *names_of("mistakes-in_a_list", line))


def test_links_are_refused_only_if_they_lead_out_of_data_folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    make_lists(root, "a.jpg 0\ninside.jpg 1\nlink.jpg 0\n")
    draw(tmp_path / "secret.jpg")
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "inside.jpg").symlink_to(root / "n02" / "c.jpg")
    train, _ = load("imagenet2012", root)
    assert train.read(1)[0, 0, 0] == 2
    with refused(DataError, root / "link.jpg", root):
        train.read(2)


def test_evaluation_reads_only_the_validation_list(tmp_path):
    make_lists(tmp_path, "a.jpg 0\nmissing.jpg 7\n")
    train, val = load("imagenet2012", tmp_path, evaluate=True)
    assert train is None and len(val.classes) == 8
    (tmp_path / "train_list.txt").unlink()
    assert len(load("imagenet2012", tmp_path, evaluate=True)[1].classes) == 1
    assert_names(error_of("imagenet2012", tmp_path), "DATA.DATA_PATH", "train_list.txt")
    make_lists(tmp_path, "a.jpg 0\n", "\n")
    assert_names(error_of("imagenet2012", tmp_path), tmp_path, "validation")


def test_validation_class_without_training_images_is_refused(tmp_path):
    make_lists(tmp_path, "a.jpg 0\na.jpg 2\n", "a.jpg 2\nn02/c.jpg 1\n")
    assert_names(error_of("imagenet2012", tmp_path), "n02/c.jpg", "class 1")
    make_lists(tmp_path, "a.jpg 0\n", "n02/c.jpg 2\nval.jpg 1\n")  # the file and the class belong to the same line
    assert_names(error_of("imagenet2012", tmp_path), "val.jpg", "class 1")
    make_csv(tmp_path / "train.csv", "images/1.jpg,dog\n")
    make_csv(tmp_path / "val.csv", "images/2.jpg,Dogs\n")
    assert_names(error_of("csv", tmp_path), "images/2.jpg", "Dogs", "dog")


def make_csv(file: Path, rows: str, header: str = "image_path,target", encoding: str = "utf-8") -> None:
    file.write_text(f"{header}\n{rows}", encoding=encoding)
    for shade in range(10):
        draw(file.parent / "images" / f"{shade}.jpg", shade)


@pytest.mark.parametrize("text", cases_of("mistakes-in_a_csv_file"))
def test_wrong_csv_row_is_reported_with_its_line(tmp_path, text):
    header, _, rows = content_of(text).partition("\n")
    make_csv(tmp_path / "train.csv", rows, header)
    message = error_of("csv", tmp_path, num_classes=5)
    assert_names(message, *names_of("mistakes-in_a_csv_file", text))


def test_image_root_is_the_folder_of_listed_paths_and_their_limit(tmp_path):
    root, lists = tmp_path / "photos", tmp_path / "lists"
    root.mkdir()
    make_csv(root / "train.csv", "images/3.jpg,dog\nimages/4.jpg,cat\n")
    make_csv(root / "val.csv", "images/5.jpg,dog\nimages/6.jpg,cat\n")
    beside = load("csv", root)
    lists.mkdir()
    for name in ("train.csv", "val.csv"):
        (root / name).rename(lists / name)
    train, val = load("csv", lists, IMAGE_ROOT=str(root))
    assert (shades(train), shades(val)) == ([3, 4], [5, 6]) and val.table_name(0) == "images/5.jpg"
    assert data_facts(train, val) == data_facts(*beside)
    assert_names(error_of("csv", lists), lists / "images/3.jpg")
    assert_names(error_of("csv", lists, IMAGE_ROOT=str(root / "none")), "DATA.IMAGE_ROOT", root / "none")
    draw(lists / "7.jpg")
    (lists / "train.csv").write_text("image_path,target\nimages/3.jpg,dog\n../lists/7.jpg,cat\n")
    assert_names(error_of("csv", lists, IMAGE_ROOT=str(root)), "../lists/", root)


def test_csv_classes_must_be_utf8_unlike_file_names(tmp_path):
    for name in ("1 ÿ", "1 €"):  # the bytes from 0x80 to 0xff
        make_csv(tmp_path / "train.csv", f"images/1.jpg;{name}\nimages/2.jpg;dog\n", "image_path;target", "cp1252")
        assert_names(error_of("csv", tmp_path), "train.csv, line 2", "target", "UTF-8")
    (tmp_path / "images" / "3.jpg").rename(tmp_path / "images" / os.fsdecode(b"k\xe4fer.jpg"))
    more = "".join(f"images/{shade}.jpg;{'bee' if shade % 2 else 'dog'}\n" for shade in range(4, 10))
    make_csv(tmp_path / "train.csv", f"images/käfer.jpg;bee\n{more}", "image_path;target", "cp1252")
    assert sum(map(len, load("csv", tmp_path / "train.csv", VAL_FRACTION=0.3))) == 7
    (tmp_path / "train.csv").write_bytes("image_path,target".encode("utf-16")[:-1])
    assert_names(error_of("csv", tmp_path), "train.csv", "UTF-8")


@pytest.mark.parametrize(
    ("header", "row", "empty"),
    [
        ("sep=;\r\nimage_path;target;by\r\n", "{};{};{}\r\n", ""),
        ('"sep=|"\nimage_path|target|by\n', "{}|{}|{}\n", ""),
        ("sep=\t\nimage_path\ttarget\tby\n", "{}\t{}\t{}\n", "\t\t\n"),
        ("image_path;target;by\n", "{};{};{}\n", ";;\n ; ;\n;;;;\n"),
        ("Image_Path;Target;BY\n", "{};{};{}\n", ""),
        ("Image_Path;Target;target;By;TARGET\n", "{};other;{};{};other\n", ""),  # an equal name comes first
    ],
)
def test_csv_saved_by_a_spreadsheet_equals_the_plain_file(tmp_path, header, row, empty):
    cells = [(f"images/{each}.jpg", ["dog", "cat"][each % 2], f"person {each % 5}") for each in range(10)]
    make_csv(tmp_path / "list.csv", "\n".join(map(",".join, cells)), "image_path,target,by")
    plain = load("csv", tmp_path / "list.csv", VAL_FRACTION=0.4, GROUP_BY="by")
    rows = [row.format(*each) for each in cells]
    (tmp_path / "list.csv").write_text("".join([header, *rows[:5], empty, *rows[5:], empty]), newline="")
    found = load("csv", tmp_path / "list.csv", VAL_FRACTION=0.4, GROUP_BY="by")
    assert data_facts(*found) == data_facts(*plain)
    assert [shades(part) for part in found] == [shades(part) for part in plain]


def test_columns_with_other_capitals_than_their_settings_are_no_classes(tmp_path):
    rows = "".join(f"p{each % 5};images/{each}.jpg;1;{each % 2}\n" for each in range(10))
    make_csv(tmp_path / "list.csv", rows, "Person;File;Dog;cat")
    parts = load("csv", tmp_path / "list.csv", VAL_FRACTION=0.4, GROUP_BY="person", COLUMNS=("file", "*"))
    assert [part.classes for part in parts] == [["Dog", "cat"]] * 2
    assert sorted(shade for part in parts for shade in shades(part)) == [*range(10)]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")], ids=["NFC in the list", "NFD in the list"])
@pytest.mark.parametrize("dataset", ["csv", "imagenet2012"])
def test_listed_name_in_another_unicode_form_than_the_file_is_read(tmp_path, dataset, forms):
    listed, stored = (normalize(form, "Käfer/größe/é.png") for form in forms)
    for folder, of_list, of_disk in (("same", stored, stored), ("other", listed, stored)):
        (tmp_path / folder).mkdir()
        make_lists(tmp_path / folder, f"{of_list} 0\na.jpg 1\n", "val.jpg 1\n")
        draw(tmp_path / folder / of_disk, 40)
        make_csv(tmp_path / folder / "train.csv", f"{of_list},0\na.jpg,1\n")
        make_csv(tmp_path / folder / "val.csv", "val.jpg,1\n")
    (same, _), (other, _) = (load(dataset, tmp_path / folder) for folder in ("same", "other"))
    assert shades(other) == shades(same) == [40, 0] and other.table_name(0) == listed
    assert other.storage.file_sizes([0, 1]) == same.storage.file_sizes([0, 1])
    os.rename(tmp_path / "other" / stored.partition("/")[0], tmp_path / "elsewhere")
    (tmp_path / "other" / stored.partition("/")[0]).symlink_to(tmp_path / "elsewhere")
    assert_names(error_of(dataset, tmp_path / "other"), listed.rpartition("/")[0], "lead out")


def test_equal_rows_are_found_far_apart_and_despite_hash_collisions():
    hashes = np.arange(2**20 + 9)
    hashes[[2**20 + 2, 2**20 + 5]], hashes[9] = 7, 3
    assert list(equal_rows(hashes, lambda row: "one")) == [[3, 9], [7, 2**20 + 2, 2**20 + 5]]
    assert list(equal_rows(hashes, lambda row: row != 7)) == [[3, 9], [2**20 + 2, 2**20 + 5]]
    assert list(equal_rows(np.arange(90) % 2, lambda row: "one")) == [[*range(0, 90, 2)], [*range(1, 90, 2)]]


@pytest.mark.parametrize(
    ("moved", "classes"),
    [(None, ["fox", "1", "bee"]), ("bee/2.png 0", ["0", "1", "2"]), ("0/2.png 2", ["0", "1", "2"])],
)
def test_numbered_class_is_named_after_its_folder_if_labels_agree(tmp_path, moved, classes):
    lines = [f"train/{name}/{number}.png {label}" for name, label in (("fox", 0), ("bee", 2)) for number in range(2)]
    lines += [f"train/{moved}"] if moved else []
    for line in [*lines, "a.png 2"]:
        draw(tmp_path / line.rpartition(" ")[0])
    (tmp_path / "train_list.txt").write_text("\n".join(lines))
    (tmp_path / "val_list.txt").write_text("a.png 2\n")
    train, val = load("imagenet2012", tmp_path)
    assert train.classes == val.classes == classes and set(train.targets.tolist()) == {0, 2}
    kept = open_sets(settings("imagenet2012", tmp_path), saved=SavedData(["0", "1", "2"], {}))
    assert kept[0].classes == ["0", "1", "2"], "the classes must stay as the run has them"


@pytest.mark.parametrize("dataset", ["imagenet2012", "csv"])
def test_image_list_read_in_chunks_equals_list_read_at_once(tmp_path, monkeypatch, dataset):
    name, header, mark = ("train.csv", "image_path,target\n", ",") if dataset == "csv" else ("train_list.txt", "", " ")
    rows = [f"{number // 3}/{number}.jpg{mark}{number // 2}\n" for number in range(9)]
    (tmp_path / "val_list.txt").write_text("val/8.jpg 1\n")
    for number in range(9):
        draw(tmp_path / str(number // 3) / f"{number}.jpg", number)
    draw(tmp_path / "val" / "8.jpg")

    def outcome(*more: str) -> list | str:
        (tmp_path / name).write_text("".join([header, *rows[:4], "\n", *rows[4:], *(f"{each}\n" for each in more)]))
        try:
            parts = load(dataset, tmp_path, VAL_FRACTION=0.3)
        except DataError as error:
            return str(error)
        return [(shades(part), part.targets.tolist(), part.classes, part.notes) for part in parts]

    found = []
    for size in (2**16, 2):
        for module in (csv_list, listing):
            monkeypatch.setattr(module, "ROWS_AT_ONCE", size)
        more = (f"0/0.jpg{mark}3", f"0/1.jpg{mark}x", f"/etc/hostname{mark}1", f"3/none.jpg{mark}1")
        found.append([outcome(), *map(outcome, more)])
    assert found[0] == found[1] and "0/0.jpg" in str(found[0][1])
    assert sorted(shade for part in found[0][0] for shade in part[0]) == [0] * (not header) + [*range(9)]
    assert f"{name}, line {12 if header else 11}" in found[0][2] and all(name in each for each in found[0][3:])


def test_high_label_is_accepted_only_with_many_images_or_classes():
    def classes(*labels: int, highest: int = 1100, known: int | None = None) -> list[str]:
        config = replaced(Config(), MODEL={"NUM_CLASSES": known})
        return numbered_classes(config, [np.array([*labels, highest])], ["image {}".format])

    assert classes(*[0] * 1200) == classes(*range(600)) == [str(number) for number in range(1101)]
    assert len(classes(0, highest=999)) == 1000 and len(classes(0, highest=9999, known=10_000)) == 10_000
    with refused(DataError, "image 400", "label 1100", "-num_classes 1101"):
        classes(*range(400))
