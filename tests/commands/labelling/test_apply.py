"""-apply lists all images with the confirmed labels in files of its own, a run trains from them, and the data stay."""

import contextlib
import csv
import io
import os
import shlex
import shutil
import tempfile
from pathlib import Path
from unicodedata import normalize
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.labelling.lists import correct
from engine.labelling.review import Confirmed, check_unchanged, digest_of
from tests.commands.labelling.made_runs import draw_image, make_photos, make_run, make_sweep, settings_of
from tests.support.file_names import in_any_form, names
from tests.support.image_sets import make_set
from tests.support.opened import open_sets
from tests.support.pages import script_of
from tests.support.properties import examples
from tests.support.refusals import flip
from tests.support.runs import rows_of, typed
from utils.errors import DataError

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/labels.py"
COUNTS = {"bird": 20, "cat": 20, "dog": 20}
TABLE, LISTS, HALF = Path("run/labels/labels.csv"), Path("run/labels/corrected"), "DATA.VAL_FRACTION=0.5"


def state(folder: Path) -> dict[str, tuple]:
    """Return {path: (content or target of a link, time of the last change)} of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.readlink() if path.is_symlink() else None if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(folder))] = content, path.lstat().st_mtime_ns
    return found


def find(
    *doubts: tuple[str, str], data: str = "photos", dataset: str = "imagefolder", options: tuple = (HALF,)
) -> None:
    """Make a run that doubts these held-out images (image, prediction), and find the wrong labels."""
    shutil.rmtree("run", ignore_errors=True)
    predictions = {image: (prediction, 0.8, 1e-4) for image, prediction in doubts}
    make_run(Path("run"), Path(data), predictions, *options, dataset=dataset)
    typed(SCRIPT, "run", "-no_copies").done()


def confirm(*images: str, table: Path = TABLE) -> None:
    """Write yes into the rows of these images, or into all rows if none is given."""
    rows = rows_of(table)
    assert rows
    for row in rows:
        if not images or row["image"] in images:
            row["confirmed"] = "yes"
    write_table(rows, table=table)


def write_table(rows: list[dict[str, str]], separator: str = ",", table: Path = TABLE) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    table.write_bytes(text.getvalue().encode("utf-8-sig", errors="surrogateescape"))


def labels_in(config) -> dict[str, tuple[str, str]]:
    """Return {image: (part, label)} of all images of a data set."""
    return {
        image_set.table_name(index): (part, image_set.classes[image_set.targets[index]])
        for part, image_set in zip(("train", "val"), open_sets(config), strict=True)
        for index in range(len(image_set))
    }


def labels_of(data: str = "photos", *options: str, dataset: str = "imagefolder") -> dict[str, tuple[str, str]]:
    return labels_in(settings_of(Path("settings"), Path(data), *options, dataset=dataset))


def listed(folder: Path = LISTS, image_root: str = "photos", *options: str) -> dict[str, tuple[str, str]]:
    """Return {image: (part, label)} as a run reads the written lists."""
    return labels_of(str(folder), f"DATA.IMAGE_ROOT={image_root}", *options, dataset="csv")


def held_out(name: str, count: int = 1) -> list[str]:
    """Return held-out photos of a class, in order."""
    return [image for image, found in sorted(labels_of("photos", HALF).items()) if found == ("val", name)][:count]


def apply(*words: object, run: str = "run", table: Path = TABLE):
    return typed(SCRIPT, run, "-apply", table, *words)


def command_in(said: str) -> list[str]:
    """Return the name of the program and the words of the printed command."""
    (line,) = [line for line in said.splitlines() if "halfstep train -" in line]
    script, words = script_of(shlex.split(line))
    return [script, *words]


@pytest.fixture
def photos(here) -> Path:
    return make_photos(here / "photos", COUNTS)


def test_list_with_twenty_corrections_trains_and_no_data_file_changes(here):
    photos = make_photos(here / "photos", dict.fromkeys(COUNTS, 40))
    wrong = held_out("cat", 10) + held_out("dog", 10)
    find(*((image, "bird") for image in wrong))
    confirm()
    then, before = state(photos), labels_of("photos", HALF)
    said = apply().done().stdout
    program, *words = command_in(said)
    typed(program, *words, "-epochs", "1", "-output", "again").done()
    assert len(wrong) == 20 and state(photos) == then
    assert listed() == {image: (part, "bird" if image in wrong else label) for image, (part, label) in before.items()}
    (again,) = Path("again").glob("*/predictions.csv")
    assert {row["image"]: row["label"] for row in rows_of(again)} == {
        image: label for image, (part, label) in listed().items() if part == "val"
    }


def test_data_that_release_1_1_corrected_are_read_as_before(photos):
    (name,) = held_out("cat")
    moved = f"dog/{Path(name).stem}.moved-2.png"
    before = labels_of("photos", HALF)
    shutil.move(photos / name, photos / moved)  # as -apply of 1.1 did if the name was taken
    (photos / ".halfstep-labels.jsonl").write_text('{"journal": "halfstep corrections of labels", "version": 1}\n')
    then = state(photos)
    del before[name]
    assert labels_of("photos", HALF) == before | {moved: ("val", "dog")}
    find((moved, "bird"))
    confirm()
    apply().done()
    assert listed() == before | {moved: ("val", "bird")} and state(photos) == then


def test_only_the_line_with_the_confirmed_label_is_corrected():
    """A list can name an image in several lines."""
    names, labels, classes = ["a.png", "a.png", "b.png", "c.png"], np.array([0, 1, 0, 1]), ["bird", "cat", "dog"]
    data = MagicMock(labels=labels, classes=classes, numbers=(np.arange(4), np.arange(0)), root="photos")
    data.__len__.return_value = 4
    data.name, data.label = names.__getitem__, lambda number: classes[labels[number]]
    assert correct(data, [Confirmed("a.png", "cat", "dog")]).tolist() == [0, 2, 0, 1]
    with pytest.raises(DataError, match="no a.png with the label dog"):
        correct(data, [Confirmed("a.png", "dog", "cat")])


def test_own_validation_folder_keeps_its_images(here):
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "cat", "dog", "dog")):
            draw_image(here / f"photos/{part}/{name}/{number}.png", 10 * len(part) + number)
    find(("val/cat/1.png", "dog"), options=())
    confirm()
    before = labels_of("photos")
    apply().done()
    assert listed() == before | {"val/cat/1.png": ("val", "dog")}


@pytest.mark.long
def test_sweep_lists_the_parts_of_its_first_fold(photos):
    make_sweep(Path("sweep"), photos, {"cat/25.png": ("dog", 0.9, 1e-4)}, folds=2)
    typed(SCRIPT, "sweep", "-no_copies").done()
    table, before = Path("sweep/labels/labels.csv"), labels_of("photos", "DATA.FOLD=0/2")
    confirm(table=table)
    program, *words = command_in(apply(run="sweep", table=table).done().stdout)
    typed(program, *words, "-epochs", "1", "-output", "again").done()
    part, _ = before["cat/25.png"]
    lists = table.with_name("corrected")
    assert listed(lists) == before | {"cat/25.png": (part, "dog")}
    joined = (lists / "train.csv").read_text() + (lists / "val.csv").read_text().partition("\n")[2]
    Path("all.csv").write_text(joined)  # for another cross-validation
    first, second = (listed(Path("all.csv"), "photos", f"DATA.FOLD={fold}/2") for fold in range(2))
    corrected = {image: label for image, (_, label) in before.items()} | {"cat/25.png": "dog"}
    assert {image: label for image, (_, label) in first.items()} == corrected
    assert all({first[image][0], second[image][0]} == {"train", "val"} for image in corrected)


@pytest.mark.long
def test_links_inside_the_data_are_listed_and_links_outside_are_refused(photos):
    first, second = held_out("cat", 2)
    draw_image(Path("outside.png"), 99)
    (photos / first).unlink()
    (photos / first).symlink_to("../bird/0.png")
    find((second, "dog"))
    confirm()
    apply().done()
    assert listed()[first] == (listed()["bird/0.png"][0], "cat")  # copies are in one part
    shutil.rmtree(LISTS)
    (photos / first).unlink()
    (photos / first).symlink_to(Path("outside.png").resolve())
    find((second, "dog"))
    confirm()
    then = state(photos)
    apply().refused(f"photos/{first}")
    assert state(photos) == then and not list(LISTS.glob("*"))


def test_hostile_file_names_are_listed(photos):
    names = [b"cat/=1+1.png", b'cat/a,b"c\n.png', b"cat/\xff\xfe.png", "cat/Mu\u0308ller.png".encode()]
    for number, name in enumerate(names):
        draw_image(photos / "x.png", 100 + number)
        os.rename(photos / "x.png", os.fsencode(photos) + b"/" + name)
    before = labels_of("photos", HALF)
    find(*((os.fsdecode(name), "dog") for name in names))
    confirm()
    apply().done()
    corrected = {os.fsdecode(name): ("val", "dog") for name in names if before[os.fsdecode(name)][0] == "val"}
    assert corrected and listed() == before | corrected


def can_be_listed(classes: list[str]) -> bool:
    """Return whether lists can have these three classes: names without line breaks, of which not just two are numbers.

    With two numbers, the third name could be a mistake.
    """
    numbers = 0
    for name in classes:
        with contextlib.suppress(ValueError):
            float(name)
            numbers += 1
    return numbers != 2 and all(len(name.splitlines()) == 1 for name in classes)


@st.composite
def folders_of_classes(draw) -> list[str]:
    """Draw the folders of three classes, each name in a Unicode form of its own."""
    classes = draw(st.lists(names(), min_size=3, max_size=3, unique=True))
    return [draw(in_any_form(name)) for name in classes]


@pytest.mark.long
@given(folders_of_classes())
@example(["bar", "mu\u0308sli", "A\u030aal"])
@example(["1", "2", "10"])
@example(["=bar", "+mu", "-1"])
@example(["7", ";", "77"])
@example(["7", ";", "7\r7"])
@examples(3)
def test_lists_of_drawn_class_folders_name_the_same_images(folders):
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        make_photos(Path("photos"), dict.fromkeys(folders, 8))
        before = labels_of("photos", HALF)
        first = {label: image for image, (part, label) in sorted(before.items()) if part == "val"}
        following = dict(zip(first, [*first][1:] + [*first][:1], strict=True))
        find(*((image, following[name]) for name, image in first.items()))
        confirm()
        if not can_be_listed(folders):
            apply().refused("CSV")
            assert not list(LISTS.glob("*"))
            return
        options = command_in(apply().done().stdout)
        corrected = {image: ("val", following[name]) for name, image in first.items()}
        assert listed(LISTS, "photos", *[each for each in options if each.startswith("DATA.CLASSES=")]) == (
            before | corrected
        )


# CSV files

LABELS = ["cat", "dog", "bird"]
FORMS = {
    "comma": ("utf-8", "image_path,target\n", "{path},{label}\n"),
    "semicolons, BOM and CRLF": ("utf-8-sig", "id;image_path;target;note\r\n", '{n};{path};{label};"a ""b"";"\r\n'),
    "tabs in UTF-16": ("utf-16", "image_path\ttarget\n", "{path}\t{label}\n"),
    "quotes and empty lines": ("utf-8", '"image_path", "target"\n\n', '"{path}", "{label}" \n\n'),
    "line ends in cells": ("utf-8", "note,target,image_path\n", '"two\nlines",{label},{path}\n'),
}


def write_list(form: str) -> None:
    encoding, header, row = FORMS[form]
    lines = [header]
    for number in range(30):
        draw_image(Path(f"images/{number}.png"), number)
        lines.append(row.format(n=number, path=f"images/{number}.png", label=LABELS[number % 3]))
    Path("list.csv").write_bytes("".join(lines).encode(encoding))


def cells_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of any form, in the order of their images, with their cells stripped."""
    with file.open("rb") as content:
        encoding = "utf-16" if content.read(2) == b"\xff\xfe" else "utf-8-sig"
    text = file.read_bytes().decode(encoding)
    separator = next(each for each in ",;\t" if each in text.splitlines()[0])
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    return sorted(({key: cell.strip() for key, cell in row.items()} for row in rows), key=lambda row: row["image_path"])


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_a_csv_file_keep_its_other_cells(here, form):
    write_list(form)
    before, cells = labels_of("list.csv", HALF, dataset="csv"), cells_of(Path("list.csv"))
    name, label = next((image, label) for image, (part, label) in before.items() if part == "val")
    new = next(each for each in LABELS if each != label)
    find((name, new), data="list.csv", dataset="csv")
    confirm()
    content = Path("list.csv").read_bytes()
    apply().done()
    written = cells_of(LISTS / "train.csv") + cells_of(LISTS / "val.csv")
    assert sorted(written, key=lambda row: row["image_path"]) == [
        row | {"target": new} if row["image_path"] == name else row for row in cells
    ]
    assert listed(LISTS, ".") == before | {name: ("val", new)} and Path("list.csv").read_bytes() == content


def test_class_numbers_keep_the_names_of_their_folders(here):
    lines = ["image_path,target"]
    for number in range(30):
        label = number % 3
        draw_image(Path(f"{['zebra', 'ant', 'cow'][label]}/{number}.png"), number)
        lines.append(f"{['zebra', 'ant', 'cow'][label]}/{number}.png,{label}.0")
    Path("list.csv").write_text("\n".join(lines))
    before = labels_of("list.csv", HALF, dataset="csv")
    name = next(image for image, found in before.items() if found == ("val", "zebra"))
    find((name, "cow"), data="list.csv", dataset="csv")
    confirm()
    _, *words = command_in(apply().done().stdout)
    (classes,) = [word for word in words if word.startswith("DATA.CLASSES=")]
    assert listed(LISTS, ".", classes) == before | {name: ("val", "cow")}
    assert Path(classes.partition("=")[2]).read_text().split() == ["zebra", "ant", "cow"]


def test_lists_with_corrections_can_be_corrected_again(photos):
    first, second = held_out("cat", 2)
    find((first, "dog"))
    confirm()
    apply("-output", "lists").done()
    options = (f"DATA.IMAGE_ROOT={photos}",)
    find((second, "bird"), data="lists", dataset="csv", options=options)
    confirm()
    apply().done()
    assert listed() == labels_of("photos", HALF) | {first: ("val", "dog"), second: ("val", "bird")}


# Refusals


@pytest.fixture
def found(photos) -> str:
    """Return the name of a cat's photo that is confirmed to be a dog."""
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    return name


def refused(*named: object) -> None:
    """Assert that -apply is refused with a message that has these names, and writes nothing."""
    before = state(Path("photos"))
    apply().refused(*named)
    assert state(Path("photos")) == before and not LISTS.exists()


@pytest.mark.long
@pytest.mark.parametrize("flag, remedy", [("-undo", "1.1.0"), ("-yes", "-apply")])
def test_removed_flags_are_refused_with_their_remedy(found, flag, remedy):
    typed(SCRIPT, "run", flag).refused(flag, remedy)


def test_table_without_a_confirmed_correction_is_refused(found):
    (row,) = rows_of(TABLE)
    for change in ({"confirmed": ""}, {"suggestion": "cat"}):
        write_table([row | change])
        refused("run/labels/labels.csv", "confirmed")


@pytest.mark.long
@pytest.mark.parametrize("name", ["train.csv", "val.csv", "classes.txt"])
def test_other_files_in_the_folder_of_the_lists_are_not_overwritten(found, name):
    LISTS.mkdir()
    (LISTS / name).write_text("mine\n")
    before = state(LISTS)
    apply().refused("-output", f"corrected/{name}")
    assert state(LISTS) == before


def test_part_that_would_lose_a_class_is_refused(here):
    for part, numbers in (("train", range(8)), ("val", range(8, 14))):
        for number in numbers:
            draw_image(here / f"photos/{part}/{'dog' if number % 2 else 'bird'}/{number}.png", number)
    draw_image(here / "photos/train/cat/20.png", 20)
    draw_image(here / "photos/train/cat/21.png", 21)
    draw_image(here / "photos/val/cat/22.png", 22)
    find(("val/cat/22.png", "dog"), options=())
    confirm()
    refused("cat", "validation")


def test_class_that_a_list_cannot_name_is_refused(here):
    make_photos(here / "photos", {"001": 20, "002": 20})
    (name,) = held_out("001")
    find((name, "002"))
    confirm()
    apply().refused("classes.txt")
    assert not list(LISTS.glob("*.csv"))


@given(st.data())
@examples(8)
def test_any_changed_byte_of_a_confirmed_file_is_noticed(tmp_path_factory, data):
    photo = tmp_path_factory.mktemp("photos") / "a.png"
    draw_image(photo, 1)
    digest, before = digest_of(photo), os.stat(photo)
    flip(photo, data.draw(st.integers(0, before.st_size - 1)))
    os.utime(photo, ns=(before.st_atime_ns, before.st_mtime_ns))
    record = {"images": {"a.png": {"label": "cat", "sha256": digest}}}
    with pytest.raises(DataError, match="a.png"):
        check_unchanged([Confirmed("a.png", "cat", "dog")], photo.parent, record)


def test_changed_data_are_refused(found):
    flip(Path("photos") / found, -1)
    refused(found)
    os.rename(Path("photos") / found, Path("photos") / found.replace("cat/", "bird/"))
    refused(Path(found).name)


def test_data_with_a_new_photo_are_refused(found):
    draw_image(Path("photos/cat/new.png"), 99)
    refused("cat/new.png")


@pytest.mark.long
@pytest.mark.parametrize(
    "column, value, named",
    [
        ("suggestion", "dgo", ["dgo", "dog"]),
        ("suggestion", "", ["suggestion"]),
        ("confirmed", "?", ["?"]),
        ("image", "cat/none.png", ["cat/none.png"]),
    ],
)
def test_wrong_cell_is_refused(found, column, value, named):
    write_table([row | {column: value} for row in rows_of(TABLE)])
    refused("labels.csv", *named)


def test_two_suggestions_for_an_image_are_refused(found):
    (row,) = rows_of(TABLE)
    write_table([row, row | {"suggestion": "bird"}])
    refused(found)


@pytest.mark.long
@pytest.mark.parametrize("separator, answer", [(";", "Y"), ("\t", "TRUE"), (",", "x"), (";", "ja"), (",", "oui")])
def test_table_saved_by_a_spreadsheet_is_read(found, separator, answer):
    write_table([row | {"confirmed": answer} for row in rows_of(TABLE)], separator)
    apply().done()
    assert listed()[found] == ("val", "dog")


def test_copy_with_another_label_is_confirmed_as_the_label_of_its_twin(photos):
    (name,) = held_out("cat")
    shutil.copy(photos / name, photos / "dog/twin.png")
    make_run(Path("run"), photos, {}, HALF)
    typed(SCRIPT, "run").done()
    rows = {row["image"]: row for row in rows_of(TABLE)}
    assert (rows["dog/twin.png"]["suggestion"], rows[name]["suggestion"]) == ("cat", "dog")
    confirm("dog/twin.png")
    apply().done()
    assert listed()["dog/twin.png"][1] == "cat"


def test_rows_that_say_no_in_a_word_are_not_confirmed(found):
    (row,) = rows_of(TABLE)
    write_table([row | {"confirmed": "nein"}])
    refused("run/labels/labels.csv", "confirmed")


@pytest.mark.long
def test_other_table_or_table_without_record_is_refused(found):
    for table in ("run/predictions.csv", "none.csv"):
        apply(table=table).refused(table)
    TABLE.with_name("labels.json").unlink()
    refused("labels.json")


def test_moved_data_are_listed_in_their_new_folder(found):
    shutil.move("photos", "new")
    apply("-data_path", "new").done()
    assert listed(LISTS, "new")[found] == ("val", "dog")


def test_shards_are_refused(here):
    make_set(here / "shards")
    make_run(here / "run", here / "shards", None, dataset="shards")
    typed(SCRIPT, "run").done()
    apply().refused("shards", "imagefolder", "csv")


def test_table_with_a_declared_separator_and_empty_rows_is_read(found):
    write_table(rows_of(TABLE), ";")
    header, *rows = TABLE.read_text("utf-8-sig").splitlines()
    TABLE.write_text("\n".join(["sep=;", header.upper(), ";;;;;", "", *rows, ";;;;;"]))
    apply().done()
    assert listed()[found] == ("val", "dog")


def test_wrong_cell_after_empty_rows_is_reported_with_its_row(found):
    write_table([row | {"suggestion": "dgo"} for row in rows_of(TABLE)], ";")
    header, *rows = TABLE.read_text("utf-8-sig").splitlines()
    TABLE.write_text("\n".join([header, ";;;;;", "", *rows]))
    refused("labels.csv, row 4", "dgo")


@pytest.mark.long
def test_table_in_another_encoding_is_refused_only_for_its_confirmed_names(photos):
    make_photos(photos, {"käfer": 20})
    cat, bird = held_out("cat") + held_out("bird")
    find((cat, "dog"), (bird, "käfer"))
    confirm(cat)
    TABLE.write_bytes(TABLE.read_text("utf-8-sig").replace(",", ";").encode("cp1252"))
    apply("-output", "lists").done()
    assert listed(Path("lists"))[cat] == ("val", "dog")
    find((bird, "käfer"))
    confirm()
    TABLE.write_bytes(TABLE.read_text("utf-8-sig").replace(",", ";").encode("cp1252"))
    refused("labels.csv, row 2", "suggestion", "UTF-8", "CSV UTF-8")


def test_lists_of_a_spreadsheets_csv_file_are_corrected(here):
    lines = ["sep=;", "Image_Path;Target;Note"]
    for number in range(30):
        draw_image(Path(f"images/mü{number}.png"), number)
        lines += [f"images/mu\u0308{number}.png;{LABELS[number % 3]};{number}", ";;"]
    Path("list.csv").write_text("\n".join(lines))
    before = labels_of("list.csv", HALF, dataset="csv")
    name, label = next((image, label) for image, (part, label) in before.items() if part == "val")
    new = next(each for each in LABELS if each != label)
    find((name, new), data="list.csv", dataset="csv")
    confirm()
    apply().done()
    assert listed(LISTS, ".") == before | {name: ("val", new)}
    flip(Path(normalize("NFC", name)), -1)
    shutil.rmtree(LISTS)
    apply().refused(name)
