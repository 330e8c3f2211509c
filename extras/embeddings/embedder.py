"""Computes the features of images with one model, prepared as in the evaluation of its run."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datasets import BadImages, Normalize
from datasets.loading.readers import Buffers, EvalReader
from datasets.loading.workers import choose_workers, make_loader
from datasets.order import Piece
from datasets.sources.images import FileImages
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageReadError
from engine.evaluation.not_finite import refuse_not_finite
from engine.precision.policy import Precision, set_matmul
from engine.predict.classifier import Classifier
from engine.predict.predictor import FEW
from models.features import features_of, widths_of
from models.transforms import choose_transforms
from utils.distributed import Process
from utils.errors import ConfigError


class Embedded(NamedTuple):
    """The features of the readable images of one batch."""

    indices: np.ndarray  # int64 [n], indices of the images in their set
    sizes: np.ndarray  # int32 [n, 2], width and height of the images as they are displayed
    features: np.ndarray  # float32 [n, D]
    num_images: int  # number of images in the batch, including unreadable ones


class SizedReader(EvalReader):
    """A reader whose targets are the index, width and height of each image."""

    def allocate(self, piece: Piece, pinned: bool = False) -> Buffers:
        buffers = super().allocate(piece, pinned)
        return buffers._replace(targets=torch.zeros((len(piece.indices), 3), dtype=torch.int64, pin_memory=pinned))

    def fill(self, piece: Piece, positions: range, buffers: Buffers) -> list[int]:
        bad: list[int] = []
        for position in positions:
            index = int(piece.indices[position])
            try:
                image = self.image_set.read(index)
                self.transform(image, buffers.images[position])
                height, width = image.shape[:2]
                buffers.targets[position] = torch.tensor([index, width, height])
            except ImageReadError:
                bad.append(index)
        return bad


class Embedder:
    """A model that returns features, on the device of this process, in the precision in which its run was evaluated."""

    def __init__(self, trained: Classifier, process: Process, say: Callable[[str], None]):
        """Move the model to the device. `say` logs messages about unreadable images."""
        self.trained, self.process, self.say, self.config = trained, process, say, trained.config
        data = self.config.DATA
        if data.TOKENS:
            raise ConfigError(
                f"{trained.source}: embed.py does not support models with DATA.TOKENS ({data.TOKENS}); name a model "
                "that takes square images"
            )
        self.rules, self.batch_size = PixelRules.of(data), data.BATCH_SIZE_EVAL or data.BATCH_SIZE
        try:
            self.width = widths_of(trained.model, data.IMAGE_CHANNELS, data.IMAGE_SIZE).pooled
        except ConfigError as error:
            raise ConfigError(f"{trained.source}: {error}") from None
        self.precision = Precision(self.config, process.device)
        set_matmul(self.config.PRECISION.MATMUL)
        self.transforms = choose_transforms(self.config, process.device, self.precision.half)
        self.transforms.apply(trained.model)
        self.model = self.precision.computing(trained.model.to(process.device)).eval()
        self.normalize = Normalize(data).to(process.device)

    def facts(self) -> dict[str, Any]:
        """Return everything that the features depend on, apart from the images, as plain values for a JSON file."""
        known = self.trained.facts()
        model = {name: known["model"][name] for name in ("weights", "key", "architecture", "epoch")}
        return {
            "model": model | {"features": self.width},
            "preprocessing": known["preprocessing"],
            "precision": self.precision.name,
            "device": self.process.device.type,
            "batch_size": self.batch_size,
        }

    def __call__(self, images: FileImages) -> Iterator[Embedded]:
        """Yield the features of the images in batches."""
        config = self.config
        if len(images) <= FEW:
            config = replace(config, DATA=replace(config.DATA, NUM_WORKERS=0))
        bad_images = BadImages(images, max_fraction=1.0, say=self.say)
        workers = choose_workers(config, images, self.process)
        load = make_loader(SizedReader(images, config), workers, self.process.device)
        starts = range(self.batch_size, len(images), self.batch_size)
        pieces = [Piece(0, indices, len(indices)) for indices in np.split(np.arange(len(images)), starts)]
        with contextlib.closing(load(iter(pieces))) as batches:
            for piece, batch in zip(pieces, batches, strict=True):
                bad_images.note(batch.bad)
                targets = batch.targets.cpu().numpy()
                sizes, features = targets[:, 1:].astype(np.int32), np.empty((0, self.width), np.float32)
                if batch.num_samples:
                    features = self._features(batch.images.to(self.process.device))
                yield Embedded(targets[:, 0], sizes, features, len(piece.indices))

    @torch.no_grad()
    def _features(self, pixels: Tensor) -> np.ndarray:
        images = self.normalize(pixels, self.precision.input_dtype(self.model))

        def forward() -> Tensor:
            with self.precision.autocast():
                return features_of(self.model, images).pooled

        features = forward().float()
        if not features.isfinite().all():
            refuse_not_finite(self.trained.source, self.model, self.transforms, forward)
        return features.cpu().numpy()
