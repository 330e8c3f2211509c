"""Pictures of images and classes: confusion.png, mistakes.png, correct.png, train_batch.png."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from configs.schema import Config, Data
from datasets import Batch, ImageSet, Mixed, Normalize, build_preparation
from datasets.pixels.kinds import pixels_of
from datasets.pixels.rules import ImageReadError
from datasets.transforms.crop import EvalTransform
from engine.predict.pictures import Tile, contact_sheet, fitted, lettering, write_picture
from engine.tasks import find_task
from engine.tasks.class_tables import ClassResults, Names
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.errors import UserError, cause_of
from utils.log import Log
from utils.text import counted

# 36 is even, because neighboring images of a training batch are mixed in pairs.
NUM_SHOWN, NUM_CORRECT, NUM_THREADS, SIDE = 36, 12, 6, 150
FRAME = (255, 128, 0)  # the colour of the frame around the part of an image that the model sees


def calibrated(results: ClassResults, temperature: float | list[float] | None, process: Process) -> ClassResults:
    """Return the results with the probabilities that halfstep predict prints. Collective."""
    if not temperature or results.local.scores is None:
        return results
    return results.local.scaled(torch.tensor(temperature)).gather(process)


def draw_mistakes(results: ClassResults, image_set: ImageSet, data: Data) -> Image.Image:
    """Return a sheet of the most confident mistakes, the most confident first."""
    number, errors = results.errors(image_set.classes, NUM_SHOWN)
    return draw_sheet(errors, image_set, data, results.title_of_errors(number, len(errors)))


def draw_correct(results: ClassResults, image_set: ImageSet, data: Data) -> Image.Image:
    """Return a sheet of some images that are classified right, or of usual errors of numbers."""
    rows = results.right(image_set.classes, NUM_CORRECT)
    return draw_sheet(rows, image_set, data, "" if rows else "no image is without a mistake")


def draw_sheet(rows: Sequence[tuple[int, list[str]]], image_set: ImageSet, data: Data, title: str) -> Image.Image:
    """Return a sheet of images: (index, caption). Only these images are read, and equal ones are shown once."""
    seen = EvalTransform(data).seen
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # reading from a large file or a server is slow
        pixels = [*pool.map(functools.partial(small_copy, image_set, seen), [index for index, _ in rows])]
    equal: dict[object, list[Tile]] = {}
    for image, (index, caption) in zip(pixels, rows, strict=True):
        key = index if image is None else (image.shape, image.tobytes(), *caption)
        equal.setdefault(key, []).append(Tile(image, [*caption, image_set.table_name(index)]))
    tiles = []
    for first, *others in equal.values():
        number = [f"{1 + len(others)} equal images"] if others else []
        tiles.append(first._replace(caption=[*first.caption, *number]))
    return contact_sheet(tiles, side=SIDE, title=title)


def small_copy(image_set: ImageSet, seen: Callable[[int, int], tuple], index: int) -> np.ndarray | None:
    """Return a small copy of the image, or None if it cannot be read. 36 large photos would take a gigabyte.

    `seen`: the part of an image of this height and width that the model sees, which gets a frame.
    """
    try:
        image = image_set.pixels.shown(image_set.read(index))
    except (ImageReadError, UserError):
        return None
    small = fitted(image, SIDE)
    if (part := seen(*image.shape[:2])) != (0, 0, 1, 1):
        sides = (*small.size, *small.size)
        left, top, right, bottom = (round(share * side) for share, side in zip(part, sides, strict=True))
        ImageDraw.Draw(small).rectangle((left, top, right - 1, bottom - 1), outline=FRAME, width=2)
    return np.asarray(small)


MATRIX_SIDE, SMALLEST_MARK = 800, 3  # pixels: largest side of the matrix, smallest side of a mark
SMALLEST_CELL, LARGEST_CELL, ON_A_PHONE = 30, 48, 300  # pixels: bounds of a cell; side of a matrix that fits on a phone
MOST_WITH_COUNTS, NUM_NAMED = 40, 25  # with more than 40 classes: no counts, and about 25 names
NAMES_WIDTH, GAP = 130, 12
RIGHT, WRONG = (26, 114, 175), (214, 39, 40)  # colors of cells on and off the diagonal
WHITE_TEXT = 0.93  # darkness above which white text has more contrast than black text; either has at least 4.5


def draw_confusion(results: ClassResults, classes: Sequence[str]) -> Image.Image:
    """Draw the confusion matrix: rows are labels, columns predictions. Darker means a larger share of the row."""
    names = Names(classes)
    letters, shown = lettering(11), names.shown(results.counts)
    titles, has_counts = [names[number] for number in shown.tolist()], len(shown) <= MOST_WITH_COUNTS
    pitch = cell_size(len(shown), letters.width(str(results.counts[0].max(initial=0))))
    side = round(pitch * len(shown))
    step = 1 if has_counts else -(-len(shown) // NUM_NAMED)
    widest = max(map(letters.width, titles[::step]))
    is_upright = widest < step * pitch  # whether the names fit below the columns
    margin = GAP + round(min(NAMES_WIDTH, widest))
    below = GAP + letters.height if is_upright else margin
    left, top = GAP + margin, 2 * GAP + letters.height
    title = f"{counted(len(results.indices), 'validation image')}: rows are labels, columns predictions"
    width = max(left + side, GAP + round(letters.width(title))) + GAP
    picture = Image.new("RGB", (width, top + side + below + GAP), "white")
    draw = ImageDraw.Draw(picture)
    letters.draw(draw, (GAP, GAP), title)
    draw.rectangle((left - 1, top - 1, left + side, top + side), outline="grey")
    labels, predictions, counts = results.cells()
    darkness = 0.15 + 0.85 * counts / np.maximum(results.counts[0][labels], 1)
    rows, columns = (np.searchsorted(shown, each) for each in (labels, predictions))
    order = np.argsort(darkness, kind="stable")  # where cells overlap, the largest share is on top
    drawn = (each[order].tolist() for each in (rows, columns, counts, darkness))
    for row, column, count, dark in zip(*drawn, strict=True):
        x, y, size = left + column * pitch, top + row * pitch, max(pitch, SMALLEST_MARK)
        color = tuple(round(255 + dark * (each - 255)) for each in (RIGHT if row == column else WRONG))
        draw.rectangle((x, y, x + size - 1, y + size - 1), fill=color)
        if has_counts:
            middle = (x + pitch / 2, y + pitch / 2)
            letters.draw(draw, middle, str(count), "white" if dark > WHITE_TEXT else "black", anchor="mm")
    for number, title in enumerate(titles[::step]):
        text, middle = letters.fit(title, NAMES_WIDTH), number * step * pitch + pitch / 2
        letters.draw(draw, (left - 6, top + middle), text, anchor="rm")
        if is_upright:
            letters.draw(draw, (left + middle, top + side + 6), text, anchor="ma")
            continue
        turned = Image.new("RGB", (NAMES_WIDTH, letters.height), "white")
        letters.draw(ImageDraw.Draw(turned), (NAMES_WIDTH, letters.height / 2), text, anchor="rm")
        place = round(left + middle - letters.height / 2), top + side + 6
        picture.paste(turned.transpose(Image.Transpose.ROTATE_90), place)
    return picture


def cell_size(num_classes: int, width: float) -> float:
    """Return the side of a cell of the matrix in pixels. `width`: the width of the largest count."""
    smallest = max(SMALLEST_CELL, width + 6)
    return min(max(smallest, ON_A_PHONE / num_classes), LARGEST_CELL, MATRIX_SIDE / num_classes)


TRAIN_BATCH = "train_batch.png"


class TrainBatch(Callback):
    """Draws train_batch.png at the first report of a new run.

    The batch is prepared once more, on the host. So the device only copies some pixels, a compiled preparation gets no
    batch of another size, and the run's random generators are not used.
    """

    def __init__(self, config: Config, folder: Path, classes: list[str], log: Log):
        self._config, self._path, self._log = config, folder / TRAIN_BATCH, log
        self._names = Names(classes)
        self._batch: Batch | None = None
        self._is_taken = False

    def on_micro_batch(self, trainer: Trainer, batch: Batch, weight: float) -> None:
        if trainer.step == 0 and not self._is_taken:
            part = batch.parts(NUM_SHOWN)[0]
            # Copies: a device may reuse the memory of a batch once the update has read it.
            self._batch = part._replace(images=part.images.clone(), targets=part.targets.clone())
            self._is_taken = True

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        try:
            write_picture(self._draw(batch), self._path)
        except (OSError, Image.DecompressionBombError) as error:  # PIL also applies DATA.MAX_PIXELS to captions
            self._log.warn(f"cannot write {self._path} ({cause_of(error)}); training continues")

    def _draw(self, batch: Batch) -> Image.Image:
        pixels, targets = prepared(self._config, batch)
        captions = find_task(self._config).captions(targets, self._names)
        pairs = zip(pixels, captions, strict=True)
        tiles = [Tile(image.permute(1, 2, 0).numpy(), [caption]) for image, caption in pairs]
        title = f"images of the first update, as the model gets them{pixels_of(self._config.DATA).shown_as}"
        return contact_sheet(tiles, title=title)


def prepared(config: Config, batch: Batch) -> tuple[Sequence[Tensor], Tensor | Mixed]:
    """Return a training batch as the model gets it: images as uint8 [C, H, W] on the host, and targets."""
    batch = batch._replace(images=batch.images.cpu(), targets=batch.targets.cpu())
    normalize = Normalize(config.DATA)
    images, targets = build_preparation(config, normalize)(batch)
    return normalize.pixels(images), targets
