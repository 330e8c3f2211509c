"""The interface of a task: what the outputs of a model mean, and how they are trained, scored and shown."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets import ImageSet, Mixed
from engine.evaluation.tally import MakeTally
from utils.text import counted, first_of

if TYPE_CHECKING:
    from engine.features.linear import LinearClassifier


class Task:
    """What a model learns. The task of a model that predicts probabilities is derived from ClassTask (classes.py)."""

    why_no_shards = why_not_applied = ""  # why halfstep make-shards or halfstep labels -apply cannot write them

    def __init__(self, config: Config):
        self.config = config

    # --- training ---

    def are_right(self, outputs: Any, targets: Any) -> Tensor:
        """Return bool [B]: whether the model is right about each image of a training batch. By default, of none."""
        return torch.zeros(1, dtype=torch.bool, device=outputs[0].device)

    def fit_head(self, features: Tensor, targets: Tensor, num_outputs: int) -> "LinearClassifier":
        """Return the linear model of pretrained features with which a new head starts. `targets` as in Batch."""
        raise NotImplementedError

    def why_no_fit(self, targets: Tensor, names: Sequence[str]) -> str:
        """Return why `fit_head` cannot fit these targets of readable images, or ""."""
        return ""

    def fits(self, images: ImageSet, num_outputs: int, rank: int) -> tuple[int, str]:
        """Return how many outputs `fit_head` fits, by the time it takes, and their description."""
        return num_outputs, counted(num_outputs, self.config.task.noun)

    def captions(self, targets: Any, names: Sequence[str]) -> list[str]:
        """Return what each image of a training batch shows, on the host. `names`: of the outputs."""
        if not isinstance(targets, Mixed):
            return [_names_of(target, names) for target in targets]
        rows = zip(targets.first, targets.second, targets.share.tolist(), strict=True)
        return [
            _names_of(first, names)
            if share > 0.995
            else f"{share:.0%} {_names_of(first, names)}, {1 - share:.0%} {_names_of(second, names)}"
            for first, second, share in rows
        ]

    # --- evaluation ---

    @property
    def tally(self) -> MakeTally:
        """Return what makes the tally of an evaluation."""
        raise NotImplementedError

    def calibrate(self, scores: tuple[np.ndarray, np.ndarray] | tuple[()]) -> dict[str, Any]:
        """Return what makes answers trustworthy, or the reason why there is nothing, as plain numbers and lists.

        `scores`: outputs and targets of validation images with finite outputs; (): there are too many.
        """
        raise NotImplementedError

    def groups_and_limits(self, train: ImageSet, val: ImageSet) -> tuple[np.ndarray | None, dict[str, Any]]:
        """Return what calibrated answers depend on, beside the scores: see number_limits.py."""
        return None, {}

    def describe_answers(self, calibration: dict[str, Any]) -> str:
        """Return a sentence about the answers of calibrated weights, or ""."""
        return ""

    def describe_scored(self, eval_set: ImageSet) -> str:
        """Return what the scores are about, such as '5 classes'."""
        return counted(len(eval_set.classes), self.config.task.noun)


def _names_of(target: Tensor, names: Sequence[str]) -> str:
    """Return the name of an image's class, or the names of all its labels."""
    numbers = target.nonzero()[:, 0].tolist() if target.ndim else [int(target)]
    return first_of([names[number] for number in numbers]) or "no label"
