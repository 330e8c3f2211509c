"""The interface of a task: what the outputs of a model mean, and how they are trained, scored and shown."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from configs.schema import Config
from datasets import BadImages, EvalData, ImageSet
from engine.confidence.temperature import Likelihood
from engine.evaluation.evaluate import Evaluation
from engine.evaluation.tally import Scoring
from engine.precision import Precision
from engine.train.loss import StepWrapper
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log

# Changes a new model as training does, or None; and evaluates models on the validation images.
OfWeights = tuple[Callable[[nn.Module], None] | None, Callable[[Sequence[nn.Module]], list[Evaluation]]]


class Task:
    """What a model learns. configs/tables.py describes each task in a row of TASKS."""

    likelihood: Likelihood | None = None  # how calibration measures probabilities; None: there is no calibration

    def __init__(self, config: Config):
        self.config = config

    # --- training ---

    def wrappers(self, process: Process, log: Log, is_trial: bool) -> list[StepWrapper]:
        """Return the wrappers around a step's preparation and loss that this task needs. Collective."""
        return []

    def are_right(self, outputs: Any, targets: Any) -> Tensor:
        """Return bool [B]: whether the model is right about each image of a training batch."""
        raise NotImplementedError

    def start_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the linear classifier with which a new head starts."""
        raise NotImplementedError

    # --- evaluation ---

    def scoring(self, trainer: Trainer) -> Scoring:
        """Return how an evaluation during a run scores models."""
        raise NotImplementedError

    def score_more(self, found: list[Evaluation], models: Sequence[nn.Module], trainer: Trainer) -> list[Evaluation]:
        """Add scores of other images than the validation images. Collective."""
        return found

    def open_evaluation(
        self,
        data: EvalData,
        normalize: nn.Module,
        precision: Precision,
        process: Process,
        bad_images: BadImages,
        log: Log,
        is_run: bool,
    ) -> OfWeights:
        """Prepare -eval. `is_run`: whether the weights are the checkpoint of a run. Collective."""
        raise NotImplementedError

    def describe_scored(self, eval_set: ImageSet) -> str:
        """Return what the scores are about, such as '5 classes'."""
        raise NotImplementedError

    # --- answers ---

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class: [B, classes]."""
        raise NotImplementedError

    def answers(self, probabilities: Tensor, most: int | None) -> list[list[tuple[int, float]]]:
        """Return (number of a class, its probability) of the answer to each image, or of the `most` probable classes."""
        raise NotImplementedError

    def answer(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the answer to one image for a comparison: [1], or [labels]."""
        raise NotImplementedError

    def truth(self, images: ImageSet, index: int) -> np.ndarray:
        """Return the right answer to an image, in the form of `answer`."""
        raise NotImplementedError

    def cost(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return how much less probable the answer of `after` is than that of `before`, in the probabilities `before`."""
        raise NotImplementedError
