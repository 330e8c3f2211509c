"""Computes the features of the images of a set, in one pass without gradients, with any number of processes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from datasets import BadImages, EvalData, ImageSet, build_eval_data
from engine.evaluation.evaluate import evaluate
from engine.evaluation.scores import Scores
from engine.evaluation.tally import joined
from engine.features.linear import MOST_PRODUCTS
from engine.plan import TrainPlan
from engine.train.trainer import Trainer
from models.heads import output_layers
from utils.distributed import Process

MOST_IMAGES = 20_000  # of a set, so that the pass takes a bounded time


class ImageFeatures(NamedTuple):
    """The features of the readable images of a set, in the order of the images."""

    indices: np.ndarray  # int64 [n], of the images in their set
    features: list[np.ndarray]  # arrays [n, D], one for each place in the model
    targets: np.ndarray  # as in Batch

    @property
    def joined(self) -> np.ndarray:
        """Return the features of all places side by side: [n, sum of D]."""
        return np.concatenate(self.features, axis=1)


class ReadByLayers:
    """Keeps what some linear layers of a model read, for each batch."""

    def __init__(self, layers: Sequence[nn.Module]):
        self._read: dict[int, Tensor] = {}
        self._hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs, number=number: self._keep(number, inputs[0]))
            for number, layer in enumerate(layers)
        ]

    def __deepcopy__(self, memo: dict) -> "ReadByLayers":
        return self  # the half-precision copy of a model has the same tap

    def _keep(self, number: int, read: Tensor) -> None:
        self._read[number] = read.flatten(1).float()

    def take(self) -> list[Tensor]:
        """Return the features of the newest batch, each [at least B, D]."""
        return [self._read.pop(number) for number in range(len(self._hooks))]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Gathered:
    """Keeps the features and targets of the images of an evaluation, in place of scores."""

    def __init__(self, tap: ReadByLayers):
        self.tap, self.per_image, self.rows = tap, self, []
        self.indices = np.zeros(0, np.int64)
        self.num_bad = 0

    def add(self, logits: Tensor, targets: Tensor, num_bad: int) -> None:
        self.rows.append([tally[: len(targets)] for tally in (*self.tap.take(), targets)])
        self.num_bad += num_bad

    def result(self, process: Process) -> Scores:
        counts = process.join([(sum(len(targets) for *_, targets in self.rows), self.num_bad)])
        return Scores(0.0, 0.0, 0.0, *(sum(column) for column in zip(*counts, strict=True)))

    def of_all(self, indices: np.ndarray, process: Process) -> ImageFeatures:
        """Return what all processes have kept. `indices`: those of the images of this process. Collective."""
        local = [torch.cat(column).cpu().numpy() for column in zip(*self.rows, strict=True)]
        indices, *columns, targets = joined(process, indices, *local)
        return ImageFeatures(indices, columns, targets)


class TwoTallies:
    """A tally, and another object that gets the same batches."""

    def __init__(self, tally: Any, other: Any):
        self._both, self.per_image, self.result = (tally, other), tally.per_image, tally.result

    def add(self, *batch: Any) -> None:
        for tally in self._both:
            tally.add(*batch)


class Interruptible:
    """Evaluation data that raise an error between two batches, in all processes after the same batch."""

    def __init__(self, data: EvalData, stop_if_requested: Callable[[], None]):
        self._data, self._stop_if_requested = data, stop_if_requested

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __iter__(self) -> Iterator:
        for batch in self._data:
            self._stop_if_requested()
            yield batch


@contextlib.contextmanager
def tapped(trainer: Trainer) -> Iterator[ReadByLayers]:
    """Yield what the model's classifier reads. Compiled graphs, which call no hooks, are not used."""
    eager = torch.compiler.set_stance("force_eager") if trainer.config.COMPILE else contextlib.nullcontext()
    with contextlib.closing(ReadByLayers([*output_layers(trainer.model).values()])) as tap, eager:
        yield tap


def features_of_images(
    images: ImageSet,
    trainer: Trainer,
    note: Callable[[str], None],
    stop_if_requested: Callable[[], None] = lambda: None,
) -> ImageFeatures:
    """Return what the classifier of the trained model reads, over all processes. Collective.

    At most MOST_IMAGES images are drawn from the set; unreadable ones are left out.
    """
    # The first images of an epoch, because they are in few shards.
    drawn = np.sort(images.epoch_order(trainer.config.SEED, 0)[:MOST_IMAGES])
    images = images.take(drawn)
    data = Interruptible(build_eval_data(trainer.config, images, trainer.process), stop_if_requested)
    bad_images = BadImages(images, max_fraction=1.0, say=note)
    with tapped(trainer) as tap:
        (evaluation,) = evaluate([trainer.model], data, trainer.inference, bad_images, lambda *sizes: Gathered(tap))
    features = evaluation.images.of_all(evaluation.images.indices, trainer.process)
    return features._replace(indices=drawn.astype(np.int64)[features.indices])


def has_zero_classifier(trainer: Trainer) -> bool:
    """Return whether this process's part of the classifier is zero, as MODEL.NEW_CLASSIFIER starts it."""
    layers = tuple(f"{path}." for path in output_layers(trainer.model))
    own = trainer.parallel.parameters(trainer.model)
    return bool(layers) and not any(bool(each.any()) for name, each in own.items() if name.startswith(layers))


def why_not_fitted(plan: TrainPlan, trainer: Trainer, layers: list[nn.Module]) -> str:
    """Return why no linear classifier is fitted, or ""."""
    if trainer.parallel.is_sharded:
        return "the processes share the model (DIST.STRATEGY fsdp2)"
    if plan.train_set.makes_batches:
        return "the images are generated"
    if any(layer.bias is None for layer in layers):
        return "the classifier has no bias"
    num_images, num_outputs = min(len(plan.train_set), MOST_IMAGES), layers[0].weight.shape[0]
    num_features = sum(layer.weight[0].numel() for layer in layers)
    num_fits, outputs = trainer.task.fits(plan.train_set, num_outputs, min(num_images, num_features))
    if num_images * num_features * num_fits > MOST_PRODUCTS:
        return f"it would take long with {num_images:,} images, {num_features:,} features and {outputs}"
    return ""
