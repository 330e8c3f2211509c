"""-check reads every image and reports unreadable images, labels, classes, duplicates and sizes."""

import re
from dataclasses import replace

import numpy as np
from PIL import Image

from engine.check.images import FEW, ScanResult, check_counts, check_images
from engine.quick_checks import OK, WARN, WRONG
from tests.runs.engine.check.small_photos import sets_of, trouble
from tests.support.image_sets import noise
from tests.support.refusals import assert_names

BROKEN = b"no picture"


def found_in(photos, *options, most: int | None = None, data_set="imagefolder") -> dict[str, tuple[str, str]]:
    """Return the rows of -check about images. `most`: as -check_images."""
    config, *sets = sets_of(photos, *options, data_set=data_set)
    findings = check_images(replace(config, CHECK_IMAGES=most), *sets)
    return {each.title: (each.verdict, each.text) for each in findings}


def test_check_warns_or_fails_by_fraction_of_unreadable_images(check, photos):
    (photos / "train/dog/1.png").write_bytes(BROKEN)
    found = check()
    assert trouble(found) == {"training images": WARN}
    assert str(photos / "train/dog/1.png") in found["training images"][1]
    assert trouble(found_in(photos, "DATA.MAX_BAD_FRACTION=0")) == {"training images": WRONG}
    for path in (photos / "train").rglob("*.png"):
        path.write_bytes(BROKEN)
    found = found_in(photos, "DATA.MAX_BAD_FRACTION=1")
    verdict, text = found["training images"]
    assert verdict == WRONG and text.count("\n") == 10 and "2 more" in text
    assert not re.search(r"\d", found["training sizes"][1])


def test_few_images_that_check_reads_are_judged_by_their_own_number(photos):
    for path in (photos / "train").rglob("*.png"):
        path.write_bytes(BROKEN)
    assert found_in(photos, "DATA.MAX_BAD_FRACTION=0.4", most=4)["training images"][0] == WRONG


def test_image_with_too_many_pixels_counts_as_unreadable(photos):
    assert "12 of 12 " in found_in(photos, "DATA.MAX_PIXELS=100")["training images"][1]


def test_validation_duplicates_of_training_images_are_listed(photos):
    Image.open(photos / "train/cat/4.png").save(photos / "val/cat/again.bmp")  # different bytes, but the same pixels
    for path in (photos / "train/dog/0.png", photos / "val/dog/0.png"):
        path.write_bytes(BROKEN)  # unreadable images are no duplicates
    verdict, text = found_in(photos, "DATA.MAX_BAD_FRACTION=0.5")["duplicates"]
    assert verdict == WARN and "1 of 7" in text and text.count(" = ") == 1
    assert f"{photos / 'val/cat/again.bmp'} = {photos / 'train/cat/4.png'}" in text


def test_check_proposes_the_shape_of_most_images_with_the_flags(photos):
    assert "shape" not in found_in(photos)
    for path in (photos / "train").rglob("*.png"):
        noise(88, 22).save(path)
    findings = {each.title: each for each in check_images(*sets_of(photos, "DATA.CROP_PCT=1"))}
    assert findings["shape"].verdict == WARN
    assert_names(findings["shape"].text, "100% of the images are wide", "4 times", "cuts off 75%")
    assert_names(findings["shape"].remedy, "-image_size 4x16")
    assert "cuts off" not in found_in(photos, "DATA.CROP_MODE=squash")["shape"][1]
    assert "shape" not in found_in(photos, "DATA.IMAGE_SIZE=4x16")
    for path in (photos / "train/cat").rglob("*.png"):
        Image.open(path).rotate(90, expand=True).save(path)  # as many tall ones as wide ones
    assert "shape" not in found_in(photos)


def test_same_image_in_two_classes_is_reported(photos):
    cat, dog = photos / "train/cat/4.png", photos / "train/dog/copy.png"
    dog.write_bytes(cat.read_bytes())
    verdict, text = found_in(photos)["duplicates"]
    assert verdict == WARN and text.count(" = ") == 1
    assert_names(text, f"{cat} (cat) = {dog} (dog)")
    (photos / "val/dog/copy.png").write_bytes(cat.read_bytes())
    verdict, text = found_in(photos)["duplicates"]
    assert_names(text, f"{photos / 'val/dog/copy.png'} = {cat}", f"{cat} (cat) = {dog} (dog)")
    (photos / "train/cat/again.png").write_bytes(cat.read_bytes())
    text = found_in(photos)["duplicates"][1]
    assert text.count(f"{dog} (dog)") == 1, "copies in one class are no contradiction"
    assert "training images with the pixels of another training image: 2" in text
    (photos / "val/cat/copy.png").write_bytes(cat.read_bytes())
    config, _, val = sets_of(photos)
    found = {finding.title: finding for finding in check_images(config, None, val)}
    assert_names(found["duplicates"].text, photos / "val/cat/copy.png", photos / "val/dog/copy.png")


def test_near_copies_in_both_parts_are_duplicates(photos):
    patches = noise(8, 6).resize((120, 90), Image.Resampling.BICUBIC)
    patches.save(photos / "train/cat/0.png")
    patches.save(photos / "val/dog/small.jpg", quality=60)
    verdict, text = found_in(photos)["duplicates"]
    assert verdict == WARN and text.count(" ~ ") == 2
    assert "1 pair of training and validation images that look the same" in text
    assert "also a training image" not in text, "near copies are not counted as equal"
    assert_names(text, f"{photos / 'val/dog/small.jpg'} ~ {photos / 'train/cat/0.png'}", "in two classes")


def test_each_kind_of_copies_has_a_line_that_says_what_to_do(photos):
    """Equal and similar pixels, in both parts and in two classes."""
    for part, name in (("train", "cat"), ("val", "cat"), ("train", "dog")):
        (photos / part / name / "equal.png").write_bytes((photos / "train/cat/0.png").read_bytes())
    patches = noise(8, 6).resize((120, 90), Image.Resampling.BICUBIC)
    patches.save(photos / "train/cat/1.png")
    patches.save(photos / "val/dog/small.jpg", quality=60)
    lines = found_in(photos)["duplicates"][1].split("\n")
    kinds = [number for number, line in enumerate(lines) if line.endswith(":")]
    blocks = [lines[start:end] for start, end in zip(kinds, [*kinds[1:], len(lines)], strict=True)]
    part, one_class = "remove them from one of the two sets", "keep only one class for each of them"
    signs, remedies = ["=", "=", "~", "~"], [part, one_class, part, one_class]
    for block, sign, remedy in zip(blocks, signs, remedies, strict=True):
        (arrow,) = (line for line in block if line.startswith("-> ") and "labels.csv" not in line)
        assert f" {sign} " in block[1] and remedy in arrow and ("look at them" in arrow) == (sign == "~")


def test_sampled_image_check_states_the_sample_size(photos):
    for number in range(6, 100):
        noise(12, 10 + number).save(photos / "train/dog" / f"{number}.png")
    (photos / "train/dog/0.png").write_bytes(BROKEN)
    found = found_in(photos, most=4)
    assert found["training images"] == (OK, "4 of 106 read, all readable")
    assert [ScanResult(sets_of(photos)[1], 4).index(number) for number in range(4)] == [0, 26, 53, 79]
    (photos / "train/cat/0.png").write_bytes((photos / "val/cat/0.png").read_bytes())
    verdict, text = found_in(photos, most=4)["duplicates"]
    assert verdict == WARN and f"{photos / 'val/cat/0.png'} = {photos / 'train/cat/0.png'}" in text
    (photos / "train/cat/0.png").write_bytes(BROKEN)
    verdict, text = found_in(photos, "DATA.MAX_BAD_FRACTION=0", most=1)["training images"]
    assert verdict == WRONG and str(photos / "train/cat/0.png") in text and "1 of 1 read (100.00%)" in text


def test_number_of_images_is_no_warning_if_enough_of_them_are_for_validation(photos):
    config, train, val = sets_of(photos)
    found = check_counts(config, "90 training images", train, val.take(np.zeros(FEW, np.int64)))
    assert (found.title, found.text, found.verdict) == ("data", "90 training images", OK)
