"""Images with numbers: handwritten digits with their value and their ink, and tables of any numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from configs.schema import Config
from datasets import ImageSet, PriorFacts
from datasets.sources.arrays import BRIGHTEST, DIGITS
from datasets.targets.numbers import NumberTargets
from datasets.types import NO_PRIOR_FACTS
from tests.support.configs import replaced
from tests.support.image_sets import draw, files_with, settings

COLUMNS = ("digit", "ink")
NUM_DRAWN = 10  # a list looks up only its first files


def write_digits(folder: Path, count: int, missing: Sequence[int] = ()) -> tuple[Path, np.ndarray]:
    """Write a CSV file with this many digits, their values and their ink. Return it and the numbers [N, 2].

    Ink is the mean brightness. `missing`: the digits whose cell of ink is empty, which have NaN in the result.
    """
    with np.load(DIGITS) as content:
        images, digits = content["images"][:count], content["targets"][:count]
    images = (images * (255 // BRIGHTEST)).astype(np.uint8)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    numbers = np.stack((digits, images.mean((1, 2))), axis=1).astype(np.float64)
    numbers[list(missing), 1] = np.nan
    rows = [
        f"{number}.png,{digit:g},{'' if ink != ink else ink}" for number, (digit, ink) in enumerate(numbers.tolist())
    ]
    (folder / "digits.csv").write_text("\n".join([f"path,{','.join(COLUMNS)}", *rows]) + "\n")
    return folder / "digits.csv", numbers


def write_rows(file: Path, cells: Sequence[str], header: str = "path,age", prefix: str = "") -> Path:
    """Write a table with an image for each row of cells, and the first of these images. Return the table."""
    rows = [f"{prefix}{number}.png,{row}" for number, row in enumerate(cells)]
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    for number in range(min(len(rows), NUM_DRAWN)):
        draw(file.parent / f"{prefix}{number}.png")
    return file


def number_settings(file: Path | str = "", evaluate: bool = False, **data) -> Config:
    """Return the settings of a model that learns the numbers of this table."""
    config = settings("csv", file, evaluate, **{"COLUMNS": ("path", "*")} | data)
    return replaced(config, TRAIN={"OBJECTIVE": "numbers", "LOSS": "smooth_l1", "BEST_METRIC": "mae"})


def images_with(values: np.ndarray) -> ImageSet:
    """Return images 0.png, 1.png and so on, whose files do not exist, with these numbers [N] or [N, outputs]."""
    values = values.reshape(len(values), -1)
    names = [f"number {output}" for output in range(values.shape[1])]
    files = [f"{number}.png" for number in range(len(values))]
    return files_with("/", files, np.arange(len(values)), names, meaning=NumberTargets(values))


def standardize(
    config: Config, train: ImageSet | None, val: ImageSet, prior: PriorFacts = NO_PRIOR_FACTS
) -> tuple[Config, ImageSet | None, ImageSet]:
    """Return the settings and images with the measurements of the training images."""
    settings, train, val = val.meaning.settle(config, prior, train, val)
    return replaced(config, DATA={each.name.removeprefix("DATA."): each.value for each in settings}), train, val


def numbers_of(images: ImageSet) -> np.ndarray:
    """Return the numbers of each image: float64 [N, outputs]."""
    return images.meaning.values[images.targets]
