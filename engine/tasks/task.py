"""The interface of a task: what the outputs of a model mean, and how they are trained, scored and shown."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from configs.schema import Config
from datasets import BadImages, EvalData, ImageSet
from engine.confidence.temperature import Likelihood
from engine.evaluation.evaluate import Evaluation, Inference
from engine.evaluation.tally import Scoring
from engine.train.loss import StepWrapper
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log

# Changes a new model as training does, or None; and evaluates models on the validation images.
OfWeights = tuple[Callable[[nn.Module], None] | None, Callable[[Sequence[nn.Module]], list[Evaluation]]]


class Task:
    """What a model learns. The task of a model that predicts probabilities is derived from Classes (classes.py)."""

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

    # --- evaluation ---

    def scoring(self, trainer: Trainer) -> Scoring:
        """Return how an evaluation during a run scores models."""
        raise NotImplementedError

    def score_more(self, found: list[Evaluation], models: Sequence[nn.Module], trainer: Trainer) -> list[Evaluation]:
        """Add scores of other images than the validation images. Collective."""
        return found

    def open_evaluation(
        self, data: EvalData, inference: Inference, bad_images: BadImages, log: Log, is_run: bool
    ) -> OfWeights:
        """Prepare -eval. `is_run`: whether the weights are the checkpoint of a run. Collective."""
        raise NotImplementedError

    def describe_scored(self, eval_set: ImageSet) -> str:
        """Return what the scores are about, such as '5 classes'."""
        raise NotImplementedError
