"""Evaluates the weights of a training run: after an epoch, and best.pth at the end."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from datasets import BadImages, EvalData
from engine.evaluation.best import Best
from engine.evaluation.evaluate import Evaluation, evaluate
from engine.evaluation.scores import Scores, describe_score, rank_of
from engine.evaluation.tally import MakeTally
from engine.session import Session
from engine.tasks.class_tables import ClassResults
from engine.train.trainer import Trainer
from utils.program import StopSignal
from utils.runs import BEST
from utils.text import warning

if TYPE_CHECKING:
    from engine.report.image_results import BestResults


ByFolds = Callable[[], dict[str, Evaluation]]  # the evaluation of a run with DATA.FOLDS


def evaluate_both(
    trainer: Trainer, data: EvalData, bad_images: BadImages, change: Callable[[MakeTally], MakeTally] | None = None
) -> dict[str, Evaluation]:
    """Evaluate the raw weights and the EMA weights, if any. Before the first update both are equal: skip the EMA.

    `change` returns a function for tallies that keep more.
    """
    models = {"": trainer.model} | ({"_ema": trainer.ema.model} if trainer.ema and trainer.step else {})
    metric, both = trainer.config.TRAIN.BEST_METRIC, list(models.values())
    with contextlib.ExitStack() as stack:
        make_tally = trainer.task.tally
        if trainer.config.fits_unknown_statistics:
            from engine.confidence.fit import keeping_features

            make_tally = stack.enter_context(keeping_features(make_tally, both, trainer))
        make_tally = change(make_tally) if change else make_tally
        evaluations = evaluate(both, data, trainer.inference, bad_images, make_tally)
    evaluations = [each._replace(scores=replace(each.scores, metric=metric)) for each in evaluations]
    return dict(zip(models, evaluations, strict=True))


def note_start(saves: Any, scores: Scores, seconds: float, by: str = "") -> None:
    """Report the scores of the weights before the first update, as the baseline of the run.

    `saves`: its Saves. Collective.
    """
    saves.trainer.before = scores.figures()
    saves.trainer.notify("on_start_scored", scores, seconds)
    saves.log.say(f"before training: {scores.describe_short()}{by}")
    saves.show("training")


def compare_with_start(best: Best, before: dict[str, float] | None) -> list[str]:
    """Return a warning if no epoch was better than the weights before the first update, whose scores are `before`."""
    if not (before and best.exists):
        return []
    score = best.metric, before.get(best.metric, math.nan), before.get("loss", math.nan)
    rival = [rank_of(best.metric, best.rival.value, -math.inf)] if best.rival else []
    if max([rank_of(best.metric, best.value, best.loss), *rival]) > rank_of(*score):
        return []
    return [warning(f"no epoch was better than the start; before training: {describe_score(*score)}")]


def complete_best(
    session: Session,
    trainer: Trainer,
    data: EvalData,
    bad_images: BadImages,
    results: "BestResults",
    stop: StopSignal,
    by_folds: ByFolds | None,
) -> None:
    """At the end of a run, add the results of best.pth's images if an earlier start has not written them.

    Collective.
    """

    def evaluate_best() -> ClassResults:
        if by_folds is None:
            from engine.evaluate_saved import evaluate_saved

            return evaluate_saved(session.path / BEST, trainer, data, bad_images)
        (evaluation,) = by_folds().values()
        return evaluation.images.gather(trainer.process)

    if trainer.best.num_images:
        results.complete(evaluate_best, lambda: bool(stop.number))
