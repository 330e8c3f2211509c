"""The evaluation of a run with DATA.FOLDS: its further runs predict the images that they have held out."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from datasets import BadImages
from engine.confidence.fit import why_no_features
from engine.evaluation.evaluate import Evaluation
from engine.evaluation.groups import groups_of
from engine.evaluation.tally import Tally, sum_dtype
from engine.folds.runs import Train, train_without
from engine.folds.strangers import FoldFeatures, features_of, learned_features, predict
from engine.folds.tally import CountingTally
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.trainer import Trainer
from models.weights.record import CALIBRATION
from utils.program import StopSignal


@dataclass(frozen=True)
class Folds:
    """The folds of a run on all images."""

    session: Session
    plan: TrainPlan
    trainer: Trainer
    stop: StopSignal
    train: Train

    def evaluate(self) -> dict[str, Evaluation]:
        """Train what is missing of the further runs, and return the evaluation of their predictions. Collective.

        The key is the suffix of the weights that count: "_ema", or "" without MODEL_EMA.
        """
        plan, trainer = self.plan, self.trainer
        numbers = range(plan.config.DATA.FOLDS)
        checkpoints = [train_without(fold, self.session, plan, self.stop, self.train) for fold in numbers]
        process, suffix = trainer.process, "_ema" if trainer.ema else ""
        model = trainer.ema.model if trainer.ema else trainer.model
        of_all = trainer.task.tally(process.device, sum_dtype(process.device), len(plan.eval_set))
        predictions = Predictions(plan, trainer, model, of_all, self.session)
        with restored(model, trainer):
            for fold, checkpoint in enumerate(checkpoints):
                load_weights(model, checkpoint, f"state_dict{suffix}", trainer)
                predictions.add(fold)
        predictions.finish()
        scores = replace(of_all.result(process), metric=plan.config.TRAIN.BEST_METRIC)
        return {suffix: Evaluation(scores, of_all.per_image)}


class Predictions:
    """The predictions for the images of all folds, in one tally, and features that tell strangers from these images."""

    def __init__(self, plan: TrainPlan, trainer: Trainer, model: nn.Module, of_all: Tally, session: Session):
        self._plan, self._trainer, self._model, self._of_all, self._session = plan, trainer, model, of_all, session
        fits_unknown_statistics = trainer.config.fits_unknown_statistics and CALIBRATION in trainer.parts
        self._features = (
            FoldFeatures() if fits_unknown_statistics and not why_no_features(model, trainer.config) else None
        )
        self._indices: list[np.ndarray] = []  # of the images of this process among all images

    def add(self, fold: int) -> None:
        """Predict the images of a fold with the model, which has not learned them. Collective."""
        model, trainer, eval_set = self._model, self._trainer, self._plan.eval_set
        is_held_out, tally = eval_set.folds == fold, CountingTally(self._of_all)
        rows = np.flatnonzero(is_held_out)
        images = eval_set.take(rows)
        bad_images = BadImages(images, trainer.config.DATA.MAX_BAD_FRACTION, self._session.log.warn)
        if self._features:
            self._features.held_out.append(features_of(model, images, trainer, tally, bad_images))
            others = eval_set.take(np.flatnonzero(~is_held_out))
            self._features.learned.append(learned_features(model, others, trainer))
        else:
            predict(model, images, trainer, tally, bad_images)
        self._indices.append(rows[tally.indices])

    def finish(self) -> None:
        """Complete the tally, after all folds. The model has the weights of the run on all images again. Collective."""
        results = self._of_all.per_image
        results.indices, results.groups = np.concatenate(self._indices), groups_of(self._plan.eval_set)
        if self._features:
            self._features.of_all = learned_features(self._model, self._plan.eval_set, self._trainer)
            results.features = self._features


@contextlib.contextmanager
def restored(model: nn.Module, trainer: Trainer) -> Iterator[None]:
    """Let the weights of the model be replaced in the block."""
    own = {name: tensor.clone() for name, tensor in trainer.parallel.local_state(model).items()}
    try:
        yield
    finally:
        trainer.parallel.load(model, own)
        trainer.computing.refresh()


def load_weights(model: nn.Module, checkpoint: Path, key: str, trainer: Trainer) -> None:
    """Load the weights of a further run."""
    from engine.checkpoint.find import read_checkpoint

    state = read_checkpoint(checkpoint, lazily=True)
    trainer.parallel.load(model, trainer.parallel.local_part({key: state[key]})[key])
    trainer.computing.refresh()
