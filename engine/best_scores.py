"""Decides at the end of a run whether best.pth becomes the last epoch, or keeps an epoch that is clearly better."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from configs.tables import METRICS
from engine.checkpoint.format import progress_in
from engine.evaluation.best import Best, Rival, name_weights
from engine.plan import TrainPlan
from engine.tasks.class_tables import ClassResults
from models.weights.record import BEST_SCORES
from utils.log import Log
from utils.text import counted

if TYPE_CHECKING:
    from engine.evaluation.groups import GroupTest
    from engine.evaluation.image_test import ErrorTest, ImageTest


class BestScores:
    """Keeps the score of each validation image by best.pth, to compare it with the weights of the last epoch.

    The maximum over many evaluations is too high, because the noise of the images helps to choose it. So the average of
    the last epoch (without TRAIN.MODEL_EMA: its weights) replaces the highest epoch, unless that is better by more than
    this noise, measured on the same images. Every process has this component, and the same result. Checkpoints contain
    its state, so a resumed run does not evaluate best.pth again.
    """

    def __init__(self, plan: TrainPlan, best_file: Path, log: Log):
        self._eval_set, self._config, self._process = plan.eval_set, plan.config, plan.process
        self._best_file, self._log = best_file, log
        self._state = plan.inputs.saved.get(BEST_SCORES, {})

    def state(self) -> dict[str, Any]:
        """Return the score of each image by the weights in best.pth (NaN: unreadable), and which weights these are."""
        return self._state

    def note(self, best: Best, images: ClassResults | None) -> None:
        """Keep the scores of the images by the best weights so far. Collective."""
        self._state = {"best": best.state(), "scores": self._scores_of(images, best.metric)}

    def follow(self, best: Best) -> None:
        """Read the scores of best.pth if a killed run wrote it, or if a later one could not be written. Collective."""
        if best.exists and self._of(self._state) != best:
            saved = self._process.first(lambda: progress_in(self._best_file).get(BEST_SCORES, {}))
            self._state = saved if self._of(saved) == best else {}

    def choose(self, best: Best, last: Best, images: ClassResults | None) -> Best:
        """Return the evaluation to keep: `best`, the highest, or `last`, that of the last epoch. Collective.

        `images`: the results of the last epoch.
        """
        has_ema = self._config.TRAIN.MODEL_EMA
        names = [name_weights(kind.epoch, kind.suffix, has_ema) for kind in (best, last)]
        scores, before = self._scores_of(images, best.metric), self._state.get("scores")
        if scores is None or before is None or scores.isinf().any() or (scores + before).isnan().all():
            self._log.note(f"best.pth stays {names[0]}: no image has scores that compare it with {names[1]}")
            return best
        smaller_is_better = METRICS[best.metric].smaller_is_better
        test, noise = self._compare(scores.double().numpy(), before.double().numpy(), smaller_is_better)
        if test.interval and test.interval[0] > 0:
            self._log.say(f"best.pth stays {names[0]}: better than {names[1]} by more than the noise of {noise}")
            return best
        return replace(last, rival=Rival(best.epoch, best.suffix, best.value, noise))

    def _compare(
        self, last: np.ndarray, best: np.ndarray, smaller_is_better: bool
    ) -> "tuple[ImageTest | ErrorTest | GroupTest, str]":
        """Return the test of how much better the best weights are than the last ones, and the number of images in it.

        A test of few groups has no interval.
        """
        from engine.evaluation.image_test import ErrorTest, ImageTest  # local: only the end of a run compares

        known = ~np.isnan(last + best)
        gains = (best - last)[known] * (-1 if smaller_is_better else 1)
        groups = None
        if self._eval_set.is_grouped:
            from engine.evaluation.groups import GroupTest, groups_of

            groups = groups_of(self._eval_set)
        if groups is not None:
            by_group = GroupTest(gains, groups[known], is_accuracy=False)
            return by_group, counted(by_group.num_groups, "group")
        noise = counted(len(gains), "image")
        if self._config.TRAIN.BEST_METRIC == "top1":
            return ImageTest(len(gains), int((gains < 0).sum()), int((gains > 0).sum())), noise
        return ErrorTest(gains), noise

    def _scores_of(self, images: ClassResults | None, metric: str) -> torch.Tensor | None:
        """Return float32 [images of the set], whose mean is the metric: NaN for unreadable images, infinite for NaN."""
        scores = images.scores_of_images(metric, self._process) if images is not None else None
        if scores is None:
            return None
        of_set = torch.full((len(self._eval_set),), torch.nan)
        finite = torch.from_numpy(scores).float().nan_to_num(torch.inf, torch.inf, -torch.inf)
        of_set[torch.from_numpy(images.indices)] = finite
        return of_set

    @staticmethod
    def _of(state: dict[str, Any]) -> Best:
        return Best.from_state(state.get("best", ()))
