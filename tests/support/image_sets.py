"""Data sets of a few images, each identified by its shade: folders and tar shards."""

import io
import tarfile
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from configs.schema import Config
from datasets.image_set import ImageReadError, ImageSet, Table
from datasets.pixels import Pixels
from datasets.sources.arrays import ArrayStorage
from datasets.sources.images import FileStorage
from datasets.split import divide
from datasets.types import SavedData
from tests.support.configs import replaced
from tests.support.opened import open_sets
from utils.errors import DataError

RGB = Pixels(3)


def settings(dataset: str, path: Path | str = "", evaluate: bool = False, num_classes: int | None = None, **data):
    config = replaced(Config(EVAL=evaluate), DATA={"DATASET": dataset, "DATA_PATH": str(path), **data})
    return replaced(config, MODEL={"NUM_CLASSES": num_classes})


def load(*arguments, **options):
    return open_sets(settings(*arguments, **options))


def divided_by(images: Table, record: dict, saved: SavedData | None = None) -> tuple[Table, Table]:
    """Return the training and the validation images, held out as the record says."""
    return divide(images, record, saved).tables(images)


def error_of(*arguments, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(*arguments, **options)
    return str(caught.value)


def files_with(
    root: Path | str,
    paths: Sequence[str],
    targets: Sequence[int] | np.ndarray,
    classes: list[str],
    pixels: Pixels = RGB,
    **facts: object,
) -> ImageSet:
    """Return images in files, which need not exist."""
    return ImageSet(FileStorage(Path(root), paths), np.asarray(targets), classes, pixels=pixels, **facts)


def targets_only(targets: Sequence[int] | np.ndarray, classes: list[str], **facts: object) -> ImageSet:
    """Return images without files."""
    return files_with("/", [f"{number}.png" for number in range(len(targets))], targets, classes, **facts)


def arrays_with(images: np.ndarray, targets: np.ndarray, classes: list[str], pixels: Pixels, title: str) -> ImageSet:
    """Return images in memory."""
    return ImageSet(ArrayStorage(images, title), targets, classes, pixels=pixels)


def break_images(images: ImageSet, rows: Collection[int]) -> None:
    """Let the images in these rows be unreadable."""
    read = images.storage.read

    def read_or_fail(row: int, pixels: Pixels) -> np.ndarray:
        if row in rows:
            raise ImageReadError("broken")
        return read(row, pixels)

    images.storage.read = read_or_fail


def draw(path: Path, shade: int = 0, size: tuple[int, int] = (6, 5)) -> None:
    """Draw an image of one shade, which identifies it. It is saved losslessly, whatever the file's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, 0, 0)).save(path, format="PNG")


def draw_patches(path: Path, seed: int, size: tuple[int, int] = (32, 32)) -> None:
    """Draw large patches of colour that are different for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    patches = np.random.default_rng(seed).integers(256, size=(4, 5, 3), dtype=np.uint8)
    Image.fromarray(patches).resize(size, Image.Resampling.BICUBIC).save(path)


def make_list(root: Path, count: int, num_days: int = 7) -> Path:
    """Draw this many ants and bees, and list them in a.csv. Their column `day` is their number modulo `num_days`."""
    make_folders(root, {"ant": count, "bee": count})
    rows = [f"{name}/{n:02d}.JPEG,{name},{n % num_days}" for name in ("ant", "bee") for n in range(count)]
    (root / "a.csv").write_text("\n".join(["image_path,target,day", *rows, ""]))
    return root / "a.csv"


def keys_of(image_set) -> list[str]:
    return [image_set.key(index) for index in range(len(image_set))]


def shades(image_set) -> list[int]:
    return [int(image_set.read(index)[0, 0, 0]) for index in range(len(image_set))]


def make_folders(root: Path, counts: dict[str, int], shade: int = 0) -> None:
    for name, count in counts.items():
        for number in range(count):
            draw(root / name / f"{number:02d}.JPEG", shade)
            shade += 1


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (6, 5), (shade, 0, 0)).save(content, "PNG")
    return content.getvalue()


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(first: int, count: int, num_classes: int = 3) -> dict[str, bytes]:
    """Return the files of `count` samples. The shade of each image is the number of its sample."""
    files = {}
    for number in range(first, first + count):
        files |= {f"{number:04d}.cls": str(number % num_classes).encode(), f"{number:04d}.png": png(number)}
    return files


def make_set(root: Path, num_shards: int = 3, count: int = 10) -> None:
    for shard in range(num_shards):
        write_tar(root / f"train-{shard:06d}.tar", samples(shard * count, count))
    write_tar(root / "val-000000.tar", samples(200, 6))


SHADES = {"bird": 20, "cat": 120, "dog": 220, "zebra": 70}


def draw_photos(folder: Path, *classes: str, count: int = 6) -> Path:
    """Draw more images of these classes. Each class has its own shade, which a model learns quickly."""
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        first = len(list((folder / name).iterdir()))
        for number in range(first, first + count):
            pixels = rng.integers(30, size=(8, 8, 3)) + SHADES[name]
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder
