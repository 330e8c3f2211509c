"""The best epoch of a run: one record, which checkpoints, status.json, results.json and the log describe."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

from configs.tables import METRICS
from engine.evaluation.scores import ByGroups, Scores, confidence, format_value, rank_of


class Rival(NamedTuple):
    """The highest evaluation of a run, if the last epoch's weights are kept instead (engine/best_scores.py)."""

    epoch: int
    suffix: str
    value: float
    noise: str  # the number of images, or groups, by whose noise it is not better, as text

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Rival | None":
        """Return the evaluation that status.json names, or None if the file was edited."""
        kinds = {"epoch": int, "suffix": str, "value": int | float, "noise": str}
        is_whole = all(isinstance(saved.get(name), kind) for name, kind in kinds.items())
        return cls(**{name: saved[name] for name in kinds}) if is_whole else None


@dataclass(frozen=True)
class Best:
    """The evaluation of the weights in best.pth. Epoch and weights identify it, because a score can be NaN.

    This is the highest evaluation of a run so far, until the end of the run, when the last epoch may replace it.
    """

    value: float = field(default=0.0, compare=False)  # the value of the deciding metric
    epoch: int = -1  # counted from 1; 0: the start of a new classifier (MODEL.NEW_CLASSIFIER); -1: no evaluation yet
    loss: float = field(default=0.0, compare=False)
    suffix: str = ""  # "_ema" if the EMA weights are the best
    num_images: int = field(default=0, compare=False)
    metric: str = field(default="top1", compare=False)
    by_groups: ByGroups | None = field(default=None, compare=False)  # None: each image counts
    rival: Rival | None = field(default=None, compare=False)

    @classmethod
    def of(cls, scores: Scores, epoch: int, suffix: str) -> "Best":
        facts = scores.num_images, scores.metric, scores.by_groups
        return cls(scores.value, epoch, scores.loss, suffix, *facts)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> "Best":
        """Return the best evaluation in a checkpoint, as `state` writes it."""
        by_groups, rival = (*state[6:], None, None)[:2]
        return replace(cls(*state[:6]), by_groups=by_groups and ByGroups(*by_groups), rival=rival and Rival(*rival))

    def state(self) -> list[Any]:
        """Return plain values for a checkpoint, or to send to another process."""
        plain = [*astuple(self)[:6], self.by_groups and [*self.by_groups], self.rival and [*self.rival]]
        while plain[-1] is None:
            plain.pop()
        return plain

    @property
    def weights(self) -> str:
        return "ema" if self.suffix else "raw"

    @property
    def exists(self) -> bool:
        return self.epoch >= 0

    def is_worse_than(self, scores: Scores) -> bool:
        return not self.exists or rank_of(self.metric, self.value, self.loss) < scores.rank

    def describe(self, has_ema: bool, before: Mapping[str, float] | None = None) -> str:
        """Return the best score in words. `before`: the scores of the initial weights, if they were evaluated."""
        if not self.exists:
            return "no best.pth yet"
        interval = confidence(self.value, self.num_images, self.by_groups) if self.metric == "top1" else ""
        name, value = METRICS[self.metric].title, format_value(self.metric, self.value)
        facts = [name_weights(self.epoch, self.suffix, has_ema), interval]
        if self.rival:
            facts.append(f"{self.describe_rival(has_ema)}, not better beyond the noise of {self.rival.noise}")
        if before and self.epoch:
            facts.append(f"{format_value(self.metric, before.get(self.metric, math.nan))} before training")
        return f"{'' if self.rival else 'best '}validation {name} {value} ({'; '.join(filter(None, facts))})"

    def describe_rival(self, has_ema: bool) -> str:
        """Return the highest evaluation in words, such as "epoch 4, EMA: 90.70%". There must be one."""
        epoch, suffix, value, _ = self.rival
        return f"{name_weights(epoch, suffix, has_ema)}: {format_value(self.metric, value)}"


def name_weights(epoch: int, suffix: str, has_ema: bool) -> str:
    """Return the name of the weights after an epoch. `has_ema`: whether the run has two kinds of weights."""
    if not epoch:
        return "before training"
    kind = "EMA" if suffix else "raw weights"
    return f"epoch {epoch}, {kind}" if has_ema else f"epoch {epoch}"
