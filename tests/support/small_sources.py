"""Small data sets of every kind that is read from files: each has 12 files in two classes, and one file is no image."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.support.image_sets import png, write_tar
from tests.support.parquet_files import write_parquet
from tests.support.torchvision_files import make_pets

COUNT, DAMAGED = 12, 5  # images of each data set, and the number of the image that cannot be read
CLASSES = ("bee, wild", "ant")
CONTENTS = [b"no image" if number == DAMAGED else png(number) for number in range(COUNT)]


def write_images(root: Path) -> list[str]:
    """Write the images into a folder for each class, and return their paths."""
    names = [f"{CLASSES[number % 2]}/ü {number}.png" for number in range(COUNT)]
    for name, content in zip(names, CONTENTS, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return names


def write_lists(root: Path) -> None:
    lines = [f"{name} {number % 2}\n" for number, name in enumerate(write_images(root))]
    (root / "train_list.txt").write_text("".join(lines[:8]), encoding="utf-8")
    (root / "val_list.txt").write_text("".join(lines[8:]), encoding="utf-8")


def write_csv(root: Path) -> None:
    rows = [f'"{name}","{name.partition("/")[0]}"\n' for name in write_images(root)]
    (root / "train.csv").write_text("image_path,target\n" + "".join(rows), encoding="utf-8")


def write_shards(root: Path) -> None:
    for part, numbers in (("train-0", range(4)), ("train-1", range(4, 8)), ("val-0", range(8, COUNT))):
        names = {number: os.fsdecode(b"caf\xe9 %d" % number) for number in numbers}  # a name from Windows, no UTF-8
        files = {f"{name}.cls": b"%d" % (number % 2) for number, name in names.items()}
        write_tar(root / f"{part}.tar", files | {f"{name}.png": CONTENTS[number] for number, name in names.items()})


def write_parquet_files(root: Path) -> None:
    for part, numbers in (("train", range(8)), ("validation", range(8, COUNT))):
        images = [{"bytes": CONTENTS[number], "path": f"{number}.png"} for number in numbers]
        labels = [number % 2 for number in numbers]
        write_parquet(root / f"{part}.parquet", {"image": images, "label": labels}, {"label": [*CLASSES]}, group=3)


def write_pets(root: Path) -> None:
    make_pets(root)
    (root / "oxford-iiit-pet/images/great_dane_2.jpg").write_bytes(b"no image")


MAKERS: dict[str, Callable[[Path], object]] = {
    "imagenet2012": write_lists,
    "imagefolder": write_images,
    "images": write_images,
    "csv": write_csv,
    "shards": write_shards,
    "parquet": write_parquet_files,
    "caltech101": lambda root: write_images(root / "101_ObjectCategories"),
    "caltech256": lambda root: write_images(root / "256_ObjectCategories"),
    "torchvision/NAME": write_pets,
}
