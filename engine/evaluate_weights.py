"""Evaluates the weights of a training run: after an epoch, and best.pth at the end."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from datasets import BadImages, EvalData
from engine.evaluation.evaluate import Evaluation, evaluate
from engine.evaluation.tally import OF_CLASSES, ImageResults, LabelResults, Scoring
from engine.session import Session
from engine.train.trainer import Trainer
from models.weights.state import CALIBRATION
from utils.program import StopSignal
from utils.runs import BEST

if TYPE_CHECKING:
    from extras.report.image_results import BestResults


def evaluate_both(trainer: Trainer, data: EvalData, bad_images: BadImages) -> dict[str, Evaluation]:
    """Evaluate the raw weights and the EMA weights, if any. Before the first update both are equal: skip the EMA."""
    models = {"": trainer.model} | ({"_ema": trainer.ema.model} if trainer.ema and trainer.step else {})
    normalize, metric = trainer.prepare.normalize, trainer.config.TRAIN.BEST_METRIC
    if trainer.config.TRAIN.OBJECTIVE == "features":
        from extras.unlabelled.evaluation import evaluate_features

        found = evaluate_features(
            list(models.values()), data, trainer.prepare, trainer.loss, trainer.process, bad_images
        )
    else:
        with scoring_of(trainer, list(models.values())) as scoring:
            given = (data, normalize, trainer.precision, trainer.process, bad_images, scoring)
            found = evaluate(list(models.values()), *given)
    found = [each._replace(scores=replace(each.scores, metric=metric)) for each in found]
    return dict(zip(models, found, strict=True))


def scoring_of(trainer: Trainer, models: list[nn.Module]) -> AbstractContextManager[Scoring]:
    """Return the scoring for an evaluation. If the run is calibrated, it also keeps features of the images."""
    if CALIBRATION not in trainer.parts:
        return nullcontext(OF_CLASSES)
    from engine.confidence.fit import keeping_features

    return keeping_features(models, trainer.config)


def complete_best(
    session: Session, trainer: Trainer, data: EvalData, bad_images: BadImages, results: "BestResults", stop: StopSignal
) -> None:
    """At the end of a run, add the results of best.pth's images if an earlier start has not written them. Collective."""
    path = session.path / BEST
    results.complete(lambda: evaluate_saved(path, trainer, data, bad_images), lambda: bool(stop.number))


def load_saved(path: Path, trainer: Trainer) -> nn.Module:
    """Load the better weights of best.pth into the trainer's model, so the training must be over. Return the model."""
    from engine.checkpoint.find import read_checkpoint

    suffix = trainer.best.suffix
    key, model = f"state_dict{suffix}", trainer.ema.model if suffix and trainer.ema else trainer.model
    state = trainer.parallel.local_part({key: read_checkpoint(path, lazily=True)[key]})
    trainer.parallel.load(model, state[key])
    return model


def evaluate_saved(path: Path, trainer: Trainer, data: EvalData, bad_images: BadImages) -> ImageResults | LabelResults:
    """Evaluate best.pth again, as in `load_saved`."""
    model = load_saved(path, trainer)
    (found,) = evaluate([model], data, trainer.prepare.normalize, trainer.precision, trainer.process, bad_images)
    return found.images.gather(trainer.process)
