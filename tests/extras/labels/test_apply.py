"""-apply moves the confirmed files, or edits the CSV file, and -undo restores every byte, also after kill -9."""

import contextlib
import csv
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from datasets import load_image_sets
from extras.labels.review import Confirmed, check_unchanged, digest_of
from scripts.labels import main
from tests.extras.labels.made_runs import draw_image, make_photos, make_run, settings_of
from tests.support.dying import deaths, dying
from tests.support.file_names import in_any_form, names
from tests.support.image_sets import make_set
from tests.support.properties import examples
from tests.support.refusals import flip
from tests.support.runs import rows_of, typed
from utils.errors import ConfigError, DataError
from utils.files import locked

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/labels.py"
COUNTS = {"bird": 20, "cat": 20, "dog": 20}
TABLE, HALF, JOURNAL = Path("run/labels/labels.csv"), "DATA.VAL_FRACTION=0.5", ".halfstep-labels.jsonl"


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return {path: content} of all files below a folder, and {path: target} of links; folders have no content."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = str(path.readlink()) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
    return found


def find(
    *doubts: tuple[str, str], data: str = "photos", dataset: str = "imagefolder", options: tuple = (HALF,)
) -> None:
    """Make a run that doubts these held-out images (image, prediction), and find the wrong labels."""
    shutil.rmtree("run", ignore_errors=True)
    predictions = {image: (prediction, 0.8, 0.1) for image, prediction in doubts}
    make_run(Path("run"), Path(data), predictions, *options, dataset=dataset)
    typed(SCRIPT, "run", "-no_copies").done()


def confirm(*images: str, suggestion: str | None = None) -> None:
    """Write yes into the rows of these images, or into all rows if none is given."""
    rows = table_rows()
    assert rows
    for row in rows:
        if not images or row["image"] in images:
            row["confirmed"] = "yes"
            row["suggestion"] = row["suggestion"] if suggestion is None else suggestion
    write_table(rows)


def table_rows() -> list[dict[str, str]]:
    text = TABLE.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def write_table(rows: list[dict[str, str]], separator: str = ",") -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    TABLE.write_bytes(text.getvalue().encode("utf-8-sig", errors="surrogateescape"))


def images_of(*options: str, part: int = 1) -> list[str]:
    """Return the held-out photos, or with part=0 the training photos."""
    image_set = load_image_sets(settings_of(Path("settings"), Path("photos"), *options))[part]
    return [image_set.key(index) for index in range(len(image_set))]


def held_out(name: str, count: int = 1) -> list[str]:
    """Return held-out images of a class, in order."""
    return [image for image in images_of(HALF) if image.startswith(f"{name}/")][:count]


def parts() -> dict[str, str]:
    """Return {image: its part} for all photos."""
    return dict.fromkeys(images_of(HALF, part=0), "train") | dict.fromkeys(images_of(HALF), "val")


@pytest.fixture
def photos(here) -> Path:
    return make_photos(here / "photos", COUNTS)


def apply(*words: object):
    return typed(SCRIPT, "run", "-apply", TABLE, "-yes", *words)


def test_confirmed_file_moves_to_folder_of_suggestion(photos):
    first, second = held_out("cat", 2)
    find((first, "dog"), (second, "dog"))
    confirm(first)
    before = contents(photos)
    said = apply().done().stdout
    moved = first.replace("cat/", "dog/")
    assert f"{first} -> {moved}" in said and "1 label to correct" in said
    expected = {moved if name == first else name: content for name, content in before.items()}
    after = contents(photos)
    journal = after.pop(JOURNAL)
    assert after == dict(sorted(expected.items())) and json.loads(journal.splitlines()[0])["version"] == 1
    typed(SCRIPT, "run", "-undo").done()
    assert contents(photos) == before
    typed(SCRIPT, "run", "-undo").refused("photos")


def test_person_may_choose_another_class_than_the_suggestion(photos):
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm(suggestion="bird")
    apply().done()
    assert (photos / name.replace("cat/", "bird/")).exists()


def test_folder_inside_the_class_is_made_and_removed_by_undo(photos):
    name = "cat/far/away/90.png"
    draw_image(photos / name, 90)
    fold = next(number for number in (0, 1) if name in images_of(f"DATA.FOLD={number}/2"))
    find((name, "dog"), options=(f"DATA.FOLD={fold}/2",))
    confirm()
    before = contents(photos)
    apply().done()
    assert (photos / "dog/far/away/90.png").exists() and (photos / "cat/far/away").is_dir()
    typed(SCRIPT, "run", "-undo").done()
    assert contents(photos) == before and not (photos / "dog/far").exists()


@pytest.mark.parametrize("target", ["absolute", "../dog/40.png"])
def test_link_is_moved_as_a_link(photos, target):
    (name,) = held_out("cat")
    target = str(photos / "bird/0.png") if target == "absolute" else target
    (photos / name).unlink()
    (photos / name).symlink_to(target)
    find((name, "dog"))
    confirm()
    before = contents(photos)
    apply().done()
    assert (photos / name.replace("cat/", "dog/")).readlink() == Path(target)
    typed(SCRIPT, "run", "-undo").done()
    assert contents(photos) == before


def test_link_that_would_break_is_refused(photos):
    (name,) = held_out("cat")
    (photos / name).unlink()
    (photos / name).symlink_to("20.png" if name != "cat/20.png" else "21.png")
    find((name, "dog"))
    confirm()
    before = contents(photos)
    apply().refused(name.replace("cat/", "photos/cat/"), "link")
    assert contents(photos) == before


def test_taken_name_gets_a_suffix_and_image_keeps_its_part(photos):
    (name,) = held_out("cat")
    file = name.removeprefix("cat/")
    draw_image(photos / "dog" / file, 77)
    find((name, "dog"))
    confirm()
    before, split = contents(photos), parts()
    apply().done()
    moved = f"dog/{Path(file).stem}.moved-2.png"
    assert contents(photos)[moved] == before[name] and contents(photos)[f"dog/{file}"] == before[f"dog/{file}"]
    expected = {moved if each == name else each: part for each, part in split.items()}
    assert parts() == expected
    find((moved, "bird"))  # the next move restores the original name
    confirm()
    apply().done()
    assert contents(photos)[f"bird/{file}"] == before[name]
    typed(SCRIPT, "run", "-undo").done()
    assert contents(photos) == before


def test_every_moved_image_keeps_its_part(photos):
    images = held_out("cat", 5) + held_out("dog", 5)
    split = {Path(name).name: part for name, part in parts().items()}
    find(*((name, "bird") for name in images))
    confirm()
    apply().done()
    assert {Path(name).name: part for name, part in parts().items()} == split


def test_own_validation_folder_keeps_its_images(here):
    for part in ("train", "val"):
        for number, name in enumerate(("cat", "cat", "dog", "dog")):
            draw_image(here / f"photos/{part}/{name}/{number}.png", 10 * len(part) + number)
    find(("val/cat/1.png", "dog"), options=())
    confirm()
    before = contents(here / "photos")
    apply().done()
    assert (here / "photos/val/dog/1.png").exists() and (here / "photos/train/cat/1.png").exists()
    typed(SCRIPT, "run", "-output", "again").done()
    typed(SCRIPT, "run", "-undo").done()
    assert contents(here / "photos") == before


def test_file_system_without_hard_links_is_supported(photos, monkeypatch):
    def refuse(*paths, **options):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    before = contents(photos)
    apply().done()
    assert (photos / name.replace("cat/", "dog/")).exists() and not (photos / name).exists()
    typed(SCRIPT, "run", "-undo").done()
    assert contents(photos) == before


def test_apply_twice_changes_nothing_more(photos):
    find((held_out("cat")[0], "dog"))
    confirm()
    apply().done()
    after = contents(photos)
    assert "nothing to correct" in apply().done().stdout
    assert contents(photos) == after


def test_runs_before_and_after_corrections_are_accepted(photos):
    first, second, third = held_out("cat", 3)
    find((first, "dog"), (second, "dog"))
    shutil.copytree("run", "old")
    confirm(first)
    apply().done()
    find((second, "bird"), (third, "bird"))
    confirm(third)
    apply().done()
    said = typed(SCRIPT, "old", "-output", "again").done().stdout
    judged = len(rows_of("old/predictions.csv"))
    assert f"predictions for {judged - 2} of 60 images" in said
    assert [row["image"] for row in rows_of("again/labels.csv")] == [second]
    draw_image(photos / "cat/new.png", 88)
    typed(SCRIPT, "old", "-output", "other").refused("cat/new.png")


def test_rows_of_one_table_may_be_applied_in_two_calls(photos):
    first, second = held_out("cat", 2)
    find((first, "dog"), (second, "bird"))
    confirm(first)
    apply().done()
    confirm(second)
    assert "1 label to correct" in apply().done().stdout
    assert (photos / second.replace("cat/", "bird/")).exists() and (photos / first.replace("cat/", "dog/")).exists()


@pytest.mark.parametrize("answer, is_applied", [("y\n", True), ("\n", False), ("no\n", False), ("", False)])
def test_apply_asks_on_terminal(photos, monkeypatch, answer, is_applied):
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    said = typed(SCRIPT, "run", "-apply", TABLE).done().stdout
    assert (photos / name).exists() is not is_applied
    assert ("nothing was changed" in said) is not is_applied
    assert (photos / JOURNAL).exists() is is_applied


def test_journal_in_data_folder_is_not_read_as_data(photos):
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    apply().done()
    train, val = load_image_sets(settings_of(Path("settings"), photos, HALF))
    assert len(train) + len(val) == 60 and len(val.classes) == 3
    assert not any("left out" in note for note in val.notes)


def test_hostile_file_names_are_moved_and_moved_back(photos):
    names = [b"cat/=1+1.png", b'cat/a,b"c\n.png', b"cat/\xff\xfe.png", "cat/Mu\u0308ller.png".encode()]
    for number, name in enumerate(names):
        draw_image(photos / "x.png", 100 + number)
        os.rename(photos / "x.png", os.fsencode(photos) + b"/" + name)
    keys = [os.fsdecode(name) for name in names]
    for fold in (0, 1):
        judged = [name for name in images_of(f"DATA.FOLD={fold}/2") if name in keys]
        find(*((name, "dog") for name in judged), options=(f"DATA.FOLD={fold}/2",))
        before = contents(photos)
        assert judged and len(table_rows()) == len(judged)
        confirm()
        apply().done()
        assert all((photos / name.replace("cat/", "dog/")).exists() for name in judged)
        typed(SCRIPT, "run", "-undo").done()
        assert contents(photos) == before


@st.composite
def folders_of_classes(draw) -> list[str]:
    """Draw the folders of three classes, each name in a Unicode form of its own."""
    classes = draw(st.lists(names(), min_size=3, max_size=3, unique=True))
    return [draw(in_any_form(name)) for name in classes]


@given(folders_of_classes(), st.booleans())
@example(["bar", "mu\u0308sli", "A\u030aal"], False)
@examples(3)
def test_correction_moves_files_between_existing_class_folders(folders, has_own_part):
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        photos = make_photos(Path("photos"), dict.fromkeys(folders, 8))
        if has_own_part:
            shutil.move("photos", "train")
            Path("photos").mkdir()
            shutil.move("train", "photos/train")
            make_photos(Path("photos/val"), dict.fromkeys(folders, 2))
        options = () if has_own_part else (HALF,)
        _, val = load_image_sets(settings_of(Path("settings"), photos, *options))
        first = {val.classes[target]: val.table_name(index) for index, target in enumerate(val.targets.tolist())}
        following = dict(zip(first, [*first][1:] + [*first][:1], strict=True))
        find(*((image, following[name]) for name, image in first.items()), options=options)
        confirm()
        before = contents(photos)
        apply().done()
        folder_of = {normalize("NFC", folder): folder for folder in folders}
        moved = {
            image.replace(f"{folder_of[name]}/", f"{folder_of[following[name]]}/") for name, image in first.items()
        }
        assert contents(photos).keys() - {JOURNAL} == before.keys() - {*first.values()} | moved
        typed(SCRIPT, "run", "-undo").done()
        assert contents(photos) == before


# CSV files

LABELS = ["cat", "dog", "bird"]
FORMS = {
    "comma": ("utf-8", "image_path,target\n", "{path},{label}\n"),
    "semicolons, BOM and CRLF": ("utf-8-sig", "id;image_path;target;note\r\n", '{n};{path};{label};"a ""b"";"\r\n'),
    "tabs in UTF-16": ("utf-16", "image_path\ttarget\n", "{path}\t{label}\n"),
    "quotes and empty lines": ("utf-8", '"image_path", "target"\n\n', '"{path}", "{label}" \n\n'),
    "line ends in cells": ("utf-8", "note,target,image_path\n", '"two\nlines",{label},{path}\n'),
    "no last line end": ("utf-8", "image_path,target", "\n{path},{label}"),
}


def write_list(form: str, file: str = "list.csv") -> None:
    encoding, header, row = FORMS[form]
    lines = [header]
    for number in range(30):
        draw_image(Path(f"images/{number}.png"), number)
        lines.append(row.format(n=number, path=f"images/{number}.png", label=LABELS[number % 3]))
    Path(file).write_bytes("".join(lines).encode(encoding))


def images_of_csv(option: str = HALF) -> dict[str, str]:
    """Return {image: label} of the held-out images."""
    _, val = load_image_sets(settings_of(Path("settings"), Path("list.csv"), option, dataset="csv"))
    return {val.key(index): val.classes[val.targets[index]] for index in range(len(val))}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_label_cells_of_a_csv_file_change(here, form):
    write_list(form)
    names = list(images_of_csv().items())
    (first, label), (second, other) = names[:2]
    new, newer = (next(each for each in LABELS if each != old) for old in (label, other))
    find((first, new), (second, newer), data="list.csv", dataset="csv")
    confirm()
    before = Path("list.csv").read_bytes()
    Path("list.csv").chmod(0o640)
    apply().done()
    after = Path("list.csv").read_bytes()
    encoding = FORMS[form][0]
    expected = before.decode(encoding)
    for image, old, now in ((first, label, new), (second, other, newer)):
        row = FORMS[form][2].format
        number = Path(image).stem
        expected = expected.replace(row(n=number, path=image, label=old), row(n=number, path=image, label=now))
    assert after == expected.encode(encoding) != before
    assert Path("list.csv").stat().st_mode & 0o777 == 0o640
    assert {**dict(names), first: new, second: newer} == images_of_csv()
    typed(SCRIPT, "run", "-output", "again").done()  # the journal explains the changed labels
    typed(SCRIPT, "run", "-undo").done()
    assert Path("list.csv").read_bytes() == before
    assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []


def test_numbers_are_written_as_in_the_file(here):
    text = "image_path,target\n"
    for number in range(30):
        draw_image(Path(f"{number}.png"), number)
        text += f"{number}.png,{number % 3}.0\n"
    Path("list.csv").write_text(text)
    (name, label), *_ = images_of_csv().items()
    old = int(name.removesuffix(".png")) % 3
    new = (old + 1) % 3
    _, val = load_image_sets(settings_of(Path("settings"), Path("list.csv"), HALF, dataset="csv"))
    find((name, val.classes[new]), data="list.csv", dataset="csv")
    confirm()
    apply().done()
    assert Path("list.csv").read_text() == text.replace(f"{name},{old}.0", f"{name},{new}.0")


def test_label_in_val_csv_leaves_train_csv_unchanged(here):
    for part, first in (("train", 0), ("val", 30)):
        lines = ["image_path,target"]
        for number in range(first, first + 12):
            draw_image(Path(f"data/{number}.png"), number)
            lines.append(f"{number}.png,{LABELS[number % 3]}")
        Path(f"data/{part}.csv").write_text("\n".join(lines) + "\n")
    find(("30.png", "dog"), data="data", dataset="csv", options=())
    confirm()
    before = contents(here / "data")
    apply().done()
    after = contents(here / "data")
    assert after["val.csv"] == before["val.csv"].replace(b"30.png,cat", b"30.png,dog")
    assert after["train.csv"] == before["train.csv"]
    typed(SCRIPT, "run", "-undo").done()
    assert contents(here / "data") == before


def test_csv_file_that_changed_after_apply_is_not_restored(here):
    write_list("comma")
    name, label = next(iter(images_of_csv().items()))
    find((name, next(each for each in LABELS if each != label)), data="list.csv", dataset="csv")
    confirm()
    apply().done()
    changed = Path("list.csv").read_bytes() + b"images/0.png,cat\n"
    Path("list.csv").write_bytes(changed)
    typed(SCRIPT, "run", "-undo").refused("list.csv", ".list.csv.before-labels-1")
    assert Path("list.csv").read_bytes() == changed and Path(".list.csv.before-labels-1").exists()


# kill -9


def killed_everywhere(here: Path, data: str, command: list[str], then: list[str]) -> dict[str, bytes | str]:
    """Let a command die at each of its file operations, in a copy of the data. Run `then` after each death.

    Return the content of the data folder after the last command, which must always be equal.
    """
    original, ends = shutil.copytree(here / data, here.parent / "original", symlinks=True), []
    with dying() as disk:
        main(command)
    for death in deaths(disk.operations):
        shutil.rmtree(here / data)
        shutil.copytree(original, here / data, symlinks=True)
        with dying(*death) as killed:
            main(command)
        try:
            main(then)
        except ConfigError as error:
            assert "nothing to undo" in str(error)
        ends.append(contents(here / data))
        if then == APPLY:  # the journal depends on the death
            ends[-1] = {name: content for name, content in ends[-1].items() if not Path(name).name.startswith(".")}
        assert ends[-1] == ends[0], f"after a death at {killed.operations[death[0]]}"
    return ends[0]


@pytest.fixture(params=["folders", "csv"])
def confirmed(request, tmp_path, monkeypatch) -> tuple[Path, str, dict]:
    """Return a folder with a run and its confirmed labels, the name of the data folder, and its content."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if request.param == "folders":
        make_photos(here / "data", {"bird": 8, "cat": 8, "dog": 8})
        _, val = load_image_sets(settings_of(Path("settings"), Path("data"), HALF))
        cats = [val.key(index) for index in range(len(val)) if val.key(index).startswith("cat/")][:2]
        shutil.move(here / "data" / cats[0], here / "data/cat/inside.png")
        (here / "data/cat/inner").mkdir()
        shutil.move(here / "data/cat/inside.png", here / "data/cat/inner" / Path(cats[0]).name)
        cats[0] = f"cat/inner/{Path(cats[0]).name}"
        _, val = load_image_sets(settings_of(Path("settings"), Path("data"), HALF))
        cats = [val.key(index) for index in range(len(val)) if val.key(index).startswith("cat/")]
        find(*((name, "dog") for name in cats), data="data")
    else:
        (here / "data").mkdir()
        with_labels = ["image_path,target"]
        for number in range(30):
            draw_image(here / f"data/{number}.png", number)
            with_labels.append(f"{number}.png,{LABELS[number % 3]}")
        (here / "data/list.csv").write_text("\n".join(with_labels))
        _, val = load_image_sets(settings_of(Path("settings"), Path("data/list.csv"), HALF, dataset="csv"))
        cats = [val.key(index) for index in range(len(val)) if val.classes[val.targets[index]] == "cat"][:2]
        find(*((name, "dog") for name in cats), data="data/list.csv", dataset="csv")
    confirm()
    return here, "data", contents(here / "data")


APPLY, UNDO = ["run", "-apply", str(TABLE), "-yes"], ["run", "-undo"]


def test_undo_after_kill_anywhere_in_apply_restores_every_byte(confirmed):
    here, data, before = confirmed
    assert killed_everywhere(here, data, APPLY, UNDO) == before


def test_undo_after_kill_anywhere_in_undo_restores_every_byte(confirmed):
    here, data, before = confirmed
    typed(SCRIPT, *APPLY).done()
    assert killed_everywhere(here, data, UNDO, UNDO) == before


def test_undo_after_kills_in_apply_and_undo_restores_every_byte(confirmed):
    here, data, before = confirmed
    with dying(15) as killed:
        main(APPLY)
    assert killed.is_dead and contents(here / data) != before
    assert killed_everywhere(here, data, UNDO, UNDO) == before


def test_apply_after_kill_anywhere_completes_the_corrections(confirmed):
    here, data, before = confirmed
    end = killed_everywhere(here, data, APPLY, APPLY)
    assert len(end) >= len(before) and not any(name.endswith(".moved-2.png") for name in end)
    typed(SCRIPT, *UNDO).done()
    assert contents(here / data) == before


def test_interrupted_apply_is_reported_until_it_is_repeated_or_undone(photos):
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    with dying(8) as killed:
        main(APPLY)
    assert killed.is_dead
    typed(SCRIPT, "run", "-output", "x").refused(JOURNAL.removeprefix("."), "-undo")
    apply().done()
    typed(SCRIPT, "run", "-output", "x").done()


# Refusals


@pytest.fixture
def found(photos) -> str:
    """Return the name of a cat's photo that is confirmed to be a dog."""
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    return name


def refused(*names: str) -> None:
    """Assert that -apply is refused with a message that has these names, and changes nothing."""
    before = contents(Path("photos"))
    apply().refused(*names)
    assert contents(Path("photos")) == before


def test_apply_without_terminal_requires_yes(found, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    typed(SCRIPT, "run", "-apply", TABLE).refused("-yes")


@given(st.data())
@examples(8)
def test_any_changed_byte_of_a_confirmed_file_is_noticed(tmp_path_factory, data):
    photo = tmp_path_factory.mktemp("photos") / "a.png"
    draw_image(photo, 1)
    size, digest = digest_of(photo)
    before = os.stat(photo)
    flip(photo, data.draw(st.integers(0, size - 1)))
    os.utime(photo, ns=(before.st_atime_ns, before.st_mtime_ns))
    record = {"images": {"a.png": {"label": "cat", "size": size, "sha256": digest}}}
    with pytest.raises(DataError, match="a.png"):
        check_unchanged([Confirmed("a.png", "cat", "dog")], {"a.png": photo}, record)


def test_other_file_of_equal_size_is_refused(found):
    flip(Path("photos") / found, -1)
    refused(found)


def test_file_that_is_gone_is_refused(found):
    os.rename(Path("photos") / found, "elsewhere.png")
    refused(found)


def test_file_that_was_moved_by_hand_is_refused(found):
    os.rename(Path("photos") / found, Path("photos") / found.replace("cat/", "bird/"))
    refused(found)


@pytest.mark.parametrize(
    "column, value, names",
    [
        ("suggestion", "dgo", ["dgo", "dog"]),
        ("suggestion", "", ["suggestion"]),
        ("confirmed", "maybe", ["maybe"]),
        ("image", "cat/none.png", ["cat/none.png"]),
    ],
)
def test_wrong_cell_is_refused(found, column, value, names):
    write_table([row | {column: value} for row in rows_of(TABLE)])
    refused("labels.csv", *names)


def test_two_suggestions_for_an_image_are_refused(found):
    (row,) = rows_of(TABLE)
    write_table([row, row | {"suggestion": "bird"}])
    refused(found)


@pytest.mark.parametrize("separator", ";\t")
@pytest.mark.parametrize("answer", ["Y", "1", "x", "TRUE"])
def test_table_saved_by_a_spreadsheet_is_read(found, separator, answer):
    write_table([row | {"confirmed": answer} for row in rows_of(TABLE)], separator)
    apply().done()
    assert not (Path("photos") / found).exists()


def test_class_name_without_its_leading_zeros_is_recognized(here):
    make_photos(here / "photos", {"cat": 20, "007": 20})
    (name,) = held_out("cat")
    find((name, "007"))
    confirm(suggestion="7")
    apply().done()
    assert (here / "photos" / name.replace("cat/", "007/")).exists()


def test_file_other_than_labels_csv_is_refused(found):
    typed(SCRIPT, "run", "-apply", "run/predictions.csv", "-yes").refused("run/predictions.csv")
    typed(SCRIPT, "run", "-apply", "none.csv", "-yes").refused("none.csv")


def test_table_without_its_record_is_refused(found):
    TABLE.with_name("labels.json").unlink()
    refused("labels.json")


def test_moved_data_is_corrected_in_its_new_folder(found):
    shutil.copytree("photos", "new")
    before = contents(Path("photos"))
    said = typed(SCRIPT, "run", "-apply", TABLE, "-yes", "-data_path", "new").done().stdout
    assert "python scripts/labels.py run -undo -data_path new\n" in said
    assert contents(Path("photos")) == before and not (Path("new") / found).exists()
    typed(SCRIPT, "run", "-undo", "-data_path", "new").done()
    assert contents(Path("new")) == before


def test_last_image_of_a_class_is_not_moved(here):
    make_photos(here / "photos", {"bird": 20, "dog": 20, "cat": 2})
    (name,) = held_out("cat")
    find((name, "dog"))
    confirm()
    for other in ("cat/40.png", "cat/41.png"):
        if other != name:
            os.rename(here / "photos" / other, here / "photos/bird/moved.png")
    refused("cat")


def test_shards_are_refused(here):
    make_set(here / "shards")
    make_run(here / "run", here / "shards", None, dataset="shards")
    typed(SCRIPT, "run").done()
    Path("run/labels/labels.csv").write_bytes(b"\xef\xbb\xbfimage,label,suggestion,confidence,reason,confirmed\n")
    typed(SCRIPT, "run", "-apply", TABLE, "-yes").refused("shards", "imagefolder", "csv")


def test_two_commands_at_once_are_refused(found):
    with locked(Path("photos") / JOURNAL):
        apply().refused("labels.py")


def test_damaged_or_newer_journal_is_refused(found):
    journal = Path("photos") / JOURNAL
    apply().done()
    text = journal.read_text()
    journal.write_text(text.replace('"version": 1', '"version": 2'))
    typed(SCRIPT, "run", "-undo").refused(JOURNAL.removeprefix("."))
    journal.write_text(text.replace('{"apply"', '{apply"'))
    typed(SCRIPT, "run", "-undo").refused(2)
    journal.write_text(text + '{"apply": 2')  # a kill cut the last line off
    typed(SCRIPT, "run", "-undo").done()
    assert (Path("photos") / found).exists() and not journal.exists()


@pytest.mark.parametrize("name", ["../cat.png", "/tmp/cat.png"])
def test_journal_with_path_outside_data_folder_is_refused(found, name):
    apply().done()
    journal = Path("photos") / JOURNAL
    journal.write_text(journal.read_text().replace(f'["{found}"', f'["{name}"'))
    typed(SCRIPT, "run", "-undo").refused(3)


def test_undo_overwrites_no_file_that_took_the_old_name(found):
    apply().done()
    moved = found.replace("cat/", "dog/")
    draw_image(Path("photos") / found, 55)
    before = contents(Path("photos"))
    typed(SCRIPT, "run", "-undo").refused(f"photos/{found}")
    assert contents(Path("photos")) == before
    (Path("photos") / found).unlink()
    typed(SCRIPT, "run", "-undo").done()
    assert (Path("photos") / found).exists() and not (Path("photos") / moved).exists()


def test_undo_names_a_file_that_is_gone(found):
    apply().done()
    (Path("photos") / found.replace("cat/", "dog/")).unlink()
    typed(SCRIPT, "run", "-undo").refused(found.replace("cat/", "photos/dog/"))
