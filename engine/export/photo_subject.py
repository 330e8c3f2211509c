"""A model that is exported with its preprocessing, and the comparison of its graph with the model on photos."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from configs.schema import Config
from datasets.image_set import ImageSet
from datasets.pixels.rules import ImageReadError
from engine.confidence.known import LIKE_ROUNDING, MOST_MOVED
from engine.confidence.stored import watch
from engine.confidence.unknown import ROUNDING, find_answered
from engine.export.files import WrongExport
from engine.export.photo import Photo, PhotoClassifier, refuse_unsupported
from engine.export.subject import Calibrated, Subject
from engine.tasks import find_task
from engine.tasks.classes import ClassTask
from utils.errors import ConfigError
from utils.text import counted

MOST_CHANGED = 1e-3  # limit for the share of photos with another answer
SHARE = 0.95  # the share of right answers above the threshold, as with `halfstep predict -unknown 0.95`
MOST_PHOTOS = 2000  # maximum number of validation images to compare


class Difference(NamedTuple):
    """The differences between the results of a graph and of the original model for one photo."""

    probability: float  # the largest difference of a probability, or of a number in standard deviations
    is_other_answer: bool  # whether the answers differ and are not a near tie
    is_other_sign: bool  # whether the sign of `known` differs by more than rounding explains


@dataclass(frozen=True)
class PhotoSubject(Subject):
    """A model to export with its preprocessing, and the validation images that check the graph."""

    photos: ImageSet  # decoded by `read`
    runtime: Path | None  # an installed onnxruntime-web, whose files a page copies

    def __post_init__(self):
        super().__post_init__()
        refuse_unsupported(self.config.DATA)

    @cached_property
    def task(self) -> ClassTask:
        return find_task(self.config)

    @cached_property
    def preparation(self) -> Photo:
        return photo_of(self.config)(self.config.DATA)

    @property
    def dimensions(self) -> dict[int, Dim]:
        return self.preparation.dimensions

    @cached_property
    def known(self) -> Callable[[], Tensor] | None:
        """Return a function that returns how well the newest batch fits the validation images. None: no statistics."""
        return watch(self.model, self.calibration, self.saved.path)

    @property
    def names(self) -> tuple[str, ...]:
        return ("photo", self.task.answers_are, *(["known"] if self.known else []))

    @cached_property
    def graph(self) -> PhotoClassifier:
        model = Calibrated(self.model, self.temperature or 1.0)
        return PhotoClassifier(model, self.config, self.preparation, self.known).eval()

    @property
    def threshold(self) -> float:
        """Return the probability below which a photo is unknown: SHARE of the answers above are right. 0: not known."""
        curve = self.calibration.get("curve")
        if not curve:
            return 0.0
        point, _ = find_answered(curve, SHARE)
        return point.confidence - ROUNDING if point else 1.0

    @property
    def facts(self) -> dict[str, str]:
        return super().facts | {"unknown_below": json.dumps(self.threshold)}

    @property
    def example(self) -> Tensor:
        photos = (photo for _, photo in self.preparation.drawn())
        return torch.from_numpy(max(photos, key=lambda pixels: min(pixels.shape[:2])))

    def _prepared(self, pixels: np.ndarray) -> Tensor:
        """Return an image, uint8 [H, W, C], as halfstep predict prepares it."""
        image = torch.empty(self.data["input_size"], dtype=self.pixels.dtype_in_batch)
        self.preparation.transform(pixels, image)
        return self.graph.normalize(image[None])

    def check(self, run: Callable[[Tensor], Tensor]) -> str:
        """Compare the graph with the original on drawn photos and on validation images.

        Raise WrongExport if they differ.
        """
        largest = max(self._compare(run, *each).probability for each in self.preparation.drawn())
        if not largest <= self.task.most_difference:
            raise WrongExport(f"its {self.names[1]} of drawn photos differ by up to {largest:.1e}")
        differences = {
            index: self._compare(run, pixels, self.preparation.photo_at(self.photos, index, pixels))
            for index, pixels in draw(self.photos, MOST_PHOTOS)
        }
        if not differences:
            raise ConfigError(
                f"-photo: none of {counted(min(len(self.photos), MOST_PHOTOS), 'validation image')} can be read, so "
                "the graph cannot be compared with the model; repair them, or name the images with -data_path"
            )
        changed = {"another answer": [index for index, each in differences.items() if each.is_other_answer]}
        if self.known:
            changed["another sign of known"] = [index for index, each in differences.items() if each.is_other_sign]
        counts = ", ".join(f"{len(indices)} with {what}" for what, indices in changed.items())
        largest = max(each.probability for each in differences.values())
        images = counted(len(differences), "validation image")
        result = f"{images}, {counts}, largest difference of {self.names[1]} {largest:.1e}"
        for what, indices in changed.items():
            if len(indices) > MOST_CHANGED * len(differences):
                first = self.photos.table_name(indices[0])
                raise WrongExport(f"too many images, such as {first}, have {what} ({result})")
        return result

    def _compare(self, run: Callable[[Tensor], Tensor], pixels: np.ndarray, photo: np.ndarray) -> Difference:
        """Compare the graph's results for a photo with the original's for the pixels that halfstep predict reads."""
        expected, results = self.graph.answer(self._prepared(pixels)), run(torch.from_numpy(photo))
        is_other_sign = False
        if self.known:
            (expected, score), (results, other) = expected, results
            is_other_sign = bool((score < 0) != (other < 0)) and abs(score) > MOST_MOVED
            is_other_sign = is_other_sign and not self._rounding_decides(score, pixels)
        # The cost of a label that flips is twice its distance from one half.
        lost = self.task.cost(expected.numpy(), results.numpy()).max() / (1 + self.config.task.has_several_classes)
        difference = self.task.difference(expected.numpy(), results.numpy())
        return Difference(difference, bool(lost > self.task.most_difference), is_other_sign)

    def _rounding_decides(self, score: Tensor, pixels: np.ndarray) -> bool:
        """Return whether the score of an image depends on its rounding, as with few validation images, all alike."""
        image = self._prepared(pixels)
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
        _, again = self.graph.answer(image * (1 + LIKE_ROUNDING * noise))
        return not abs(again - score) <= MOST_MOVED  # true for NaN too


def photo_of(config: Config) -> type[Photo]:
    """Return the class of the photos of a model with these settings."""
    if not config.DATA.is_native:
        return Photo
    from engine.export.native_photo import NativePhoto

    return NativePhoto


def draw(images: ImageSet, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield up to `most` readable images, drawn by a seed, with their indices."""
    for index in np.random.default_rng(0).permutation(len(images))[:most].tolist():
        with contextlib.suppress(ImageReadError):
            yield index, images.read(index)
