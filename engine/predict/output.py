"""The output of predictions: lines on stdout, tables, sheets of thumbnails, and a folder of images for each class."""

import filecmp
import itertools
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from engine.predict.guesses import Guess, Measure
from engine.predict.output_paths import MARK, PER_SHEET, Outputs, numbered
from engine.predict.pictures import Tile, contact_sheet, encoded, fitted
from engine.predict.predictor import PredictedBatch, Prediction
from utils.errors import DataError, cause_of
from utils.files import replacing
from utils.program import nobody_reads
from utils.text import csv_cell, csv_text, one_line

UNSURE, UNKNOWN = "unsure", "unknown"
THUMBNAIL, NUM_COLUMNS = 150, 10


class Mark(NamedTuple):
    """The mark of images whose most probable class has a probability below the threshold.

    With UNKNOWN, images that do not fit the validation images have this mark too.
    """

    word: str
    threshold: float

    def reasons(self, prediction: Prediction) -> tuple[bool, bool]:
        """Return whether the probability is too low, and whether the image does not fit the validation images."""
        is_strange = self.word == UNKNOWN and prediction.known is not None and prediction.known < 0
        return prediction.guesses[0].probability < self.threshold, is_strange


class Output:
    """Prints predictions one by one, and writes tables at the end."""

    def __init__(
        self,
        paths: Sequence[str],
        files: Outputs,
        classes: Sequence[str],
        is_first: bool,
        may_stop: bool,
        mark: Mark | None = None,
    ):
        """Prepare the output.

        With `may_stop`, BrokenPipeError is raised once nobody reads stdout, as in `| head`, unless a file is wanted.
        """
        self.paths, self.is_first, self._files, self._mark = paths, is_first, files, mark
        self.num_marked: Counter[tuple[bool, bool]] = Counter()  # by the reasons of the mark
        self._folders = ClassFolders(files.into, classes) if files.into else None
        self._may_stop = may_stop and not any((files.csv, files.json, files.sheet, files.into))
        self._predictions: list[Prediction] = []  # for the tables
        self._is_read = bytearray(len(paths))
        self._tiles: list[Tile] = []  # tiles of the current sheet
        self._sheets = numbered(files.sheet.stem, files.sheet.suffix) if files.sheet else None
        self._bar = tqdm(total=len(paths), unit="image", file=sys.stderr, disable=None if is_first else True)

    @property
    def num_read(self) -> int:
        return sum(self._is_read)

    @property
    def num_unreadable(self) -> int:
        return len(self.paths) - self.num_read

    def add(self, prediction: Prediction) -> None:
        self._is_read[prediction.index] = 1
        if not self.is_first:
            return
        if self._mark and prediction.guesses and any(reasons := self._mark.reasons(prediction)):
            prediction = prediction._replace(mark=self._mark.word)
            self.num_marked[reasons] += 1
        self._print(prediction)
        self._bar.update()
        if self._folders:
            self._folders.add(prediction.path, prediction.mark or prediction.guesses[0].name)
        if self._files.sheet:
            answer = filter(None, [prediction.mark, *describe(prediction.guesses[:1])])
            caption = [": ".join(answer), Path(prediction.path).name]
            self._tiles.append(Tile(prediction.picture, caption))
            if len(self._tiles) == PER_SHEET:
                self._write_sheet()
        if self._files.csv or self._files.json:
            self._predictions.append(prediction._replace(picture=None))

    def close(self, facts: dict[str, Any]) -> None:
        """Write the last sheet and the tables. The JSON file has these `facts` about the model."""
        self._bar.close()
        if self._tiles:
            self._write_sheet()
        if self._files.csv:
            table = as_csv(self._predictions, self._mark.word if self._mark else "")
            # The BOM makes Excel read the file as UTF-8.
            write(self._files.csv, table.encode("utf-8-sig", errors="surrogateescape"))
        if self._files.json:
            unreadable = [path for path, is_read in zip(self.paths, self._is_read, strict=True) if not is_read]
            images = [as_json(each) for each in self._predictions]
            text = json.dumps(facts | {"images": images, "unreadable": unreadable}, indent=1, ensure_ascii=False)
            write(self._files.json, f"{text}\n".encode(errors="backslashreplace"))  # file names may not be valid text

    def _print(self, prediction: Prediction) -> None:
        guesses = (each.line for each in prediction.guesses)
        line = "\t".join([one_line(prediction.path), *guesses, *filter(None, [prediction.mark])])
        try:
            # If stdout is also a terminal, print the line above the progress bar.
            print(line) if self._bar.disable or not sys.stdout.isatty() else self._bar.write(line)
        except BrokenPipeError:
            if self._may_stop or not nobody_reads():
                raise

    def _write_sheet(self) -> None:
        sheet = contact_sheet(self._tiles, NUM_COLUMNS, THUMBNAIL)
        write_picture(sheet, self._files.sheet.with_name(next(self._sheets)))
        self._tiles = []


class ClassFolders:
    """Copies each image to the folder of its class. Existing files are never replaced, and links are not followed."""

    def __init__(self, folder: Path, classes: Sequence[str]):
        self._folder, self._names, self._numbers = folder, safe_names([*classes, UNSURE, UNKNOWN]), Counter()

    def add(self, path: str, name: str) -> None:
        """Copy an image to the folder of class `name`, unless the folder already has a copy of it."""
        folder, source = self._folder / self._names[name], Path(path)
        self._numbers[folder / source.name] += 1
        copy_into(folder, source, self._numbers[folder / source.name])


def copy_into(folder: Path, source: Path, first: int = 1) -> None:
    """Copy a file to a folder under the first free name, unless the folder already has a copy of it.

    `first`: the number of the first name that is tried, see `numbered`.
    """
    try:
        if folder.is_symlink():
            raise OSError("the folder is a link")
        folder.mkdir(exist_ok=True)
        names = numbered(source.stem, source.suffix, first)
        copy = next(copy for copy in map(folder.joinpath, names) if not is_taken(copy, source))
        if not copy.exists():
            with open(source, "rb") as read, replacing(copy) as written:
                shutil.copyfileobj(read, written)
    except OSError as error:
        raise DataError(f"-into: {source} cannot be copied to {folder} ({cause_of(error)})") from None


def is_taken(copy: Path, source: Path) -> bool:
    """Return whether the path `copy` is a link, or exists with other content than the source."""
    return copy.is_symlink() or (copy.exists() and not filecmp.cmp(source, copy, shallow=False))


def safe_names(classes: Sequence[str]) -> dict[str, str]:
    """Return {class: folder name} without special characters. The names differ even if case is ignored."""
    names, taken = {}, set()
    for title in dict.fromkeys(classes):
        stem = re.sub(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]', "_", title)[:80].strip(" .") or "_"
        names[title] = next(name for name in numbered(stem) if name.casefold() not in taken)
        taken.add(names[title].casefold())
    return names


def as_csv(predictions: Sequence[Prediction], mark: str) -> str:
    """Return a CSV table with a row for each image, some columns for each guess, and one for the mark."""
    guesses = [prediction.guesses for prediction in predictions]
    titles = next(itertools.chain.from_iterable(guesses), Guess).titles(guesses)
    rows = [["image_path", *titles, *filter(None, [mark])]]
    for prediction in predictions:
        cells = [cell for guess in prediction.guesses for cell in guess.cells]
        cells += [""] * (len(titles) - len(cells))
        rows.append([csv_cell(prediction.path), *cells, *([prediction.mark] if mark else [])])
    return csv_text(rows)


def as_json(prediction: Prediction) -> dict[str, Any]:
    known = {} if prediction.known is None else {"known": round(prediction.known, 4)}
    return (
        {"image_path": prediction.path, "predictions": [each.record for each in prediction.guesses]}
        | known
        | ({prediction.mark: True} if prediction.mark else {})
    )


def describe(guesses: Sequence[Guess] | Sequence[Measure]) -> list[str]:
    return [each.caption for each in guesses[:3]] or ["no class above 0.5"]


def thumbnails(batch: PredictedBatch) -> list[np.ndarray]:
    return [np.asarray(fitted(pixels, THUMBNAIL)) for pixels in batch.pictures]


def write_picture(image: Image.Image, path: Path) -> None:
    write(path, encoded(image, path.suffix.lower(), MARK))


def write(path: Path, content: bytes) -> None:
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {cause_of(error)}") from None
