"""Data sets as users have them. Each function, or the function it returns, makes one and returns its DATA_PATH."""

import unicodedata
from pathlib import Path

from tests.support.image_sets import draw, make_folders, samples, write_tar

NAMES = ["ant", "bee", "cat"]
UNICODE = ["käfer", "mücke", "🐈"]


def parts(*folders: str, names: list[str] = NAMES, count: int = 2):
    """Make folders for train and val with a folder for each class."""

    def make(root: Path) -> Path:
        for number, folder in enumerate(folders):
            make_folders(root / folder, dict.fromkeys(names, count), shade=20 * number)
        return root

    return make


def flat(*names: str):
    """Make a folder for each class, without train and val."""
    return parts("", names=list(names or NAMES), count=12)


def one_level_too_deep(root: Path) -> Path:
    return flat()(root) / "ant"


def unpacked_twice(root: Path) -> Path:
    flat()(root / "photos" / "photos")
    draw(root / "photos" / "__MACOSX" / "photos" / "._00.JPEG")
    return root / "photos"


def unpacked_into_itself(root: Path) -> Path:
    return parts("", root.name, count=12)(root)


def with_system_folders(root: Path) -> Path:
    draw(root / "__MACOSX" / "._00.JPEG")
    return flat(*NAMES, "ant/@eaDir")(root)


def linked(root: Path) -> Path:
    flat()(root / "photos")
    make_folders(root / "elsewhere", {"more": 5, "whole": 12})
    (root / "photos" / "ant" / "more").symlink_to(root / "elsewhere" / "more")
    (root / "elsewhere" / "more" / "round").symlink_to(root / "photos" / "ant")
    (root / "photos" / "bee" / "again").symlink_to(root / "elsewhere" / "more")
    make_folders(root / "photos", {"bee/deep": 1})
    (root / "photos" / "cat" / "inside").symlink_to(root / "photos" / "bee" / "deep")
    (root / "photos" / "dog").symlink_to(root / "elsewhere" / "whole")
    return root / "photos"


def linked_class_twice(root: Path) -> Path:
    flat()(root)
    (root / "kitty").symlink_to(root / "cat")
    return root


def linked_validation(root: Path) -> Path:
    parts("train")(root)
    (root / "val").symlink_to(root / "train")
    return root


def decomposed_in_val(root: Path) -> Path:
    parts("train", names=UNICODE)(root)
    return parts("val", names=[unicodedata.normalize("NFD", name) for name in UNICODE])(root)


def unread_endings(root: Path) -> Path:
    flat()(root)
    for number in range(10):
        (root / "ant" / f"{number}.CR2").write_bytes(b"x")
    (root / "bee" / "labels").write_text("x")
    (root / "bee" / "labels.txt").write_text("x")
    draw(root / "stray.png")
    return root


def only_unread_endings(root: Path) -> Path:
    flat()(root)
    (root / "dog").mkdir()
    (root / "dog" / "0.CR2").write_bytes(b"x")
    return root


def of_csv(text: str, encoding: str = "utf-8", header: str = "image_path,target\n"):
    """Make images/0.png ... and a CSV file with these lines."""

    def make(root: Path) -> Path:
        for number in range(24):
            draw(root / "images" / f"{number}.png", number)
        (root / "all.csv").write_bytes((header + text).encode(encoding))
        return root / "all.csv"

    return make


def csv_lines(classes: list[str], separator: str = ",") -> str:
    return "".join(f"images/{number}.png{separator}{classes[number % len(classes)]}\n" for number in range(24))


def csv_parts(*names: str, overlap: int = 0):
    """Make files with 12 and 6 images; `overlap` images of the second are also in the first."""

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
