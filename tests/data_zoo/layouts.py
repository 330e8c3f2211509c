"""Data sets as people have them on their disks: each function makes one in a folder and returns its DATA_PATH."""

import unicodedata
from pathlib import Path

from tests.support.image_sets import draw, make_folders, samples, write_tar

NAMES = ["ant", "bee", "cat"]


def make_parts(root: Path, *parts: str, names: list[str] = NAMES, count: int = 2) -> Path:
    for number, part in enumerate(parts):
        make_folders(root / part, dict.fromkeys(names, count), shade=20 * number)
    return root


def make_flat(root: Path, names: list[str] = NAMES) -> Path:
    return make_parts(root, "", names=names, count=12)


def roboflow(root: Path) -> Path:
    return make_parts(root, "train", "valid", "test")


def capitals(root: Path) -> Path:
    return make_parts(root, "Train", "Val")


def training_and_dev(root: Path) -> Path:
    return make_parts(root, "training", "dev", "eval")


def only_test(root: Path) -> Path:
    return make_parts(root, "train", "test")


def unpacked_twice(root: Path) -> Path:
    make_flat(root / "photos" / "photos")
    (root / "photos" / "__MACOSX" / "photos").mkdir(parents=True)
    (root / "photos" / "__MACOSX" / "photos" / "._00.JPEG").write_bytes(b"x")
    return root / "photos"


def unpacked_into_itself(root: Path) -> Path:
    make_flat(root)
    return make_flat(root / root.name).parent


def wrapped_parts(root: Path) -> Path:
    return make_parts(root / "download" / "v2", "train/train", "val").parent.parent


def one_class(root: Path) -> Path:
    return make_flat(root, ["ant"])


def one_level_too_deep(root: Path) -> Path:
    return make_flat(root) / "ant"


def thumbnails(root: Path) -> Path:
    make_flat(root, [*NAMES, "thumbnails"])
    (root / "__MACOSX").mkdir()
    (root / "__MACOSX" / "._00.JPEG").write_bytes(b"x")
    return make_flat(root, ["ant/@eaDir"])


def linked(root: Path) -> Path:
    make_flat(root / "photos")
    make_folders(root / "elsewhere", {"more": 5, "whole": 12})
    (root / "photos" / "ant" / "more").symlink_to(root / "elsewhere" / "more")
    (root / "elsewhere" / "more" / "round").symlink_to(root / "photos" / "ant")
    (root / "photos" / "bee" / "again").symlink_to(root / "elsewhere" / "more")
    make_folders(root / "photos", {"bee/deep": 1})
    (root / "photos" / "cat" / "inside").symlink_to(root / "photos" / "bee" / "deep")
    (root / "photos" / "dog").symlink_to(root / "elsewhere" / "whole")
    return root / "photos"


def linked_class_twice(root: Path) -> Path:
    make_flat(root)
    (root / "kitty").symlink_to(root / "cat")
    return root


def linked_validation(root: Path) -> Path:
    make_parts(root, "train")
    (root / "val").symlink_to(root / "train")
    return root


def linked_validation_class(root: Path) -> Path:
    make_parts(root, "train", "val", names=["ant", "bee"])
    (root / "train" / "cat").symlink_to(root / "val" / "bee")
    (root / "val" / "cat").symlink_to(root / "val" / "bee")
    return root


def numbers(root: Path) -> Path:
    return make_flat(root, ["0", "1", "2", "10"])


def spaces(root: Path) -> Path:
    return make_flat(root, ["my ant", "your  bee", " cat"])


def composed(root: Path) -> Path:
    return make_parts(root, "train", "val", names=["käfer", "mücke", "🐈"])


def decomposed_in_val(root: Path) -> Path:
    make_parts(root, "train", names=["käfer", "mücke", "🐈"])
    return make_parts(root, "val", names=[unicodedata.normalize("NFD", name) for name in ["käfer", "mücke", "🐈"]])


def composed_and_decomposed(root: Path) -> Path:
    return make_flat(root, [unicodedata.normalize(form, "käfer") for form in ("NFC", "NFD")] + ["mücke"])


def unread_endings(root: Path) -> Path:
    make_flat(root)
    for number in range(10):
        (root / "ant" / f"{number}.CR2").write_bytes(b"x")
    (root / "bee" / "labels.txt").write_text("x")
    draw(root / "stray.png")
    return root


def only_unread_endings(root: Path) -> Path:
    make_flat(root)
    (root / "dog").mkdir()
    (root / "dog" / "0.CR2").write_bytes(b"x")
    return root


def no_class_folders(root: Path) -> Path:
    draw(root / "1.png")
    return root


def of_csv(text: str, encoding: str = "utf-8", header: str = "image_path,target\n", name: str = "all.csv"):
    """A function that makes images/0.png ... and a CSV file, in which a line NUMBER,CLASS names one."""

    def make(root: Path) -> Path:
        for number in range(24):
            draw(root / "images" / f"{number}.png", number)
        (root / name).write_bytes((header + text).encode(encoding))
        return root / name

    return make


def csv_lines(classes: list[str], separator: str = ",") -> str:
    return "".join(f"images/{number}.png{separator}{classes[number % len(classes)]}\n" for number in range(24))


def csv_parts(*names: str, overlap: int = 0):
    """Files of 12 and 6 images each, of which `overlap` in the second are of the first."""

    def make(root: Path) -> Path:
        of_csv("")(root)
        rows = csv_lines(["ant", "bee"]).splitlines(keepends=True)
        for number, name in enumerate(names):
            first = 12 * number - (overlap if number else 0)
            (root / name).write_text("image_path,target\n" + "".join(rows[first : first + 12]))
        (root / "all.csv").unlink()
        return root

    return make


def tars(*names: str):
    def make(root: Path) -> Path:
        for number, name in enumerate(names):
            write_tar(root / name, samples(30 * number, 30))
        return root

    return make
