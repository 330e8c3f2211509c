"""-check reads every image: what cannot be read, labels, classes, duplicates and sizes."""

import re

from PIL import Image

from datasets import CacheProgress, cache_image_sets, load_image_sets
from engine.check.images import (
    ScanResult,
    check_cache,
    check_classes,
    check_duplicates,
    check_images,
    check_readable,
    check_sizes,
    scan_images,
)
from engine.check.quick_checks import OK, WARN, WRONG, Finding
from tests.data_zoo.files import animation, grey_16_bits, photo
from tests.engine.check.small_photos import sets_of, trouble
from tests.support.configs import replaced, small_config
from tests.support.image_sets import noise
from tests.support.refusals import assert_names, refused
from utils.errors import DataError


def scanned(image_set, most: int | None = None) -> ScanResult:
    scan = ScanResult(image_set, most)
    scan_images(scan, "")
    return scan


def test_unreadable_images_are_named_and_weighed(check, photos):
    (photos / "train/dog/1.png").write_bytes(b"no picture")
    found = check()
    assert trouble(found) == {"training images": WARN}
    assert str(photos / "train/dog/1.png") in found["training images"][1]
    assert trouble(check("-opts", "DATA.MAX_BAD_FRACTION=0")) == {"training images": WRONG}


def test_of_many_unreadable_images_ten_are_named(photos):
    for path in (photos / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    config, train, _ = sets_of(photos)
    scan = scanned(train)
    finding = check_readable("training", scan, 1.0)
    assert finding.found.count("\n") == 10 and "2 more" in finding.found and finding.verdict == WRONG
    assert not re.search(r"\d", check_sizes("training", scan, config).found), "the size of no image"


def test_an_image_with_too_many_pixels_counts_as_unreadable(photos):
    config, train, _ = sets_of(photos, "DATA.MAX_PIXELS=100")
    assert len(scanned(train).reasons) == len(train)


def test_a_label_out_of_range_is_told_with_its_line(check, photos):
    for part in ("train", "val"):
        (photos / f"{part}_list.txt").write_text(f"{part}/cat/0.png 0\n{part}/dog/0.png 7\n")
    found = check("-dataset", "imagenet2012", "-num_classes", "2")
    assert trouble(found) == {"data": WRONG}
    assert_names(found["data"][1], "train_list.txt", "line 2")


def test_a_link_out_of_the_listed_folder_is_told(check, photos, tmp_path):
    (photos / "train/cat/0.png").rename(tmp_path / "elsewhere.png")
    (photos / "train/cat/0.png").symlink_to(tmp_path / "elsewhere.png")
    for part in ("train", "val"):
        (photos / f"{part}.csv").write_text(f"image_path,target\n{part}/cat/0.png,0\n{part}/cat/1.png,1\n")
    with refused(DataError, photos / "train/cat/0.png"):
        list(check_images(*sets_of(photos, data_set="csv")))


def test_classes_without_images_and_uneven_ones(photos):
    (photos / "train_list.txt").write_text("".join(f"train/cat/{n}.png 0\n" for n in range(6)) + "train/dog/0.png 2\n")
    (photos / "val_list.txt").write_text("val/cat/0.png 0\n")
    finding = check_classes(*sets_of(photos, data_set="imagenet2012"))
    assert finding.verdict == WARN and "without training images: 1" in finding.found
    assert "without validation images: 2" in finding.found and "uneven" not in finding.found
    (photos / "train_list.txt").write_text("train/cat/0.png 0\n" * 11 + "train/dog/0.png 1\n")
    finding = check_classes(*sets_of(photos, data_set="imagenet2012"))
    assert finding.verdict == OK and "1 to 11" in finding.found and "uneven: 0 " in finding.found


def test_validation_images_that_are_trained_on_are_named_by_pairs(check, photos):
    Image.open(photos / "train/cat/4.png").save(photos / "val/cat/again.bmp")  # other bytes, the same pixels
    for path in (photos / "train/dog/0.png", photos / "val/dog/0.png"):
        path.write_bytes(b"no picture")  # which are not the same image
    found = check("-opts", "DATA.MAX_BAD_FRACTION=0.5")
    assert found["duplicates"][0] == WARN and "1 of 7" in found["duplicates"][1]
    assert f"{photos / 'val/cat/again.bmp'} = {photos / 'train/cat/4.png'}" in found["duplicates"][1]
    scan = scanned(sets_of(photos)[1])
    assert check_duplicates(scan, scan).found.count(" = ") == 10


def test_image_sizes_and_how_many_are_too_small(photos):
    Image.new("RGB", (40, 30)).save(photos / "train/cat/large.png")
    config, train, _ = sets_of(photos)
    scan = scanned(train)
    told = check_sizes("training", scan, replaced(config, DATA={"IMAGE_SIZE": 11})).found
    assert_names(told, "12 x 10", "median 12 x 10", "40 x 30", "92.3%", "DATA.IMAGE_SIZE 11")
    assert "DATA.IMAGE_SIZE" not in check_sizes("training", scan, replaced(config, DATA={"IMAGE_SIZE": 10})).found


def test_unusual_files_are_counted_by_kind(check, photos):
    found = check()
    assert "kinds of files" not in found
    for name, content in (("6.jpg", photo("JPEG", 6)), ("16.png", grey_16_bits("PNG")), ("a.gif", animation("GIF"))):
        for part in ("train", "val"):
            (photos / part / "cat" / name).write_bytes(content)
    for name, mode in (("float.tif", "F"), ("print.tif", "CMYK")):
        noise(12, 10).convert("L" if mode == "F" else mode).convert(mode).save(photos / "train/dog" / name)
    flags = ["-opts", "DATA.MAX_BAD_FRACTION=0.5"]
    verdict, told = check(*flags)["kinds of files"]
    assert verdict == OK
    counts = {part.split(" ", 1)[1]: int(part.split(" ", 1)[0]) for part in told.split(", ") if part[0].isdigit()}
    assert counts == {
        "EXIF-rotated (applied)": 2,
        "16-bit": 2,
        "transparent": 2,
        "animated or of several pages": 2,
        "32-bit (refused)": 1,
        "CMYK": 1,
    }
    assert "EXIF-rotated (ignored)" in check(*flags, "DATA.EXIF=ignore")["kinds of files"][1]


def test_of_a_sample_each_row_says_so(check, photos):
    for number in range(6, 100):
        noise(12, 10 + number).save(photos / "train/dog" / f"{number}.png")
    (photos / "train/dog/0.png").write_bytes(b"no picture")
    found = check("-check_images", "4")
    assert found["training images"] == (OK, "4 of 106 read, all readable")
    assert_names(found["training sizes"][1], "4 of 106")
    assert_names(found["validation sizes"][1], "4 of 6")
    assert_names(found["duplicates"][1], "4 validation", "4 training")
    assert [ScanResult(sets_of(photos)[1], 4).index(number) for number in range(4)] == [0, 26, 53, 79]
    (photos / "train/cat/0.png").write_bytes((photos / "val/cat/0.png").read_bytes())
    found = check("-check_images", "4")["duplicates"]
    assert found[0] == WARN and f"{photos / 'val/cat/0.png'} = {photos / 'train/cat/0.png'}" in found[1]
    (photos / "train/cat/0.png").write_bytes(b"no picture")
    verdict, told = check("-check_images", "1", "-opts", "DATA.MAX_BAD_FRACTION=0")["training images"]
    assert verdict == WRONG and str(photos / "train/cat/0.png") in told and "1 of 1 read (100.00%)" in told
    for number in (27, 51, 75):
        (photos / "train/dog" / f"{number}.png").write_bytes(b"no picture")
    assert check("-check_images", "4", "-opts", "DATA.MAX_BAD_FRACTION=0.05")["training images"][0] == WRONG
    whole = check("-check_images", "1000", "-opts", "DATA.MAX_BAD_FRACTION=1")
    assert "5 of 106 (4.72%)" in whole["training images"][1] and whole["validation images"][1] == "6, all readable"


def test_a_cache_is_there_will_be_made_or_cannot_be(photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    config, *sets = sets_of(photos, "DATA.CACHE=disk", f"DATA.CACHE_PATH={folder}")

    def check(given=config, sets=sets) -> Finding:
        return check_cache(given, dict(zip(("training", "validation"), sets, strict=True)))

    found = check()
    assert found.verdict == OK and not folder.exists()
    assert "training images: about 1 MiB will be written to" in found.found and "iB are free" in found.found
    monkeypatch.setattr("engine.check.images.free_bytes", lambda place: 100)
    found = check()
    assert found.verdict == WARN and "DATA.CACHE=256" in found.remedy
    cache_image_sets(config, sets, CacheProgress(print, print))
    found = check()
    assert found.verdict == OK and f"training images: 1 MiB in {folder}" in found.found and "will be" not in found.found
    (index,) = folder.glob("*training*.index")
    index.write_bytes(b"")
    found = check()
    assert str(index) in found.found and "training images: about" in found.found
    (tmp_path / "file").write_text("")
    found = check(replaced(config, DATA={"CACHE_PATH": f"{tmp_path}/file/cache"}))
    assert found.verdict == WARN and "DATA.CACHE_PATH" in found.remedy
    digits = load_image_sets(small_config(tmp_path, "DATA.CACHE=disk"))
    assert "none of the training images, which are in memory already" in check(sets=digits).found
