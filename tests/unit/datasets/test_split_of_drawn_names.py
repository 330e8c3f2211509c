"""Drawn image names: each image is in one part, and stays there when the data grow, move, or get other class names."""

import csv
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Fold
from datasets import SavedData
from datasets.image_set import ImageSet
from datasets.index import Texts
from datasets.pixels import Pixels
from datasets.split import new_record, write_split
from datasets.split.listed import PARTS, describe_changed_images
from datasets.targets.one_class import OneClass
from tests.support.file_names import CHARACTERS, IN_LINES, in_any_form, names
from tests.support.image_sets import divided_by, files_with, load, png, write_tar
from tests.support.properties import examples
from utils.text import csv_text


def is_file_name(text: str) -> bool:
    return text not in (".", "..") and not {*text} & {"/", "\0"}


FRACTIONS = st.sampled_from([0.05, 0.1, 0.3, 0.6, 0.9])
Data = dict[str, list[str]]  # {class: names of its images below the class folder}


@st.composite
def class_folders(draw) -> Data:
    """Draw classes of one to eight images. Two classes may have images of the same name, as cameras number them."""
    classes = draw(st.lists(names(), min_size=2, max_size=4, unique=True))
    texts = draw(st.lists(names(CHARACTERS.replace(".", "")), min_size=8, max_size=8))
    files = [
        f"{folder}{text} {number}.jpg"
        for number, (folder, text) in enumerate(zip(["", "day/"] * 4, texts, strict=True))
    ]
    return {name: draw(st.lists(st.sampled_from(files), min_size=1, unique=True)) for name in classes}


class Parts(NamedTuple):
    """The part of each image, and the lines for the log."""

    parts: dict[str, str]
    log: str

    def moved(self, then: "Parts", renamed: tuple[str, str] = ("", "")) -> list[str]:
        """Return the training images that are in the validation part `then`, except images that a log names."""
        old, new = renamed
        now = {new + key[len(old) :] if old and key.startswith(f"{old}/") else key: key for key in self.parts}
        found = [key for key in now.keys() & then.parts.keys() if (self.parts[now[key]], then.parts[key]) == ("t", "v")]
        return [key for key in found if now[key] not in self.log and key not in then.log]


def parts_of(
    data: Data,
    fraction: float = 0.1,
    fold: Fold | None = None,
    root: str = "/",
    groups: dict | None = None,
    meanings: dict | None = None,
) -> Parts:
    """Divide the images without reading files. `meanings`: the names of the classes, if labels are numbers."""
    classes = sorted(data)
    pairs = [(f"{name}/{file}", number) for number, name in enumerate(classes) for file in data[name]]
    images = files_with(root, [key for key, _ in pairs], [number for _, number in pairs], classes, Pixels(3))
    if meanings:
        names = [meanings[name] for name in classes]
        images = replace(images, meaning=OneClass(labels_are="numbers"), classes=names)
    record = new_record("hash", "here", fraction, fold)
    if groups:
        images = replace(images, groups=Texts.of([groups[key].encode() for key, _ in pairs]))
        record["group_by"] = "person"
    parts, of_image = {}, {}
    for part, image_set in zip("tv", divided_by(images, record), strict=True):
        for index, target in enumerate(image_set.targets.tolist()):
            key = image_set.key(index)
            assert key not in parts, "each image must be in one part, once"
            parts[key], of_image[key] = part, classes[target]
    assert of_image == {f"{name}/{file}": name for name in classes for file in data[name]}
    return Parts(parts, "\n".join(image_set.notes))


@pytest.mark.long
@given(class_folders(), FRACTIONS, st.data())
@examples(40)
def test_growing_or_renamed_class_moves_training_images_only_with_a_note(data, fraction, draw):
    before = parts_of(data, fraction)
    more = draw.draw(class_folders())
    grown = {name: sorted({*data.get(name, []), *more.get(name, [])}) for name in data | more}
    assert before.moved(parts_of(grown, fraction)) == []
    name, new = draw.draw(st.sampled_from(sorted(data))), draw.draw(names().filter(lambda text: text not in data))
    renamed = {new if each == name else each: files for each, files in data.items()}
    assert before.moved(parts_of(renamed, fraction), renamed=(name, new)) == []


@pytest.mark.slow
@given(class_folders(), FRACTIONS, st.data())
@examples(40)
def test_log_names_every_image_that_relabelling_moves_between_parts(data, fraction, draw):
    """Images move to the folders of other classes. Their names stay different, so that each can be found again."""
    of_name = {f"{number} {file}".replace("/", " "): name for name in data for number, file in enumerate(data[name])}
    images = {f"{name} {file}": name for file, name in of_name.items()}
    after = {file: draw.draw(st.sampled_from(sorted(data))) for file in images}
    found = []
    for classes in (images, after):
        folders = {name: [file for file in classes if classes[file] == name] for name in sorted(data)}
        parts = parts_of({name: files for name, files in folders.items() if files}, fraction)
        found.append(({key.partition("/")[2]: part for key, part in parts.parts.items()}, parts.log))
    (before, first), (then, second) = found
    assert before.keys() == then.keys()
    assert all(file in f"{first}\n{second}" for file, part in before.items() if then[file] != part)


@given(class_folders(), FRACTIONS)
@examples(20)
def test_numbers_as_labels_leave_no_folder_out_of_the_hash(data, fraction):
    """Other folders may have numbers as names too."""
    named = {name: f"class {name}" for name in data}
    parts = [parts_of(data, fraction, meanings=meanings).parts for meanings in (named, {name: name for name in data})]
    assert parts[0] == parts[1]


@pytest.mark.slow
@given(class_folders(), FRACTIONS, FRACTIONS)
@examples(40)
def test_larger_fraction_holds_out_the_images_of_a_smaller_one(data, one, other):
    small, large = (parts_of(data, fraction) for fraction in sorted((one, other)))
    assert large.moved(small) == []


@pytest.mark.long
@given(class_folders(), FRACTIONS, st.randoms(use_true_random=False), st.data())
@examples(40)
def test_split_ignores_folder_listing_order_and_unicode_form(data, fraction, shuffle, draw):
    before = parts_of(data, fraction)
    other = {}
    for name, files in data.items():
        form = [draw.draw(in_any_form(file)) for file in files]
        shuffle.shuffle(form)
        other[draw.draw(in_any_form(name))] = form
    after = parts_of(other, fraction, root="/elsewhere")
    assert {normalize("NFC", key): part for key, part in after.parts.items()} == before.parts


def images_of(data: Data, root: str = "/") -> ImageSet:
    """Return the images without files, in the order of `data`."""
    classes = sorted(data, key=lambda name: normalize("NFC", name))
    pairs = [(f"{name}/{file}", classes.index(name)) for name in data for file in data[name]]
    return files_with(root, [key for key, _ in pairs], [number for _, number in pairs], classes, Pixels(3))


def folds_of(data: Data, total: int, saved: SavedData | None = None, root: str = "/") -> dict[str, int]:
    """Return the fold of each image, which must be in one fold."""
    found = []
    for number in range(total):
        train, val = divided_by(images_of(data, root), new_record("hash", "here", 0.1, Fold(number, total)), saved)
        assert len(train) + len(val) == sum(map(len, data.values()))
        found += [(val.key(index), number) for index in range(len(val))]
    assert len(found) == len(dict(found)) == sum(map(len, data.values()))
    return dict(found)


def sizes_of_folds(folds: dict[str, int], total: int, name: str = "") -> list[int]:
    found = [fold for key, fold in folds.items() if key.startswith(name)]
    return [found.count(fold) for fold in range(total)]


@pytest.mark.slow
@given(class_folders(), st.integers(2, 5), st.randoms(use_true_random=False), st.data())
@examples(40)
def test_folds_are_even_and_ignore_listing_order_and_unicode_form(data, total, shuffle, draw):
    folds = folds_of(data, total)
    for sizes in (sizes_of_folds(folds, total), *(sizes_of_folds(folds, total, f"{name}/") for name in data)):
        assert max(sizes) - min(sizes) <= 1
    other = {}
    for name in shuffle.sample(sorted(data), len(data)):
        files = [draw.draw(in_any_form(file)) for file in data[name]]
        other[draw.draw(in_any_form(name))] = shuffle.sample(files, len(files))
    elsewhere = folds_of(other, total, root="/elsewhere")
    assert {normalize("NFC", key): fold for key, fold in elsewhere.items()} == folds


@pytest.mark.long
@given(class_folders(), st.integers(2, 5), st.data())
@examples(40)
def test_growth_moves_no_image_of_a_run_and_fills_its_smallest_folds(tmp_path_factory, data, total, draw):
    folder = tmp_path_factory.getbasetemp()
    parts = divided_by(images_of(data), new_record("hash", "here", 0.1, Fold(0, total)))
    write_split(folder / "split.csv", *parts)
    saved = SavedData(sorted(data), parts[1].split, file=folder / "last.pth")
    more = draw.draw(class_folders())
    grown = {name: sorted({*data.get(name, []), *more.get(name, [])}) for name in data | more}
    folds = folds_of(grown, total, saved)
    assert folds_of(data, total).items() <= folds.items()
    for name in grown:
        sizes = sizes_of_folds(folds, total, f"{name}/")
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(class_folders(), FRACTIONS, st.data())
@examples(40)
def test_images_of_a_group_are_in_one_part_at_any_fraction_and_fold(data, fraction, draw):
    keys = [f"{name}/{file}" for name, files in data.items() for file in files]
    groups = {key: draw.draw(st.sampled_from(["Zoë", "Zoe\u0308", "p 1", "p,2", "3"])) for key in keys}
    for fold in (None, Fold(1, 3)):
        found = parts_of(data, fraction, fold, groups=groups).parts
        pairs = {(normalize("NFC", groups[key]), part) for key, part in found.items()}
        assert len(pairs) == len({group for group, _ in pairs})


@given(st.lists(st.binary(min_size=1, max_size=4).map(os.fsdecode).filter(is_file_name), min_size=2, unique=True))
@examples(60)
def test_split_csv_names_every_image_for_csv_readers_and_for_ours(tmp_path_factory, files):
    root = tmp_path_factory.getbasetemp()
    parts = divided_by(
        files_with(root, files, [0] * len(files), ["a"], Pixels(3)), new_record("hash", "here", 0.5, None)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("datasets.index.CHUNK", 2)
        write_split(root / "split.csv", *parts)
    with open(root / "split.csv", newline="", encoding="utf-8", errors="surrogateescape") as rows:
        header, *lines = csv.reader(rows)
        found = {name: part for name, part in lines}
    assert header == ["image", "part"] and len(lines) == len(files)
    assert found == {part.key(n): name for name, part in zip(PARTS, parts, strict=True) for n in range(len(part))}
    assert len(found) == len(files) and describe_changed_images(root / "split.csv", *parts) == ([], False)


PLAIN = CHARACTERS.replace(".", "")  # a tar ends the name of a sample at its first point


@pytest.mark.slow
@given(
    st.lists(names(IN_LINES).filter(lambda name: any(map(str.isalpha, name))), min_size=2, max_size=2, unique=True),
    st.lists(names(PLAIN), min_size=6, max_size=6, unique=True),
)
@examples(6)
def test_folder_list_and_tar_of_the_same_images_have_the_same_parts(classes, files):
    keys = [f"{name}/{file}.png" for name in classes for file in files]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for form in ("NFC", "NFD"):
            for key in keys:
                (root / form / normalize(form, key)).parent.mkdir(parents=True, exist_ok=True)
                (root / form / normalize(form, key)).write_bytes(png(0))
        rows = [("image_path", "target"), *((key.replace("/", "//"), key.partition("/")[0]) for key in keys)]
        (root / "NFC/a.csv").write_text(csv_text(rows), encoding="utf-8", newline="")
        labels = {f"{key[:-4]}.cls": b"%d" % sorted(classes).index(key.partition("/")[0]) for key in keys}
        write_tar(root / "tars/train-0.tar", labels | dict.fromkeys(keys, png(0)))
        (root / "tars/classes.txt").write_text("\n".join(sorted(classes)), encoding="utf-8")
        found = []
        for dataset, place in (
            ("imagefolder", "NFC"),
            ("imagefolder", "NFD"),
            ("csv", "NFC/a.csv"),
            ("shards", "tars"),
        ):
            sets = load(dataset, root / place, VAL_FRACTION=0.3)
            found.append(
                {(part, normalize("NFC", each.key(n))) for part, each in enumerate(sets) for n in range(len(each))}
            )
        shutil.move(root / "NFC", root / "moved")
        moved = load("imagefolder", root / "moved", VAL_FRACTION=0.3)
        found.append({(part, each.key(n)) for part, each in enumerate(moved) for n in range(len(each))})
    assert found[1:] == found[:1] * 4 and len(found[0]) == len(keys)
