"""Images in class folders, including Caltech's layouts, and ImageNet's archives."""

import io
import os
import re
import subprocess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from datasets import SavedData, index
from datasets.pixels import Pixels
from datasets.sources.images import natural
from scripts.predict import expand
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import draw, error_of, files_with, load, make_folders, settings, shades, write_tar
from tests.support.modules import ROOT
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError, DataError


def test_class_without_validation_images_is_a_warning(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, "cat": 1})
    make_folders(tmp_path / "val", {"ant": 1, "cat": 1})
    (note,) = (each for each in load("imagefolder", tmp_path)[1].notes if each.startswith("warning: "))
    assert_names(note, "bee")
    assert not re.search("ant|cat", note)
    make_folders(tmp_path / "val", {"bee": 1})
    assert not any(each.startswith("warning: ") for each in load("imagefolder", tmp_path)[1].notes)


def test_first_usual_name_of_the_validation_images_wins(tmp_path):
    for part in ("train", "dev", "eval", "test"):
        make_folders(tmp_path / part, {"ant": 1, "bee": 1})
    _, val = load("imagefolder", tmp_path)
    assert {Path(val.name(index)).parts[-3] for index in range(len(val))} == {"eval"}


def test_hidden_folders_and_non_image_files_are_ignored(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, ".ipynb_checkpoints": 1, "bee/more": 1, "bee/.trash": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / "train" / "ant" / "Thumbs.db").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "._00.JPEG").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "loop").symlink_to("loop")
    train, _ = load("imagefolder", tmp_path)
    assert train.classes == ["ant", "bee"] and train.targets.tolist() == [0, 1, 1]


def as_jpeg(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, shade, shade)).save(content, "JPEG", quality=100)
    return content.getvalue()


@pytest.mark.parametrize("ending", ["jfif", "JFIF"])
def test_jfif_files_are_read_like_jpg_files_from_every_source(tmp_path, ending):
    contents = {f"{name}/{number}.{ending}": as_jpeg(10 * number) for name in ("ant", "bee") for number in range(12)}
    for name, content in contents.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(content)
    lines = "".join(f"photos/{name},{name[:3]}\n" for name in contents)
    (tmp_path / "list.csv").write_text(f"image_path,target\n{lines}")
    labels = {f"{name.partition('.')[0]}.cls": b"1" if name.startswith("bee") else b"0" for name in contents}
    write_tar(tmp_path / "shards/train-0.tar", contents | labels)
    sources = {"imagefolder": "photos", "csv": "list.csv", "shards": "shards"}
    for dataset, path in sources.items():
        parts = load(dataset, tmp_path / path, VAL_FRACTION=0.25)
        assert sorted(shades(parts[0]) + shades(parts[1])) == sorted([*range(0, 120, 10)] * 2), dataset
    found = expand(str(tmp_path / "photos"), Mock(without=lambda paths, *_: paths))
    assert sorted(found) == sorted(str(tmp_path / "photos" / name) for name in contents)


def test_stored_index_is_built_again_if_more_formats_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "SMALL", 0)
    make_folders(tmp_path, {"train/ant": 2, "train/bee": 1, "val/ant": 1})
    (tmp_path / "train/ant/photo.jfif").write_bytes(as_jpeg(90))
    with monkeypatch.context() as older:
        older.setattr("datasets.sources.folder.IMAGE_ENDINGS", (".jpeg",))
        assert shades(load("imagefolder", tmp_path)[0]) == [0, 1, 2] and (tmp_path / "train/images.index").exists()
    assert shades(load("imagefolder", tmp_path)[0]) == [0, 1, 90, 2]


@pytest.mark.parametrize("folders", cases_of("mistakes-of_folders"))
def test_invalid_folder_layouts_are_reported(tmp_path, folders):
    for folder, _, content in (each.partition("=") for each in folders.split()):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        if content.isdecimal():
            (tmp_path / folder).mkdir()
            make_folders(tmp_path, {folder: int(content)})
        else:
            (tmp_path / folder).symlink_to(tmp_path / content)
    assert_names(error_of("imagefolder", tmp_path, VAL_FRACTION=0.0), *names_of("mistakes-of_folders", folders))


def test_unreadable_folder_is_reported(tmp_path, monkeypatch):
    make_folders(tmp_path, {"train/bee": 1, "val/bee": 1})
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Permission denied", "train/bee")))
    assert_names(error_of("imagefolder", tmp_path), "DATA.DATA_PATH", "train/bee")


ABOVE = {"photos/cat": 3, "photos/dog": 3, "new/cat": 3, "new/dog": 3}


@pytest.mark.parametrize(
    "folders",
    [ABOVE, {**ABOVE, "new": 1}, {"a/train/cat": 2, "a/val/cat": 2, "b/train/cat": 2, "b/val/cat": 2}],
)
def test_data_path_one_folder_too_high_is_refused(tmp_path, folders):
    make_folders(tmp_path / "data", folders)
    first = sorted({name.split("/")[0] for name in folders})[0]
    found = error_of("imagefolder", tmp_path / "data")
    assert_names(found, "DATA.DATA_PATH", tmp_path / "data", f"-data_path {tmp_path / 'data' / first}", "DATA.CLASSES")
    assert_names(found, *names_of("mistakes-of_folders_above_the_data", " ".join(folders)))


def test_mistake_in_the_classes_of_doubtful_folders_names_their_file_and_line(tmp_path):
    make_folders(tmp_path / "data", ABOVE)
    (tmp_path / "classes.txt").write_text("photos\nnew\nnew\n")
    with refused(ConfigError, "DATA.CLASSES", tmp_path / "classes.txt", "line 3"):
        load("imagefolder", tmp_path / "data", CLASSES=str(tmp_path / "classes.txt"))


def test_listing_the_folders_as_classes_prevents_folder_too_high_error(tmp_path):
    make_folders(tmp_path / "data", ABOVE)
    listed, others = tmp_path / "listed.txt", tmp_path / "others.txt"
    listed.write_text("photos\nnew\n")
    others.write_text("cat\ndog\n")
    train, val = load("imagefolder", tmp_path / "data", CLASSES=str(listed))
    assert train.classes == ["photos", "new"] and len(train) + len(val) == 12
    assert "one folder too high" in error_of("imagefolder", tmp_path / "data", CLASSES=str(others))
    of_run = SavedData(["new", "photos"], {})  # as trained by a version that did not refuse them
    assert open_sets(settings("imagefolder", tmp_path / "data"), saved=of_run)[0].classes == ["new", "photos"]
    with pytest.raises(DataError, match="one folder too high"):
        open_sets(settings("imagefolder", tmp_path / "data"), saved=SavedData(["cat", "dog"], {}))


RUN = ("config.yaml", ".lock", "status.json")


def make_run(folder: Path, *names: str) -> None:
    """Make a folder with these files of a run, and a picture of the run."""
    draw(folder / "mistakes.png", 255)
    draw(folder / "figures/loss.png", 255)
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize("names", [RUN, RUN[:2], RUN[1:], RUN[::2]])
def test_run_folders_among_data_are_neither_classes_nor_images(tmp_path, names):
    make_folders(tmp_path, {"cat": 5, "dog": 5})
    for name in ("train-20260102-03-04-05", "cat/mine", "cat/output/mine"):
        make_run(tmp_path / name, *names)
    train, val = load("imagefolder", tmp_path)
    assert train.classes == ["cat", "dog"] and len(train) + len(val) == 10
    assert {255} & {*shades(train), *shades(val)} == set()
    assert f"{tmp_path}: left out: folders of runs 3" in val.notes
    make_folders(tmp_path / "parts", {"train/cat": 2, "train/dog": 2, "val/cat": 2})
    for name in ("train/mine", "val/mine", "val/cat/mine", "mine"):
        make_run(tmp_path / "parts" / name, *names)
    train, val = load("imagefolder", tmp_path / "parts")
    assert train.classes == ["cat", "dog"] and (len(train), len(val)) == (4, 2)
    assert_names("\n".join(val.notes[2:]), tmp_path / "parts/mine", "folders of runs 2", "folders of runs 1")
    make_folders(tmp_path / "one", {"photos/cat": 2, "photos/dog": 2})
    make_run(tmp_path / "one/mine", *names)
    assert load("imagefolder", tmp_path / "one")[0].classes == ["cat", "dog"], "only one folder next to a run has data"


def test_class_folder_with_run_file_stays_a_class(tmp_path):
    make_folders(tmp_path, {"cat": 5, "dog": 5})
    for name, file in zip(("cat", "dog"), RUN[::2], strict=True):
        (tmp_path / name / file).touch()
    assert load("imagefolder", tmp_path)[0].classes == ["cat", "dog"]


@pytest.mark.parametrize("parent", ["", "caltech101"])
def test_caltech101_excludes_background_unless_requested(tmp_path, parent):
    make_folders(
        tmp_path / parent / "101_ObjectCategories", {"BACKGROUND_Google": 10, "Faces": 20, "accordion": 10, ".x": 1}
    )
    train, val = load("caltech101", tmp_path)
    assert train.classes == val.classes == ["Faces", "accordion"]
    assert np.bincount(train.targets).tolist() == [18, 9] and np.bincount(val.targets).tolist() == [2, 1]


def test_caltech256_excludes_clutter_and_stray_files(tmp_path):
    folder = tmp_path / "256_ObjectCategories"
    make_folders(folder, {"001.ak47": 10, "056.dog": 10, "257.clutter": 10, "056.dog/greg": 5})
    (folder / "056.dog" / "RENAME2").write_text("stray")
    for path in (tmp_path, folder):
        train, val = load("caltech256", path)
        assert train.classes == ["001.ak47", "056.dog"]
        assert np.bincount(train.targets).tolist() == [9, 9] and np.bincount(val.targets).tolist() == [1, 1]


KAGGLE = "ILSVRC/Data/CLS-LOC"


def test_documented_command_sorts_kaggle_validation_images(tmp_path):
    synsets = ["n01443537", "n01440764", "n02108551", "n01440764"]  # one for each validation image
    make_folders(tmp_path / KAGGLE / "train", dict.fromkeys(sorted(set(synsets)), 4))
    names = [f"ILSVRC2012_val_{number + 1:08d}" for number in range(len(synsets))]
    for shade, name in enumerate(names, start=100):
        draw(tmp_path / KAGGLE / "val" / f"{name}.JPEG", shade)
    boxes = [" 1 2 3 4", " 1 2 3 4 n01440764 5 6 7 8", " 1 2 3 4", " 1 2 3 4"]
    lines = [",".join(each) for each in zip(names, map(str.__add__, synsets, boxes), strict=True)]
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(lines)]) + "\n")
    (command,) = re.findall(r"^awk .*(?:\n .*)*", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.M)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    train, val = load("imagefolder", tmp_path / KAGGLE)
    assert train.classes == val.classes == sorted(set(synsets)) and len(train) == 12
    assert sorted(zip(shades(val), val.targets.tolist(), strict=True)) == [(100, 1), (101, 0), (102, 2), (103, 0)]


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"\xff\xfe.png", "caf\u00e9.png".encode(), "cafe\u0301.png".encode()])
def test_file_of_a_list_is_read_whatever_the_encoding_of_its_name(tmp_path, name):
    path = os.fsdecode(name)
    draw(tmp_path / path, 7)
    (tmp_path / "other.png").touch()
    images = files_with(tmp_path, ["other.png", path], np.zeros(2, int), ["one"], Pixels(3))
    assert images.read(1)[0, 0, 0] == 7 and os.fsencode(images.name(1)).endswith(b"/" + name)


def test_numbers_in_names_are_ordered_by_value():
    assert sorted(["b1", "a10b2", "a9", "10", "2"], key=natural) == ["2", "10", "a9", "a10b2", "b1"]
