"""Computes the features of the photos of a folder, or of any set of images, with any weights, for commands."""

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from datasets import BadImages, ImageSet
from datasets.build import choose_workers, make_loader
from datasets.loading.readers import Buffers, EvalReader
from datasets.order import Piece
from datasets.pixels import Pixels
from datasets.pixels.kinds import pixels_of
from datasets.pixels.rules import ImageReadError
from datasets.sources.folder import images_among, images_for_any_model
from datasets.sources.images import unlabelled_files
from engine.confidence.stored import watch
from engine.infer import PlacingInference
from engine.predict.classifier import Classifier
from engine.predict.output import THUMBNAIL
from engine.predict.pictures import fitted
from engine.predict.predictor import FEW
from models.features import features_of, width_of
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import shown


class Photos(Sequence):
    """The photos in a folder and its subfolders."""

    def __init__(self, folder: Path, paths: list[str]):
        """`paths` are relative to the folder."""
        self.folder, self.paths = folder, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        """Return the path of a photo as halfstep predict prints it."""
        return os.path.normpath(os.path.join(self.folder, self.paths[index]))

    def for_model(self, pixels: Pixels, report: Callable[[str], None]) -> "Photos":
        """Return the photos that a model with these pixels takes."""
        return Photos(self.folder, images_among(self.paths, pixels, report))

    def images(self, pixels: Pixels) -> ImageSet:
        """Return the photos as an image set without classes."""
        return unlabelled_files(self.paths, pixels, self.folder)


def find_photos(flag: str, folder: Path, report: Callable[[str], None]) -> Photos:
    """Return all photos in a folder and its subfolders in natural order: 2.jpg before 10.jpg.

    `flag` names the argument in error messages. `report` prints which files were left out.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{flag}: {folder} {problem}; name a folder of images")
    return Photos(folder, images_for_any_model(folder, report))


class Table(NamedTuple):
    """The features of the readable images of a set, in the order of the images."""

    indices: np.ndarray  # int64 [n], indices of the images in their set
    sizes: np.ndarray  # int32 [n, 2], width and height of the images as they are displayed
    features: np.ndarray  # float32 [n, D]
    logits: np.ndarray  # float32 [n, classes], divided by the temperature of the classifier; [n, 0] if not asked for
    # float32 [n], how well images fit the validation images; NaN if not asked for, or if there are no statistics
    known: np.ndarray


class SizedReader(EvalReader):
    """A reader whose targets are the width and height of each image."""

    def allocate(self, piece: Piece, pinned: bool = False) -> Buffers:
        buffers = super().allocate(piece, pinned)
        return buffers._replace(targets=torch.zeros((len(piece.indices), 2), dtype=torch.int64, pin_memory=pinned))

    def put_target(self, index: int, image: np.ndarray, target: Tensor) -> None:
        height, width = image.shape[:2]
        target.copy_(torch.tensor([width, height]))


class Embedder:
    """A model that returns features, on the device of this process, in the precision of the classifier's settings."""

    def __init__(self, trained: Classifier, device: str, say: Callable[[str], None], with_logits: bool = False):
        """Move the model to the device. `say` logs messages about unreadable images."""
        self.num_logits = len(trained.classes) if with_logits else 0
        self.process = Process.alone(device)
        self.trained, self.say, self.config = trained, say, trained.config
        data = self.config.DATA
        self.pixels, self.batch_size = pixels_of(data), data.BATCH_SIZE_EVAL or data.BATCH_SIZE
        try:
            self.width = width_of(trained.model, data.IMAGE_CHANNELS, data.shape)
        except ConfigError as error:
            raise ConfigError(f"{trained.source}: {error}") from None
        self.inference = PlacingInference.of(self.config, self.process)
        self.model = self.inference.place(trained.model)
        self._known = watch(self.model, trained.calibration, trained.source) if with_logits else None

    def facts(self) -> dict[str, Any]:
        """Return everything that the features depend on, apart from the images, as plain values for a JSON file."""
        known = self.trained.facts()
        model = {name: known["model"][name] for name in ("weights", "key", "architecture", "epoch")}
        return {
            "model": model | {"features": self.width},
            "preprocessing": known["preprocessing"],
            "precision": self.inference.precision.name,
            "device": self.process.device.type,
            "batch_size": self.batch_size,
        }

    def __call__(self, images: ImageSet) -> Table:
        """Return the features of the readable images."""
        config = self.config
        if len(images) <= FEW:
            config = config.changed("DATA", NUM_WORKERS=0)
        bad_images = BadImages(images, max_fraction=1.0, say=self.say)
        workers = choose_workers(config, images, self.process)
        load = make_loader(SizedReader(images, config), workers, self.process.device)
        starts = range(self.batch_size, len(images), self.batch_size)
        pieces = [Piece(0, indices, len(indices)) for indices in np.split(np.arange(len(images)), starts)]
        rows = []
        with contextlib.closing(load(iter(pieces))) as batches:
            for batch in shown(batches, "features", len(images), size=lambda batch: len(batch.piece.indices)):
                bad_images.note(batch.bad)
                features = np.empty((0, self.width), np.float32)
                logits, known = np.empty((0, self.num_logits), np.float32), np.empty(0, np.float32)
                if batch.num_samples:
                    features, logits, known = self._features(batch.images)
                rows.append((batch.indices, batch.targets.cpu().numpy().astype(np.int32), features, logits, known))
        return Table(*map(np.concatenate, zip(*rows, strict=True)))

    @torch.no_grad()
    def _features(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the features, the logits, and how well the images fit the validation images."""

        def compute(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
            features, logits = features_of(model, images, self.num_logits > 0)
            return features, features[:, :0] if logits is None else logits

        inputs = self.inference.inputs(self.model, pixels)
        features, logits = self.inference.outputs(self.model, inputs, self.trained.source, compute)
        known = self._known() if self._known else features.new_full((len(features),), math.nan)
        if self.num_logits:
            logits = logits / (self.trained.temperature or 1)
        return features.cpu().numpy(), logits.cpu().numpy(), known.cpu().numpy()


def normalized(features: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1. A row of zeros stays zero, so its similarity to everything is 0."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths == 0, 1, lengths)


def thumbnail(images: ImageSet, index: int) -> np.ndarray | None:
    """Return a small copy of an image, or None if it cannot be read."""
    try:
        return np.asarray(fitted(images.pixels.shown(images.read(index)), THUMBNAIL))
    except ImageReadError:
        return None
