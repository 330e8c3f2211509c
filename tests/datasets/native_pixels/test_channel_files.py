"""Images whose channels are files of their own (DATA.CHANNEL_FILES)."""

import os
from pathlib import Path

import numpy as np
import pytest

from configs.tables import PIXEL_KINDS
from datasets.pixels import Pixels, readers
from datasets.pixels.native.pixels import NativePixels
from datasets.sources.files import images_among, images_of_files
from datasets.sources.folder import FolderScan
from datasets.sources.images import FileImages
from datasets.types import ImageReadError
from tests.support.image_sets import settings
from tests.support.native_files import npy, tiff
from tests.support.opened import open_sets
from tests.support.refusals import refused
from utils.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns about images that are a little too large

FLAT, NESTED, BY_SCENE = "{id}_{B02,B03}.tif", "{B02,B03}/{id}.tif", "{id}/{B02,B03}.tif"
SIZE = (3, 4)


def layer(value: int, kind: type = np.uint16) -> bytes:
    """Return a TIFF of one channel whose first value is `value`."""
    return tiff((value + np.arange(np.prod(SIZE))).reshape(SIZE).astype(kind))


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def path_of(pattern: str, image: str, band: str) -> str:
    return pattern.replace("{id}", image).replace("{B02,B03}", band)


def write_scenes(root: Path, pattern: str, scenes: dict[str, int], below: str = "") -> None:
    """Write the two files of each scene. Its first channel begins with the given value, and its second with 100 more."""
    for image, value in scenes.items():
        for band, added in (("B02", 0), ("B03", 100)):
            write(root, {os.path.join(below, path_of(pattern, image, band)): layer(value + added)})


def images_in(root: Path, *paths: str, pattern: str = FLAT, channels: int = 2, **rules) -> FileImages:
    found = NativePixels(channels, channel_files=pattern, **rules)
    return images_of_files(root, list(paths), np.zeros(len(paths), np.int64), ["ant"], found)


def firsts(images) -> list[list[int]]:
    """Return the first value of each channel of each image."""
    return [images.read(index)[0, 0].astype(int).tolist() for index in range(len(images))]


def load(dataset: str, root: Path, pattern: str = FLAT, **data):
    facts = {"PIXELS": "native", "CHANNEL_FILES": pattern, "IMAGE_CHANNELS": 2, "VAL_FRACTION": 0.5}
    return open_sets(settings(dataset, root, **(facts | data)))


# --- names ---


@pytest.mark.parametrize("pattern", [FLAT, NESTED, BY_SCENE])
@pytest.mark.parametrize("below", ["", "ant", "ant/1999/may"])
def test_channels_of_each_pattern_are_read_in_its_order(tmp_path, pattern, below):
    write_scenes(tmp_path, pattern, {"s1": 10, "s2": 20}, below)
    paths = [os.path.join(below, path_of(pattern, image, "B02")) for image in ("s2", "s1")]
    images = images_in(tmp_path, *paths, pattern=pattern)
    assert firsts(images) == [[20, 120], [10, 110]]
    assert images.read(0).shape == (*SIZE, 2) and images.read(0).dtype == np.uint16
    swapped = pattern.replace("B02,B03", "B03,B02")
    paths = [path.replace("B02", "B03") for path in paths]
    assert firsts(images_in(tmp_path, *paths, pattern=swapped)) == [[120, 20], [110, 10]]


@pytest.mark.parametrize("image", ["a+b(c)[1]", "s.1", "$^", "a|b", "B02", "_B02_B03", "{x}", "ü é", "\\1", "a\nb", ""])
def test_ids_with_special_characters_find_their_files(tmp_path, image):
    write_scenes(tmp_path, FLAT, {image: 10, "other": 20})
    kept = images_among(sorted(os.listdir(tmp_path)), NativePixels(2, channel_files=FLAT), pytest.fail)
    assert kept == sorted([f"{image}_B02.tif", "other_B02.tif"])
    assert firsts(images_in(tmp_path, f"{image}_B02.tif", "other_B02.tif")) == [[10, 110], [20, 120]]


def test_dots_and_plus_signs_of_a_pattern_stand_for_themselves(tmp_path):
    pattern = "a+{id}.{B.2,B.3}.tif"
    write(tmp_path, {f"a+x.{band}.tif": layer(value) for band, value in (("B.2", 1), ("B.3", 2))})
    write(tmp_path, {name: layer(9) for name in ("aax.B.2.tif", "a+xxB.2.tif", "a+x.B.2xtif", "a+x.B02.tif")})
    reports = []
    kept = images_among(sorted(os.listdir(tmp_path)), NativePixels(2, channel_files=pattern), reports.append)
    assert kept == ["a+x.B.2.tif"] and firsts(images_in(tmp_path, *kept, pattern=pattern)) == [[1, 2]]
    assert len(reports) == 1 and "4 files" in reports[0] and pattern in reports[0]


def test_names_that_begin_with_another_name_are_told_apart(tmp_path):
    pattern = "{id}_{B8,B8A,B11,B1}.tif"
    write(tmp_path, {f"s_{band}.tif": layer(value) for band, value in {"B8": 8, "B8A": 9, "B11": 11, "B1": 1}.items()})
    kept = images_among(sorted(os.listdir(tmp_path)), NativePixels(4, channel_files=pattern), pytest.fail)
    assert kept == ["s_B8.tif"] and firsts(images_in(tmp_path, *kept, pattern=pattern, channels=4)) == [[8, 9, 11, 1]]


def test_files_of_an_image_may_have_another_format_each(tmp_path):
    values = np.arange(12, dtype=np.uint16).reshape(SIZE)
    write(tmp_path, {"s_B02.npy": npy(values), "s_B03.npy": tiff(values + 1)})
    assert firsts(images_in(tmp_path, "s_B02.npy", pattern="{id}_{B02,B03}.npy")) == [[0, 1]]


# --- images that cannot be read ---


def test_missing_file_of_a_channel_is_named(tmp_path):
    write_scenes(tmp_path, FLAT, {"s1": 10})
    for band in ("B03", "B02"):
        os.rename(tmp_path / f"s1_{band}.tif", tmp_path / "gone")
        with refused(ImageReadError, band, f"s1_{band}.tif", "FileNotFoundError"):
            images_in(tmp_path, "s1_B02.tif").read(0)
        os.rename(tmp_path / "gone", tmp_path / f"s1_{band}.tif")
    assert firsts(images_in(tmp_path, "s1_B02.tif")) == [[10, 110]]


@pytest.mark.parametrize(
    ("second", "rules", "words"),
    [
        (layer(1)[:-10], {}, ["B03"]),
        (tiff(np.ones((6, 8), np.uint16)), {}, ["B03", "8 x 6", "B02", "4 x 3"]),
        (layer(10, np.float32), {"kind": "uint16"}, ["B03", "uint16", "float32"]),
        (layer(10, np.float32), {}, ["uint16", "float32"]),
        (tiff(np.ones((2, *SIZE), np.uint16)), {}, ["B03", "2 channels"]),
        (tiff(np.ones((8, 10), np.uint16)), {"max_pixels": 60}, ["B03", "10 x 8", "DATA.MAX_PIXELS", 60]),
    ],
    ids=["damaged", "other size", "other type", "two types", "several channels", "too large"],
)
def test_unsuitable_file_of_a_channel_is_named(tmp_path, second, rules, words):
    write(tmp_path, {"s1_B02.tif": layer(10), "s1_B03.tif": second})
    with refused(ImageReadError, *words):
        images_in(tmp_path, "s1_B02.tif", **rules).read(0)


@pytest.mark.parametrize("name", ["s1_B03.tif", "s1.tif"])
def test_listed_file_of_another_name_never_gives_wrong_channels(tmp_path, name):
    write_scenes(tmp_path, FLAT, {"s1": 10})
    write(tmp_path, {"s1.tif": layer(50)})
    try:
        found = firsts(images_in(tmp_path, name))
    except ImageReadError as error:
        assert FLAT in str(error)
    else:
        assert found == [[10, 110]] and name != "s1.tif"


# --- class folders and lists ---


@pytest.mark.parametrize("pattern", [FLAT, NESTED, BY_SCENE])
def test_class_folders_have_one_image_for_all_channel_files(tmp_path, pattern):
    for number, name in enumerate(("ant", "bee")):
        write_scenes(tmp_path / name, pattern, {f"s{place}": 1000 * number + 10 * place for place in range(4)})
    train, val = load("imagefolder", tmp_path, pattern)
    assert train.classes == ["ant", "bee"] and len(train) + len(val) == 8
    found = [(row, target) for each in (train, val) for row, target in zip(firsts(each), each.targets, strict=True)]
    expected = [
        ([1000 * number + 10 * place, 1000 * number + 10 * place + 100], number)
        for number in (0, 1)
        for place in range(4)
    ]
    assert sorted(found) == expected


def test_files_that_are_no_channels_are_counted_in_the_log(tmp_path):
    for name in ("ant", "bee"):
        write_scenes(tmp_path / name, FLAT, {"s1": 10, "s2": 20})
    write(
        tmp_path, {"ant/s1_B04.tif": layer(1), "ant/s1_preview.png": b"", "bee/B02.tif": layer(1), "bee/notes.txt": b""}
    )
    _, val = load("imagefolder", tmp_path)
    (note,) = [each for each in val.notes if FLAT in each]
    assert f"not {FLAT} 3" in note and ".txt 1" in note


def test_class_folder_without_channel_files_is_refused_by_name(tmp_path):
    write_scenes(tmp_path / "ant", FLAT, {"s1": 10})
    write(tmp_path, {"bee/s1.tif": layer(1)})
    with refused(DataError, "bee", FLAT):
        load("imagefolder", tmp_path)


def test_changed_pattern_reads_the_folders_again(tmp_path):
    other = "{id}_{B04,B05}.tif"
    for name in ("ant", "bee"):
        write_scenes(tmp_path / name, FLAT, {"s0": 0, "s1": 10})
        write(
            tmp_path / name, {path.format(image): layer(7) for path in ("{}_B04.tif", "{}_B05.tif") for image in "abc"}
        )
    for pattern, values in ((FLAT, [[0, 100], [10, 110]]), (other, [[7, 7]] * 3), (FLAT, [[0, 100], [10, 110]])):
        train, val = load("imagefolder", tmp_path, pattern)
        assert sorted(firsts(train) + firsts(val)) == sorted(values * 2)


def test_csv_list_names_the_file_of_the_first_channel(tmp_path):
    write_scenes(tmp_path, NESTED, {"s1": 10, "s2": 20, "s3": 30, "s4": 40}, below="scenes")
    rows = [f"scenes/B02/s{number}.tif,{name}" for number, name in enumerate(["ant", "bee", "ant", "bee"], 1)]
    (tmp_path / "train.csv").write_text("\n".join(["image_path,target", *rows]) + "\n")
    train, val = load("csv", tmp_path / "train.csv", NESTED)
    found = [
        (row, each.classes[target])
        for each in (train, val)
        for row, target in zip(firsts(each), each.targets, strict=True)
    ]
    assert sorted(found) == [([10, 110], "ant"), ([20, 120], "bee"), ([30, 130], "ant"), ([40, 140], "bee")]


def test_listed_channel_file_may_not_link_out_of_the_folder(tmp_path):
    write(tmp_path, {"outside.tif": layer(7)})
    write_scenes(tmp_path / "data", FLAT, {"s1": 10, "s2": 20, "s3": 30, "s4": 40})
    for number in range(1, 5):
        os.unlink(tmp_path / "data" / f"s{number}_B03.tif")
        os.symlink(tmp_path / "outside.tif", tmp_path / "data" / f"s{number}_B03.tif")
    rows = [f"s{number}_B02.tif,{number % 2}" for number in range(1, 5)]
    (tmp_path / "data" / "train.csv").write_text("\n".join(["image_path,target", *rows]) + "\n")
    with pytest.raises(DataError, match="s[1-4]_B03.tif"):
        load("csv", tmp_path / "data" / "train.csv")[0].read(0)


# --- stamps, files and parts ---


@pytest.mark.parametrize("band", ["B02", "B03"])
def test_stamp_changes_with_the_file_of_any_channel(tmp_path, band):
    write_scenes(tmp_path, FLAT, {"s1": 10, "s2": 20})
    images = images_in(tmp_path, "s1_B02.tif", "s2_B02.tif")
    before, other = images.stamp(0), images.stamp(1)
    assert before == images.stamp(0) and before != other
    path = tmp_path / f"s1_{band}.tif"
    os.utime(path, ns=(0, 10**18))
    dated = images.stamp(0)
    path.write_bytes(layer(11) + b"more")
    os.utime(path, ns=(0, 10**18))
    longer = images.stamp(0)
    path.unlink()
    assert len({before, dated, longer, images.stamp(0)}) == 4 and images.stamp(1) == other


# --- the images of a folder, listed before the model is known ---


class Frames(NativePixels):
    """Another kind of pixels, with files of its own."""

    name, own_endings = "frames", (".npz", ".dcm")


@pytest.mark.parametrize(
    ("pixels", "kept", "words"),
    [
        (Pixels(3), ["2.tif"], ["3 files", "DATA.PIXELS=frames or native "]),
        (NativePixels(1), ["1.dcm", "2.tif", "3.DCM"], ["1 file", "DATA.PIXELS=frames "]),
        (Frames(1), ["1.dcm", "2.tif", "3.DCM", "4.npz"], []),
    ],
)
def test_files_that_only_other_pixels_read_are_left_out(monkeypatch, pixels, kept, words):
    monkeypatch.setattr("datasets.pixels.native.pixels.Frames", Frames, raising=False)
    monkeypatch.setitem(PIXEL_KINDS, "frames", "pixels.native.pixels.Frames")
    monkeypatch.setattr("datasets.sources.files.readers", readers.__wrapped__)
    reports = []
    assert images_among(["1.dcm", "2.tif", "3.DCM", "4.npz"], pixels, reports.append) == kept
    assert len(reports) == bool(words) and all(word in reports[0] for word in words)


def test_scan_of_a_folder_with_channel_files_is_sorted(tmp_path):
    write_scenes(tmp_path, BY_SCENE, {"s2": 20, "s1": 10, "s10": 30}, below="ant")
    scan = FolderScan(tmp_path, ["ant"], channel_files=BY_SCENE)
    assert scan.images_below("ant") == ["ant/s1/B02.tif", "ant/s10/B02.tif", "ant/s2/B02.tif"]
    assert not scan.left_out
