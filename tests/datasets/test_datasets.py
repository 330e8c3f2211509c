"""Data sets in their real layouts, made small; what is said when they are wrong; and the transforms."""

import io
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from configs.schema import Data
from datasets import BadImages, EvalTransform, Normalize, TrainTransform
from datasets.shuffle import shuffled
from datasets.sources.digits import FILE
from datasets.sources.images import hold_out
from datasets.transforms.crop import crop_box
from datasets.transforms.decode import decode, to_array
from datasets.types import ImageReadError
from tests.support.image_sets import draw, error_of, load, shades
from utils.errors import ConfigError, DataError


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


# --- list files ---


def make_lists(root: Path, train: str, val: str = "a.jpg 0\n", encoding: str = "utf-8") -> None:
    (root / "train_list.txt").write_text(train, encoding=encoding)
    (root / "val_list.txt").write_text(val, encoding=encoding)
    for shade, name in enumerate(["a.jpg", "n01/my holiday photo.jpg", "n02/c.jpg"]):
        draw(root / name, shade)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_list_files_are_split_at_the_last_white_space(tmp_path, encoding):
    make_lists(tmp_path, "n02/c.jpg 2\n\n  n01/my holiday photo.jpg\t1 \r\na.jpg 0", encoding=encoding)
    train, val = load("imagenet2012", tmp_path)
    assert train.targets.tolist() == [2, 1, 0] and shades(train) == [2, 1, 0]
    assert val.targets.tolist() == [0] and shades(val) == [0]
    assert train.classes == val.classes == ["0", "1", "2"]
    assert train.name(1) == str(tmp_path / "n01/my holiday photo.jpg")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c.jpg", "line 3: 'c.jpg' has no label"),
        ("n02/c.jpg one", "line 3: label 'one' is not a whole number"),
        ("n02/c.jpg 1.0", "line 3: label '1.0' is not a whole number"),
        ("n02/c.jpg -1", "line 3: label '-1' is negative"),
        ("n02/c.jpg 5", "line 3: label 5 needs at least 6 classes, but MODEL.NUM_CLASSES is 3"),
        ("/etc/hostname 1", "line 3: '/etc/hostname' leads out of"),
        ("n02/../../c.jpg 1", "line 3: 'n02/../../c.jpg' leads out of"),
        ("outside/c.jpg 1", "line 3: 'outside/c.jpg' leads out of"),
        ("n02/none.jpg 1", "line 3: there is no file"),
    ],
)
def test_a_wrong_line_of_a_list_is_told_with_its_number(tmp_path, line, message):
    root = tmp_path / "data"
    root.mkdir()
    draw(tmp_path / "elsewhere" / "c.jpg")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    make_lists(root, f"a.jpg 0\n\n{line}\n")
    assert f"train_list.txt, {message}" in error_of("imagenet2012", root, num_classes=3)


def test_an_absurd_label_is_refused_when_the_classes_follow_the_data(tmp_path):
    make_lists(tmp_path, "a.jpg 99999999999999999999\n")
    assert "is no class number" in error_of("imagenet2012", tmp_path)


def test_a_linked_file_outside_the_root_is_refused_when_it_is_read_and_one_inside_is_not(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    make_lists(root, "a.jpg 0\ninside.jpg 0\nlink.jpg 0\n")
    draw(tmp_path / "secret.jpg")
    (root / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (root / "inside.jpg").symlink_to(root / "n02" / "c.jpg")
    train, _ = load("imagenet2012", root)
    assert train.read(1)[0, 0, 0] == 2
    with pytest.raises(DataError, match="link leads out of"):
        train.read(2)


def test_a_validation_label_that_is_never_trained_is_refused(tmp_path):
    make_lists(tmp_path, "a.jpg 0\na.jpg 2\n", "a.jpg 2\nn02/c.jpg 1\n")
    assert "val_list.txt, line 2: class 1 does not occur in" in error_of("imagenet2012", tmp_path)


def test_evaluation_needs_only_the_validation_list_but_counts_the_classes_of_both(tmp_path):
    make_lists(tmp_path, "a.jpg 0\nmissing.jpg 7\n")
    train, val = load("imagenet2012", tmp_path, evaluate=True)
    assert train is None and len(val.classes) == 8
    (tmp_path / "train_list.txt").unlink()
    assert len(load("imagenet2012", tmp_path, evaluate=True)[1].classes) == 1
    assert "has no train_list.txt" in error_of("imagenet2012", tmp_path)


def test_an_empty_list_is_an_error(tmp_path):
    make_lists(tmp_path, "a.jpg 0\n", "\n")
    assert "there are no validation images" in error_of("imagenet2012", tmp_path)


# --- class folders ---


def make_folders(root: Path, counts: dict[str, int], shade: int = 0) -> None:
    for name, count in counts.items():
        for number in range(count):
            draw(root / name / f"{number:02d}.JPEG", shade)
            shade += 1


@pytest.mark.parametrize("dataset", ["imagenet2012", "imagefolder"])
def test_class_folders_are_numbered_by_the_names_in_train(tmp_path, dataset):
    make_folders(tmp_path / "train", {"cat": 2, "ant": 1, "bee": 1})
    make_folders(tmp_path / "val", {"cat": 1, "bee": 1}, shade=10)
    train, val = load(dataset, tmp_path)
    assert train.classes == val.classes == ["ant", "bee", "cat"]
    assert list(zip(train.targets.tolist(), shades(train), strict=True)) == [(0, 2), (1, 3), (2, 0), (2, 1)]
    assert list(zip(val.targets.tolist(), shades(val), strict=True)) == [(1, 11), (2, 10)]
    only_val = load(dataset, tmp_path, evaluate=True)
    assert only_val[0] is None and only_val[1].targets.tolist() == [1, 2]
    (tmp_path / "train" / "ant" / "00.JPEG").unlink()  # to evaluate, nobody looks for training images
    assert load(dataset, tmp_path, evaluate=True)[1].targets.tolist() == [1, 2]


def test_hidden_folders_and_files_that_are_no_images_are_ignored(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, ".ipynb_checkpoints": 1, "bee/more": 1, "bee/.trash": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / "train" / "ant" / "Thumbs.db").write_bytes(b"no image")
    (tmp_path / "train" / "ant" / "._00.JPEG").write_bytes(b"no image")
    train, _ = load("imagefolder", tmp_path)
    assert train.classes == ["ant", "bee"] and train.targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize("part", ["train", "val"])
def test_an_empty_class_folder_is_named(tmp_path, part):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / part / "bee").mkdir(exist_ok=True)
    (tmp_path / part / "bee" / "00.JPEG").unlink(missing_ok=True)
    assert f"{tmp_path / part / 'bee'}: this class folder holds no images" in error_of("imagefolder", tmp_path)


def test_a_class_in_val_but_not_in_train_is_named_with_the_nearest(tmp_path):
    make_folders(tmp_path / "train", {"hornet": 1, "bee": 1})
    make_folders(tmp_path / "val", {"Hornets": 1})
    message = error_of("imagefolder", tmp_path)
    assert str(tmp_path / "val" / "Hornets") in message and message.endswith("did you mean hornet?")


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_the_validation_folder_may_have_any_of_its_usual_names(tmp_path, name):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / name, {"ant": 2})
    assert len(load("imagefolder", tmp_path)[1]) == 2


def test_train_without_val_is_an_error_that_says_how_to_split_it(tmp_path):
    make_folders(tmp_path / "train", {"ant": 4})
    assert "has no folder val/; imagefolder expects train/ and val/" in error_of("imagefolder", tmp_path)
    assert f"-data_path {tmp_path / 'train'}" in error_of("imagefolder", tmp_path)
    make_folders(tmp_path / "only" / "val", {"ant": 4})
    assert "has no folder train/" in error_of("imagefolder", tmp_path / "only")


def test_one_folder_of_class_folders_is_split_by_class_and_seed(tmp_path):
    make_folders(tmp_path, {"ant": 10, "bee": 20, "cat": 1})
    train, val = load("imagefolder", tmp_path, VAL_FRACTION=0.2)
    assert np.bincount(train.targets).tolist() == [8, 16, 1] and np.bincount(val.targets).tolist() == [2, 4]
    assert sorted(shades(train) + shades(val)) == list(range(31))
    again = load("imagefolder", tmp_path, VAL_FRACTION=0.2)[1]
    other = load("imagefolder", tmp_path, VAL_FRACTION=0.2, SPLIT_SEED=1)[1]
    assert shades(again) == shades(val) != shades(other)
    assert "there are no validation images" in error_of("imagefolder", tmp_path, VAL_FRACTION=0.0)


# --- csv ---


def make_csv(file: Path, rows: str, header: str = "image_path,target", encoding: str = "utf-8") -> None:
    file.write_text(f"{header}\n{rows}", encoding=encoding)
    for shade in range(10):
        draw(file.parent / "images" / f"{shade}.jpg", shade)


def test_csv_targets_may_be_names_and_other_columns_are_skipped(tmp_path):
    header = "image_path,target,note"
    rows = 'images/3.jpg,dog,x\n"images/4.jpg",cat,\n'
    make_csv(tmp_path / "train.csv", rows, header, "utf-8-sig")
    make_csv(tmp_path / "val.csv", 'images/5.jpg, "dog"\n')
    train, val = load("csv", tmp_path)
    assert train.classes == val.classes == ["cat", "dog"]
    assert train.targets.tolist() == [1, 0] and shades(train) == [3, 4]
    assert val.targets.tolist() == [1] and shades(val) == [5]


def test_csv_targets_of_which_one_is_a_name_are_all_names(tmp_path):
    make_csv(tmp_path / "train.csv", "images/1.jpg,dog\nimages/2.jpg,7\n")
    make_csv(tmp_path / "val.csv", "images/1.jpg,7\n")
    train, val = load("csv", tmp_path)
    assert train.classes == ["7", "dog"] and train.targets.tolist() == [1, 0] and val.targets.tolist() == [0]


@pytest.mark.parametrize("as_file", [True, False])
def test_one_csv_file_alone_is_split(tmp_path, as_file):
    make_csv(tmp_path / "train.csv", "".join(f"images/{shade}.jpg,{shade % 2}\n" for shade in range(10)))
    train, val = load("csv", tmp_path / "train.csv" if as_file else tmp_path, VAL_FRACTION=0.2)
    assert len(train) == 8 and sorted(val.targets.tolist()) == [0, 1] and val.classes == ["0", "1"]
    assert sorted(shades(train) + shades(val)) == list(range(10))


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("path,label", "images/1.jpg,0\n", "line 1: the header must name the columns image_path,target; it has path,"),
        ("image_path,target", "images/1.jpg,0\nimages/2.jpg\n", "line 3: there is no target"),
        ("image_path,target", "images/1.jpg,0\n,1\n", "line 3: there is no image_path"),
        ("image_path,target", "images/1.jpg,-1\n", "line 2: label '-1' is negative"),
        ("image_path,target", "images/1.jpg,9\n", "line 2: label 9 needs at least 10 classes"),
        ("image_path,target", "../images/1.jpg,0\n", "line 2: '../images/1.jpg' leads out of"),
        ("image_path,target", "images/none.jpg,0\n", "line 2: there is no file"),
    ],
)
def test_a_wrong_csv_row_is_told_with_its_line(tmp_path, header, rows, message):
    make_csv(tmp_path / "train.csv", rows, header)
    assert f"train.csv, {message}" in error_of("csv", tmp_path, num_classes=5)


def test_a_csv_class_that_is_never_trained_is_named_with_the_nearest(tmp_path):
    make_csv(tmp_path / "train.csv", "images/1.jpg,dog\n")
    make_csv(tmp_path / "val.csv", "images/1.jpg,Dogs\n")
    message = error_of("csv", tmp_path)
    assert "val.csv, line 2: class Dogs does not occur in" in message and message.endswith("did you mean dog?")


# --- Caltech ---


@pytest.mark.parametrize("parent", ["", "caltech101"])
def test_caltech101_leaves_out_the_background_unless_asked(tmp_path, parent):
    make_folders(
        tmp_path / parent / "101_ObjectCategories", {"BACKGROUND_Google": 10, "Faces": 20, "accordion": 10, ".x": 1}
    )
    train, val = load("caltech101", tmp_path)
    assert train.classes == val.classes == ["Faces", "accordion"]
    assert np.bincount(train.targets).tolist() == [18, 9] and np.bincount(val.targets).tolist() == [2, 1]
    assert load("caltech101", tmp_path, KEEP_BACKGROUND=True)[0].classes[0] == "BACKGROUND_Google"


def test_caltech256_leaves_out_clutter_and_stray_files(tmp_path):
    folder = tmp_path / "256_ObjectCategories"
    make_folders(folder, {"001.ak47": 10, "056.dog": 10, "257.clutter": 10, "056.dog/greg": 5})
    (folder / "056.dog" / "RENAME2").write_text("stray")
    for path in (tmp_path, folder):
        train, val = load("caltech256", path)
        assert train.classes == ["001.ak47", "056.dog"]
        assert np.bincount(train.targets).tolist() == [9, 9] and np.bincount(val.targets).tolist() == [1, 1]


# --- digits, synthetic, and what holds for all ---


def test_digits_come_with_halfstep():
    train, val = load("digits", IMAGE_CHANNELS=1)
    assert (len(train), len(val)) == (1438, 359) and train.classes == [str(digit) for digit in range(10)]
    assert train.in_memory and train.read(0).shape == (8, 8, 1)
    assert (train.images.min(), train.images.max()) == (0, 255)
    shares = np.bincount(val.targets) / (np.bincount(val.targets) + np.bincount(train.targets))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    assert load("digits", VAL_FRACTION=0.5)[1].targets.tolist() == val.targets.tolist()
    with np.load(FILE) as content:
        wanted = np.round(content["images"].astype(int) * 255 / 16).astype(int).tolist()
        assert sorted(zip(wanted, content["targets"].tolist(), strict=True)) == sorted(
            (images.tolist(), target)
            for part in (train, val)
            for images, target in zip(part.images, part.targets.tolist(), strict=True)
        )


def test_synthetic_needs_no_files():
    train, val = load("synthetic", SYNTHETIC_SIZE=50)
    assert len(train) == len(val) == 50 and len(train.classes) == 1000
    assert len(load("synthetic", num_classes=7)[0].classes) == 7


def test_an_unknown_data_set_is_answered_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"DATA.DATASET.*'cifar_10'.*did you mean cifar10"):
        load("cifar_10")


@pytest.mark.parametrize("dataset", ["imagenet2012", "imagefolder", "csv", "caltech101", "caltech256"])
def test_a_missing_data_path_says_what_is_expected_there(tmp_path, dataset):
    message = error_of(dataset, tmp_path / "none")
    assert message.startswith(f"DATA.DATA_PATH: nothing at {tmp_path / 'none'}; {dataset} expects ")
    assert message.endswith("(layouts: docs/data.md)")
    error_of(dataset, tmp_path)  # an empty folder will not do either


def test_more_classes_than_the_model_has_are_an_error_and_fewer_are_not(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1, "bee": 1, "cat": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    message = error_of("imagefolder", tmp_path, num_classes=2)
    assert "cat/00.JPEG: its class 'cat' has number 2" in message and "set -num_classes 3" in message
    assert len(load("imagefolder", tmp_path, num_classes=9)[0].classes) == 3


def test_the_shuffle_is_the_same_in_every_version_of_numpy():
    assert shuffled(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert shuffled(10, 0, 1).tolist() != shuffled(10, 1, 0).tolist()


def test_hold_out_keeps_an_image_of_every_class_to_train_on():
    everything, _ = load("digits")
    few = everything.take(np.concatenate([np.flatnonzero(everything.targets == digit)[:2] for digit in range(10)]))
    train, val = hold_out(few, 0.9, seed=0)
    assert np.bincount(train.targets).tolist() == np.bincount(val.targets).tolist() == [1] * 10


# --- reading ---


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "CMYK", "I;16", "1", "L"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_any_mode_become_what_pillow_converts_them_to(tmp_path, mode, channels):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    file = tmp_path / "val" / "ant" / "00.JPEG"
    image = Image.fromarray(np.arange(42, dtype=np.uint16).reshape(6, 7) * 1500) if mode == "I;16" else noise(7, 6)
    (image if mode == "I;16" else image.convert(mode)).save(file, format="TIFF")
    wanted = {1: "L", 3: "RGB"}[channels]
    got = load("imagefolder", tmp_path, IMAGE_CHANNELS=channels)[1].read(0)
    with Image.open(file) as image:
        assert image.mode == mode
        assert got.shape == (6, 7, channels) and got.tobytes() == image.convert(wanted).tobytes()


JPEGS = {
    "colour": ("RGB", {}),
    "whole chroma": ("RGB", {"subsampling": 0}),
    "progressive": ("RGB", {"progressive": True}),
    "grey": ("L", {}),
    "CMYK": ("CMYK", {}),
    "best": ("RGB", {"quality": 100}),
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("channels", [1, 3])
def test_jpegs_are_decoded_to_pillows_pixels_with_and_without_the_fast_decoder(kind, channels, monkeypatch):
    mode, options = JPEGS[kind]
    buffer = io.BytesIO()
    noise(61, 45).convert(mode).save(buffer, format="JPEG", **options)
    with Image.open(buffer) as image:
        wanted = np.array(image.convert("RGB" if channels == 3 else "L")).reshape(45, 61, channels)
    used = []
    decode_jpeg = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args: used.append(1) or decode_jpeg(*args))
    fast = decode(buffer.getvalue(), channels)
    assert bool(used) == (kind == "grey" or (channels == 3 and kind != "CMYK"))
    monkeypatch.setattr("datasets.transforms.decode.simplejpeg", None)
    assert np.array_equal(fast, wanted) and np.array_equal(decode(buffer.getvalue(), channels), wanted)


def test_exif_orientation_is_not_applied(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    noise(8, 4).save(tmp_path / "val" / "ant" / "00.JPEG", format="JPEG", exif=exif)
    assert load("imagefolder", tmp_path)[1].read(0).shape == (4, 8, 3)


def broken_file(kind: str) -> bytes:
    buffer = io.BytesIO()
    if kind == "bomb":
        Image.new("1", (10_000, 10_000)).save(buffer, format="PNG")  # of this size Pillow only warns
    else:
        noise(64, 64).save(buffer, format="JPEG")
    content = buffer.getvalue()
    return {"cut off": content[: len(content) // 2], "empty": b"", "text": b"<html>", "bomb": content}[kind]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("cut off", "OSError: image file is truncated"),
        ("empty", "UnidentifiedImageError"),
        ("text", "UnidentifiedImageError"),
        ("bomb", "DecompressionBombError"),
    ],
)
def test_a_broken_image_is_told_apart_from_other_errors(tmp_path, kind, reason):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    (tmp_path / "val" / "ant" / "00.JPEG").write_bytes(broken_file(kind))
    _, val = load("imagefolder", tmp_path)
    with pytest.raises(ImageReadError, match=reason):
        val.read(0)


def test_a_named_pipe_is_a_broken_image_and_no_reason_to_wait(tmp_path):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    os.mkfifo(tmp_path / "val" / "ant" / "pipe.jpg")
    _, val = load("imagefolder", tmp_path)
    with pytest.raises(ImageReadError, match="it is a pipe"):
        val.read(1)


def test_a_line_of_pixels_that_would_be_enlarged_to_gigabytes_cannot_be_read():
    with pytest.raises(ImageReadError, match="more than"):
        EvalTransform(Data())(np.zeros((1, 1_000_000, 3), np.uint8), torch.empty(3, 224, 224))


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    make_folders(tmp_path / "train", {"ant": 1})
    make_folders(tmp_path / "val", {"ant": 1})
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("train/ant"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert "train/ant" in error_of("imagefolder", tmp_path)


def test_bad_images_are_named_once_and_too_many_end_the_run(tmp_path):
    make_folders(tmp_path / "train", {"ant": 20})
    make_folders(tmp_path / "val", {"ant": 1})
    for number in range(3):
        (tmp_path / "train" / "ant" / f"{number:02d}.JPEG").write_bytes(b"")
    train, _ = load("imagefolder", tmp_path)
    lines = []
    bad_images = BadImages(train, 0.1, lines.append)
    bad_images.note([0, 1, 0])
    bad_images.note([1])
    assert len(lines) == 2 and train.name(1) in lines[1] and "UnidentifiedImageError" in lines[1]
    with pytest.raises(DataError) as caught:
        bad_images.note([2])
    for part in ("3 of 20 images", "DATA.MAX_BAD_FRACTION (0.1)", train.name(0), train.name(2)):
        assert part in str(caught.value)
    with pytest.raises(DataError, match="1 of 20"):
        BadImages(train, 0.0, lines.append).note([2])


# --- transforms ---


SIZES = [(500, 375), (375, 500), (40, 30), (224, 224), (333, 257), (9, 61), (300, 7)]


def torchvision_mode(name: str):
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(name)


def augmented(data: Data, image: Image.Image, seed: int) -> torch.Tensor:
    channels = len(image.getbands())
    out = torch.empty(data.IMAGE_SIZE, data.IMAGE_SIZE, channels, dtype=torch.uint8).permute(2, 0, 1)
    TrainTransform(data)(to_array(image, channels), random.Random(seed), out)
    return out


def assert_alike(got: torch.Tensor, wanted: torch.Tensor, interpolation: str) -> None:
    """Equal where Pillow resizes here too. torch's kernels take weights of 16 bits: a little noise, and no bias."""
    difference = got.float() - wanted.float()
    most = 0 if interpolation in ("nearest", "lanczos") else 3
    assert difference.abs().max() <= most and difference.abs().mean() < 0.3 and difference.mean().abs() < 0.05


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_training_images_are_torchvisions(interpolation):
    from torchvision.transforms import functional

    data = Data(INTERPOLATION=interpolation, IMAGE_SIZE=64)
    for seed, size in enumerate(SIZES):
        image, rng = noise(*size), random.Random(seed)
        left, top, width, height = crop_box(*size, (0.08, 1.0), (3 / 4, 4 / 3), rng)
        wanted = functional.resized_crop(image, top, left, height, width, [64, 64], torchvision_mode(interpolation))
        wanted = functional.hflip(wanted) if rng.random() < 0.5 else wanted
        assert_alike(augmented(data, image, seed), functional.pil_to_tensor(wanted), interpolation)


@pytest.mark.parametrize(("side", "crop_pct"), [(64, 0.875), (65, 0.9), (64, 1.0)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_evaluation_images_are_torchvisions(side, crop_pct, mode):
    from torchvision import transforms

    chain = transforms.Compose(
        [
            transforms.Resize(math.floor(side / crop_pct), torchvision_mode("bicubic")),
            transforms.CenterCrop(side),
            transforms.PILToTensor(),
        ]
    )
    transform = EvalTransform(Data(IMAGE_SIZE=side, CROP_PCT=crop_pct))
    for size in SIZES:
        image = noise(*size, mode)
        out = torch.empty(side, side, len(mode), dtype=torch.uint8).permute(2, 0, 1)
        transform(to_array(image, len(mode)), out)
        assert_alike(out, chain(image), "bicubic")


def test_crops_have_the_areas_and_shapes_that_were_asked_for():
    rng = random.Random(0)
    boxes = [crop_box(400, 300, (0.25, 0.5), (0.5, 2.0), rng) for _ in range(2000)]
    areas = np.array([width * height / 120_000 for _, _, width, height in boxes])
    logs = np.array([math.log(width / height) for _, _, width, height in boxes])
    assert 0.24 < areas.min() < 0.26 and 0.49 < areas.max() < 0.51
    assert abs(logs.mean()) < 0.05 and -0.71 < logs.min() < -0.66
    assert all(left >= 0 and top >= 0 and left + w <= 400 and top + h <= 300 for left, top, w, h in boxes)
    assert {left == 0 for left, _, _, _ in boxes} == {True, False}


def test_where_no_crop_fits_the_largest_in_the_centre_is_taken_as_in_torchvision():
    from torchvision.transforms import RandomResizedCrop

    for size in [(1000, 10), (10, 1000), (1, 1), (7, 300)]:
        top, left, height, width = RandomResizedCrop.get_params(noise(*size), [0.9, 1.0], [3 / 4, 4 / 3])
        assert crop_box(*size, (0.9, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (left, top, width, height)


def test_a_crop_is_the_same_in_every_version_of_python():
    assert crop_box(500, 375, (0.08, 1.0), (3 / 4, 4 / 3), random.Random(0)) == (29, 1, 432, 372)


def test_hflip_is_a_probability():
    image = noise(8, 8)
    for hflip, expected in ((0.0, {False}), (1.0, {True}), (0.5, {True, False})):
        data = Data(IMAGE_SIZE=8, CROP_SCALE=(1.0, 1.0), CROP_RATIO=(1.0, 1.0), HFLIP=hflip)
        plain = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        seen = {torch.equal(augmented(data, image, seed), plain.flip(2)) for seed in range(10)}
        assert seen == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normalize_equals_torchvisions(dtype):
    from torchvision.transforms import functional

    data = Data(IMAGENET_MEAN=(0.485, 0.456, 0.406), IMAGENET_STD=(0.229, 0.224, 0.225))
    images = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(torch.uint8)
    wanted = functional.normalize(images.double() / 255, data.IMAGENET_MEAN, data.IMAGENET_STD)
    got = Normalize(data, dtype)(images)
    assert got.dtype == dtype and not Normalize(data).state_dict()
    torch.testing.assert_close(got, wanted.to(dtype))


def test_mean_and_std_must_fit_the_channels():
    images = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
    torch.testing.assert_close(Normalize(Data(IMAGE_CHANNELS=1))(images), torch.ones(1, 1, 2, 2))
    with pytest.raises(ConfigError, match=r"DATA.IMAGENET_MEAN: 3 values .* DATA.IMAGE_CHANNELS is 1"):
        Normalize(Data(IMAGE_CHANNELS=1, IMAGENET_MEAN=(0.1, 0.2, 0.3)))
    with pytest.raises(ConfigError, match="DATA.CROP_SCALE"):
        TrainTransform(Data(CROP_SCALE=(1.0, 0.08)))
