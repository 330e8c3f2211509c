"""What becomes of predictions: lines on stdout, tables, sheets of thumbnails, and a map for each image."""

import copy
import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from engine.predict.classifier import Classifier
from engine.predict.maps import GradientMaps, Rollout
from engine.predict.predictor import Guess, Look, Prediction
from utils.errors import ConfigError, DataError, cause_of
from utils.files import replacing, write_text
from utils.pictures import Tile, contact_sheet, fitted
from utils.program import nobody_reads


class Output:
    """Takes the predictions one by one, and writes tables at the end."""

    def __init__(self, paths: Sequence[str], *, is_first: bool, may_stop: bool, files: dict[str, Path | None]):
        """`may_stop`: end with BrokenPipeError once nobody reads stdout, as in `| head`, unless a file is to be written;
        `files`: those of csv, json and sheet, None for those that are not wanted.
        """
        self.paths, self.is_first, self.files = paths, is_first, files
        self.sheet = Sheet(files["sheet"]) if files["sheet"] and is_first else None
        self._keeps = is_first and bool(files["csv"] or files["json"])
        self._may_stop = may_stop and not any(files.values())
        self._kept: list[Prediction] = []
        self._is_read = bytearray(len(paths))
        self._bar = tqdm(
            total=len(paths), unit="image", file=sys.stderr, disable=not (is_first and sys.stderr.isatty())
        )

    @property
    def num_unreadable(self) -> int:
        return len(self.paths) - sum(self._is_read)

    def add(self, prediction: Prediction) -> None:
        self._is_read[prediction.index] = 1
        if not self.is_first:
            return
        self._print(prediction)
        self._bar.update()
        if self.sheet:
            self.sheet.add(prediction)
        if self._keeps:
            self._kept.append(prediction._replace(picture=None))

    def close(self, facts: dict[str, Any]) -> None:
        """`facts`: the model and its preprocessing, for the JSON document."""
        self._bar.close()
        if self.sheet:
            self.sheet.close()
        if self._keeps and self.files["csv"]:
            write_table(self.files["csv"], as_csv(self._kept))
        if self._keeps and self.files["json"]:
            unreadable = [path for path, is_read in zip(self.paths, self._is_read, strict=True) if not is_read]
            write_table(self.files["json"], as_json(self._kept, facts, unreadable))

    def _print(self, prediction: Prediction) -> None:
        line = "\t".join([prediction.path, *(f"{each.name}\t{each.probability:.4f}" for each in prediction.guesses)])
        try:
            # Above the bar, where stdout is the terminal too.
            print(line) if self._bar.disable or not sys.stdout.isatty() else self._bar.write(line)
        except BrokenPipeError:
            if self._may_stop or not nobody_reads():
                raise


COLUMNS = ("image_path", "rank", "class", "probability")


def as_csv(predictions: Sequence[Prediction]) -> str:
    lines = io.StringIO()
    rows = [
        (each.path, rank, guess.name, f"{guess.probability:.6f}")
        for each in predictions
        for rank, guess in enumerate(each.guesses, start=1)
    ]
    csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *rows])
    return lines.getvalue()


def as_json(predictions: Sequence[Prediction], facts: dict[str, Any], unreadable: Sequence[str]) -> str:
    """`facts`: the model and its preprocessing; `unreadable`: paths of images that have no prediction."""
    images = [
        {
            "image_path": each.path,
            "predictions": [
                {"class": guess.name, "number": guess.number, "probability": round(guess.probability, 6)}
                for guess in each.guesses
            ],
        }
        for each in predictions
    ]
    return json.dumps(facts | {"images": images, "unreadable": list(unreadable)}, indent=1) + "\n"


def write_table(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {cause_of(error)}") from None


SHEET_ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
PER_SHEET, THUMBNAIL, NUM_COLUMNS = 100, 150, 10
MAP_SIDE = 320  # pixels of each picture beside a map
MAP_SHARE = 0.5  # of the map's colours over the photo


class Maps(NamedTuple):
    """Which kind of maps there is of a model, where they are written, and the name of each image's."""

    source: Rollout | GradientMaps
    folder: Path
    names: list[str]

    @classmethod
    def of(cls, classifier: Classifier, device: torch.device, folder: Path, paths: Sequence[str]) -> "Maps":
        """Attention rollout of a plain Vision Transformer, maps by gradients of others; before transforms change the model."""
        model, data = copy.deepcopy(classifier.model).float().to(device), classifier.config.DATA
        blank = torch.zeros(1, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE, device=device)
        source = Rollout.of(model, blank) or GradientMaps.of(model, blank)
        if source is None:
            raise ConfigError(
                f"-attention: {classifier.config.MODEL.NAME} has neither attention from each token to all others nor a map of "
                f"features with more than one place in images of {data.IMAGE_SIZE}; leave it out"
            )
        return cls(source, folder, map_names(paths))

    def write(self, batch: Look) -> None:
        """A picture for each image of a batch: what the model saw, the map over it, and the classes."""
        for index, pixels, values, guesses in zip(
            batch.indices,
            as_pictures(batch.pixels),
            self.source(batch.inputs, batch.best).cpu().numpy(),
            batch.guesses,
            strict=True,
        ):
            photo = fitted(pixels, MAP_SIDE)
            tiles = [
                Tile(np.asarray(photo), caption(guesses)),
                Tile(np.asarray(overlaid(photo, values)), [self.source.title]),
            ]
            write_picture(contact_sheet(tiles, num_columns=2, side=MAP_SIDE), self.folder / self.names[index])


def map_names(paths: Sequence[str]) -> list[str]:
    """photo.png for each photo.*, photo-2.png for the second of that name."""
    names, taken = [], set()
    for path in paths:
        stem, number = Path(path).stem, 1
        name = f"{stem}.png"
        while name in taken:
            number += 1
            name = f"{stem}-{number}.png"
        taken.add(name)
        names.append(name)
    return names


def as_pictures(pixels: Tensor) -> np.ndarray:
    """uint8 [B, C, H, W] -> [B, H, W, C]"""
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


def thumbnails(batch: Look) -> list[np.ndarray]:
    return [np.asarray(fitted(pixels, THUMBNAIL)) for pixels in as_pictures(batch.pixels)]


def caption(guesses: Sequence[Guess]) -> list[str]:
    return [f"{guess.name} {guess.probability:.2f}" for guess in guesses[:3]] or ["no class above 0.5"]


def overlaid(photo: Image.Image, values: np.ndarray) -> Image.Image:
    """The photo below a map of any size: blue where its value is lowest, red where it is highest."""
    import matplotlib

    span = float(values.max() - values.min())
    heat = (values - values.min()) / (span or 1.0)
    heat = Image.fromarray(heat.astype(np.float32)).resize(photo.size, Image.Resampling.BILINEAR)
    colours = matplotlib.colormaps["turbo"](np.asarray(heat), bytes=True)[..., :3]
    return Image.blend(photo, Image.fromarray(np.ascontiguousarray(colours)), MAP_SHARE)


class Sheet:
    """Sheets of up to PER_SHEET thumbnails with their classes; the second is NAME-2.png."""

    def __init__(self, path: Path):
        self.path, self._tiles, self._number = path, [], 0

    def paths(self, num_images: int) -> list[Path]:
        """Of all sheets that so many images need."""
        return [self._path(number) for number in range(1, -(-num_images // PER_SHEET) + 1)]

    def add(self, prediction: Prediction) -> None:
        name = Path(prediction.path).name
        self._tiles.append(Tile(prediction.picture, [*caption(prediction.guesses[:1]), name]))
        if len(self._tiles) == PER_SHEET:
            self.close()

    def close(self) -> None:
        """Write the sheet that is not yet full."""
        if self._tiles:
            self._number += 1
            write_picture(contact_sheet(self._tiles, NUM_COLUMNS, THUMBNAIL), self._path(self._number))
            self._tiles = []

    def _path(self, number: int) -> Path:
        return self.path if number == 1 else self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")


def write_picture(image: Image.Image, path: Path) -> None:
    encoded = io.BytesIO()
    image.save(encoded, SHEET_ENDINGS[path.suffix.lower()], compress_level=4)
    try:
        with replacing(path) as file:
            file.write(encoded.getbuffer())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {cause_of(error)}") from None
