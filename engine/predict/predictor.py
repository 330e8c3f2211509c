"""Batched classification of images with one model, in one process or shared among several."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets import BadImages, build_eval_data
from datasets.image_set import ImageSet
from datasets.pixels.kinds import pixels_of
from datasets.sources.images import unlabelled_files
from datasets.types import Batch
from engine.infer import PlacingInference
from engine.predict.classifier import Classifier
from engine.predict.guesses import Guess, Measure
from engine.tasks import find_task
from models.weights.record import KNOWN
from utils.distributed import Process

FEW = 64  # reading this many images takes less time than starting workers


class Prediction(NamedTuple):
    """The predicted classes of a readable image."""

    index: int  # index of the image's path in the list of paths
    path: str
    guesses: list[Guess] | list[Measure]  # the most probable first
    picture: Any = None  # the item that `draw` returned for this image
    known: float | None = None  # how well it fits the validation images; negative for a stranger; None if not measured
    mark: str = ""  # "unsure" or "unknown" if the highest probability is too low


class PredictedBatch(NamedTuple):
    """A batch with its predictions, from which pictures are drawn."""

    indices: list[int]  # indices of the images' paths in the list of paths
    pixels: Tensor  # uint8 [B, channels, side, side] on the host, before normalization
    inputs: Tensor  # float32 [B, channels, side, side] on the device, normalized
    guesses: list[list[Guess]] | list[list[Measure]]
    best: Tensor  # int64 [B], the most probable class
    show: Callable[[Tensor], Sequence[np.ndarray]]  # see Predictor.pictures

    @property
    def pictures(self) -> Sequence[np.ndarray]:
        """Return the images as arrays [H, W, C]."""
        return self.show(self.pixels)


class Predictor:
    """A classifier on the device of this process, in the precision of the classifier's settings."""

    def __init__(
        self, classifier: Classifier, process: Process, flip: bool = False, say: Callable[[str], None] = print
    ):
        """Move the model to the device.

        With `flip`, the logits of each image and its mirror image are averaged. `say` logs messages about unreadable
        images.
        """
        self.classifier, self.process, self.flip, self.say = classifier, process, flip, say
        config = classifier.config
        self.inference = PlacingInference.of(config, process)
        self.model = self.inference.place(classifier.model)
        self.task, self.pixels = find_task(config), pixels_of(config.DATA)
        self.temperature = torch.tensor(classifier.temperature or 1.0, device=process.device)
        self.known = self._watch_features()

    def _watch_features(self) -> Callable[[], Tensor] | None:
        """Return a function that returns [B]: how well the newest batch fits the validation images.

        None: no statistics.
        """
        if not self.classifier.calibration.get(KNOWN):
            return None
        from engine.confidence.stored import watch

        return watch(self.model, self.classifier.calibration, self.classifier.source)

    def __call__(
        self, paths: list[str], top: int | None = None, draw: Callable[[PredictedBatch], list] | None = None
    ) -> Iterator[Prediction]:
        """Yield the `top` most probable classes of each readable image, in the order of the paths, in every process.

        A model of numbers yields them all. Without `top`, yield only the most probable class, or with several labels
        per image all classes with a probability above one half. `draw` returns a picture or other item for each image
        of a batch, and is called in the process that computed the batch.
        """
        config = self.classifier.config
        if len(paths) <= FEW:
            config = config.changed("DATA", NUM_WORKERS=0)
        images = unlabelled_files(paths, self.pixels)
        bad_images = BadImages(images, max_fraction=1.0, say=self.say)
        for batch in self.batches(config, images):
            bad_images.note(batch.bad)
            predicted = []
            if batch.num_samples:
                pixels = batch.images.to(self.process.device)
                probabilities, known = self._probabilities(pixels)
                guesses, indices = self._guesses(probabilities, top), batch.indices.tolist()
                scores = [None] * len(indices) if known is None else known.tolist()
                pictures = [None] * len(indices)
                if draw:
                    inputs = self.inference.normalize(pixels, torch.float32)
                    best = probabilities.argmax(1)
                    pictures = draw(PredictedBatch(indices, batch.images, inputs, guesses, best, self.pictures))
                predicted = list(zip(indices, guesses, pictures, scores, strict=True))
            # All processes have the same number of batches. Their n-th batches together contain consecutive images.
            for index, guesses, picture, known in sorted(
                self.process.join(predicted, Guess, Measure), key=lambda row: row[0]
            ):
                yield Prediction(index, paths[index], guesses, picture, known)

    def pictures(self, images: Tensor) -> Sequence[np.ndarray]:
        """Return images of a batch as uint8 [H, W, 1 or 3]."""
        return self.pixels.pictures(images)

    def batches(self, config: Config, images: ImageSet) -> Iterable[Batch]:
        """Return the batches of this process. Each process has the same number of them."""
        return build_eval_data(config, images, self.process)

    @torch.no_grad()
    def _probabilities(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return probabilities [B, classes], and how well images fit the validation images [B], if that is known."""
        inputs, source = self.inference.inputs(self.model, pixels), self.classifier.source
        logits = self.inference.outputs(self.model, inputs, source)
        known = self.known() if self.known else None
        if self.flip:
            mirrored = self.inference.outputs(self.model, inputs.flip(-1), source)
            logits = (logits + mirrored) / 2
        logits = logits / self.temperature
        return self.task.probabilities(logits), known

    def _guesses(self, probabilities: Tensor, top: int | None) -> list[list[Guess]] | list[list[Measure]]:
        names, answers = self.classifier.classes, self.task.answers(probabilities, top)
        if self.classifier.config.task.has_classes:
            return [[Guess(number, names[number], probability) for number, probability in row] for row in answers]
        halves = self.classifier.calibration.get("interval", [None] * len(names))
        limits = self.classifier.calibration.get("limits", [(None, None)] * len(names))
        return [
            [Measure(number, names[number], value, halves[number], limits[number]) for number, value in row]
            for row in answers
        ]
