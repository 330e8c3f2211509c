"""Pictures of predictions: sheets of thumbnails, and for each image a map of what its class was recognised by."""

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.inference.classifier import Classifier
from engine.inference.gradients import GradientMaps
from engine.inference.predictor import Guess, Look, Prediction
from engine.inference.rollout import Rollout
from utils.contact_sheet import Tile, contact_sheet, fitted
from utils.errors import ConfigError, DataError, cause_of
from utils.files import replacing

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
