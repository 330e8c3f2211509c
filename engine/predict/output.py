"""The output of predictions: lines on stdout, tables, and sheets of thumbnails."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from engine.predict.predictor import Guess, Look, Prediction
from utils.errors import DataError, cause_of
from utils.files import replacing
from utils.pictures import Tile, contact_sheet, fitted
from utils.program import nobody_reads
from utils.text import csv_cell, one_line

COLUMNS = ("image_path", "rank", "class", "probability")
SHEET_ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
PER_SHEET, THUMBNAIL, NUM_COLUMNS = 100, 150, 10


class Output:
    """Takes the predictions one by one, and writes tables at the end."""

    def __init__(self, paths: Sequence[str], *, is_first: bool, may_stop: bool, files: dict[str, Path | None]):
        """`may_stop`: end with BrokenPipeError once nobody reads stdout, as in `| head`, unless a file is to be written;
        `files`: those of csv, json and sheet, None for those that are not wanted.
        """
        self.paths, self.is_first, self.files = paths, is_first, files
        self._may_stop = may_stop and not any(files.values())
        self._predictions: list[Prediction] = []  # for the tables
        self._is_read = bytearray(len(paths))
        self._tiles: list[Tile] = []  # of the sheet that is not yet full
        self._num_sheets = 0
        self._bar = tqdm(total=len(paths), unit="image", file=sys.stderr, disable=None if is_first else True)

    @property
    def num_unreadable(self) -> int:
        return len(self.paths) - sum(self._is_read)

    def add(self, prediction: Prediction) -> None:
        self._is_read[prediction.index] = 1
        if not self.is_first:
            return
        self._print(prediction)
        self._bar.update()
        if self.files["sheet"]:
            caption = [*describe(prediction.guesses[:1]), Path(prediction.path).name]
            self._tiles.append(Tile(prediction.picture, caption))
            if len(self._tiles) == PER_SHEET:
                self._write_sheet()
        if self.files["csv"] or self.files["json"]:
            self._predictions.append(prediction._replace(picture=None))

    def close(self, facts: dict[str, Any]) -> None:
        """`facts`: the model and its preprocessing, for the JSON document."""
        self._bar.close()
        if not self.is_first:
            return
        if self._tiles:
            self._write_sheet()
        if self.files["csv"]:
            write(self.files["csv"], as_csv(self._predictions).encode(errors="surrogateescape"))
        if self.files["json"]:
            unreadable = [path for path, is_read in zip(self.paths, self._is_read, strict=True) if not is_read]
            images = [as_json(each) for each in self._predictions]
            text = json.dumps(facts | {"images": images, "unreadable": unreadable}, indent=1)
            write(self.files["json"], f"{text}\n".encode())

    def _print(self, prediction: Prediction) -> None:
        guesses = [f"{one_line(each.name)}\t{each.probability:.4f}" for each in prediction.guesses]
        line = "\t".join([one_line(prediction.path), *guesses])
        try:
            # Above the bar, where stdout is the terminal too.
            print(line) if self._bar.disable or not sys.stdout.isatty() else self._bar.write(line)
        except BrokenPipeError:
            if self._may_stop or not nobody_reads():
                raise

    def _write_sheet(self) -> None:
        self._num_sheets += 1
        write_picture(
            contact_sheet(self._tiles, NUM_COLUMNS, THUMBNAIL), sheet_path(self.files["sheet"], self._num_sheets)
        )
        self._tiles = []


def sheet_path(path: Path, number: int) -> Path:
    """The second sheet is NAME-2.png."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def sheet_paths(path: Path, num_images: int) -> list[Path]:
    """The sheets that so many images need."""
    return [sheet_path(path, number) for number in range(1, -(-num_images // PER_SHEET) + 1)]


def as_csv(predictions: Sequence[Prediction]) -> str:
    lines = io.StringIO()
    rows = [
        (csv_cell(each.path), rank, csv_cell(guess.name), f"{guess.probability:.6f}")
        for each in predictions
        for rank, guess in enumerate(each.guesses, start=1)
    ]
    csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *rows])
    return lines.getvalue()


def as_json(prediction: Prediction) -> dict[str, Any]:
    guesses = [
        {"class": each.name, "number": each.number, "probability": round(each.probability, 6)}
        for each in prediction.guesses
    ]
    return {"image_path": prediction.path, "predictions": guesses}


def describe(guesses: Sequence[Guess]) -> list[str]:
    return [f"{guess.name} {guess.probability:.2f}" for guess in guesses[:3]] or ["no class above 0.5"]


def as_pictures(pixels: Tensor) -> np.ndarray:
    """uint8 [B, C, H, W] -> [B, H, W, C]"""
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


def thumbnails(batch: Look) -> list[np.ndarray]:
    return [np.asarray(fitted(pixels, THUMBNAIL)) for pixels in as_pictures(batch.pixels)]


def write_picture(image: Image.Image, path: Path) -> None:
    encoded = io.BytesIO()
    image.save(encoded, SHEET_ENDINGS[path.suffix.lower()], compress_level=4)
    write(path, encoded.getvalue())


def write(path: Path, content: bytes) -> None:
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {cause_of(error)}") from None
