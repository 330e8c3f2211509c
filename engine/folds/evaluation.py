"""The evaluation of a run with DATA.FOLDS: the predictions of its further runs for the images that each has held out."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from datasets import BadImages, build_eval_data
from engine.confidence.fit import FeatureTally, gather_features, why_no_features
from engine.confidence.known import KnownScore, Tap
from engine.evaluation.evaluate import Evaluation, evaluate
from engine.evaluation.groups import groups_of
from engine.evaluation.tally import Tally, sum_dtype
from engine.folds.runs import Train, train_without
from engine.folds.strangers import FoldFeatures, features_of
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
        scoring = trainer.task.scoring(trainer)
        of_all = scoring.tally(process.device, sum_dtype(process.device), len(plan.eval_set))
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
        learns_strangers = trainer.config.learns_strangers and CALIBRATION in trainer.parts
        self._features = FoldFeatures() if learns_strangers and not why_no_features(model, trainer.config) else None
        self._indices: list[np.ndarray] = []  # of the images of this process among all images

    def add(self, fold: int) -> None:
        """Predict the images of a fold with the model, which has not learned them. Collective."""
        rows = np.flatnonzero(self._plan.eval_set.folds == fold)
        images, tally = self._plan.eval_set.take(rows), CountingTally(self._of_all)
        trainer = self._trainer
        data = build_eval_data(trainer.config, images, trainer.process)
        bad_images = BadImages(images, trainer.config.DATA.MAX_BAD_FRACTION, self._session.log.warn)
        with contextlib.ExitStack() as stack:
            tallies = tally
            if self._features:
                tap = stack.enter_context(contextlib.closing(Tap(self._model, KnownScore.middle_of)))
                tallies = FeatureTally(tap, tally, len(images))
            scoring = trainer.task.scoring(trainer)._replace(tally=lambda *given: tallies)
            evaluate([self._model], data, trainer.inference, bad_images, scoring)
        self._indices.append(rows[tally.indices])
        if self._features:
            self._features.held_out.append(gather_features(tally, trainer.process))
            others = self._plan.eval_set.take(np.flatnonzero(self._plan.eval_set.folds != fold))
            self._features.learned.append(features_of(self._model, others, trainer))

    def finish(self) -> None:
        """Complete the tally, after all folds. The model has the weights of the run on all images again. Collective."""
        results = self._of_all.per_image
        results.indices, results.groups = np.concatenate(self._indices), groups_of(self._plan.eval_set)
        if self._features:
            self._features.of_all = features_of(self._model, self._plan.eval_set, self._trainer)
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
