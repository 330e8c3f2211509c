"""`-dataset images`: folders, lists, tars and parquet files without labels."""

import os
from pathlib import Path

import pytest

from configs.schema import Config
from tests.support.configs import replaced
from tests.support.image_sets import draw, png, shades, write_tar
from tests.support.opened import open_sets
from tests.support.parquet_files import write_parquet
from tests.support.refusals import refused
from utils.errors import DataError

pytestmark = pytest.mark.slow


def settings(path: Path, **data) -> Config:
    config = replaced(Config(), DATA={"DATASET": "images", "DATA_PATH": str(path), **data})
    return replaced(config, TRAIN={"OBJECTIVE": "features"})


def load(path: Path, **data):
    """Return the shades and names of all images. Check that both parts have one class and no image in common."""
    train, val = open_sets(settings(path, **data))
    assert train.classes == val.classes == ["image"] and not train.targets.any() and not val.targets.any()
    names = {part.key(index) for part in (train, val) for index in range(len(part))}
    assert len(names) == len(train) + len(val) and len(val) >= 1
    return sorted(shades(train) + shades(val)), names


def test_folder_is_read_with_all_its_subfolders(tmp_path):
    for shade, name in enumerate(["a.png", "b.JPG", "trip/c.png", "trip/day 1/d.jpeg", "train/e.png", "val/f.webp"]):
        draw(tmp_path / "photos" / name, shade)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    draw(tmp_path / "photos" / ".hidden" / "g.png", 99)
    draw(tmp_path / "photos" / "run" / "confusion.png", 98)
    (tmp_path / "photos" / "run" / "status.json").write_text('{"version": 1, "kind": "train"}')
    (tmp_path / "photos" / "run" / "config.yaml").write_text("")
    found, names = load(tmp_path / "photos", VAL_FRACTION=0.3)
    assert found == [0, 1, 2, 3, 4, 5] and "trip/day 1/d.jpeg" in names
    told = " ".join(open_sets(settings(tmp_path / "photos"))[1].notes)
    assert "warning" not in told and "folders of runs 1" in told and ".txt 1" in told
    draw(tmp_path / "photos" / "trip/new.png", 6)
    os.utime(tmp_path / "photos" / "trip", (1, 1))
    assert load(tmp_path / "photos")[0] == [0, 1, 2, 3, 4, 5, 6]


def test_list_names_photos_relative_to_its_folder(tmp_path):
    for shade in range(6):
        draw(tmp_path / f"photos/with space {shade}.png", shade)
    file = tmp_path / "some.txt"
    file.write_text("".join(f"photos/with space {shade}.png\r\n" for shade in range(1, 6)) + "\n")
    assert load(file)[0] == [1, 2, 3, 4, 5]
    file.write_text("\n\n")
    with refused(DataError, "DATA.DATA_PATH", "some.txt"):
        load(file)
    file.write_text("../outside.png\nphotos/with space 1.png\n")
    with refused(DataError, "some.txt", "../"):
        load(file)


@pytest.mark.parametrize("labels", [False, True])
def test_tars_are_read_with_and_without_labels(tmp_path, labels):
    for number in range(3):
        files = {f"{number}{place}.png": png(10 * number + place) for place in range(4)}
        files |= {f"{number}0.cls": b"cat", f"{number}1.json": b'{"caption": "a dog"}'} if labels else {}
        write_tar(tmp_path / f"train-{number:06d}.tar", files)
    (tmp_path / "._train-000000.tar").write_bytes(b"macOS writes these beside files on other disks")
    everything = sorted(10 * number + place for number in range(3) for place in range(4))
    assert load(tmp_path)[0] == everything
    assert load(tmp_path / "train-000001.tar")[0] == [10, 11, 12, 13]


def test_tar_next_to_photos_is_left_out_with_a_warning(tmp_path):
    draw(tmp_path / "trip" / "1.png", 1), draw(tmp_path / "trip" / "2.png", 2)
    write_tar(tmp_path / "backup.tar", {"3.png": png(3)})
    assert load(tmp_path)[0] == [1, 2]
    _, val = open_sets(settings(tmp_path))
    assert any(note.startswith("warning: ") and ".tar 1" in note for note in val.notes)


def test_parquet_is_read_without_labels(tmp_path):
    for number in range(2):
        rows = [{"bytes": png(10 * number + row), "path": f"{number}-{row}.png"} for row in range(6)]
        write_parquet(tmp_path / f"part-{number}.parquet", {"image": rows, "caption": ["words"] * 6})
    everything = sorted(10 * number + row for number in range(2) for row in range(6))
    found, names = load(tmp_path)
    assert found == everything and "1-5.png" in names
    single = write_parquet(tmp_path / "other.parquet", {"pixels": [png(row) for row in range(5)]})
    assert load(single)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.tar", ["DATA.DATA_PATH", "images"]),
        ("a.parquet", ["a.parquet", "image", "left", "right"]),
        ("photo.jpg", ["DATA.DATA_PATH", "photo.jpg", ".txt", ".tar", ".parquet"]),
        ("empty", ["empty"]),
        ("missing", ["DATA.DATA_PATH", "missing"]),
    ],
)
def test_path_without_images_is_refused(tmp_path, name, words):
    write_tar(tmp_path / "a.tar", {"a.txt": b"words"})
    write_parquet(tmp_path / "a.parquet", {"left": [b"1"], "right": [b"2"], "caption": ["words"]})
    (tmp_path / "photo.jpg").write_bytes(png(1))
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    with refused(DataError, *words):
        load(tmp_path / name)
