"""The best evaluation of a run, and how sure its accuracy is."""

import math
from typing import NamedTuple

from engine.scores.scores import TITLES, Scores, format_value, rank_of
from utils.text import counted


class Best(NamedTuple):
    """The best evaluation of a run so far. Checkpoints of earlier versions have only the first two."""

    value: float = -1.0  # of the metric that decides
    epoch: int = 0  # 0: none yet
    loss: float = 0.0
    suffix: str = ""  # "_ema": of the EMA weights
    num_images: int = 0
    metric: str = "top1"

    @classmethod
    def of(cls, scores: Scores, epoch: int, suffix: str) -> "Best":
        return cls(scores.value, epoch, -scores.rank[1], suffix, scores.num_images, scores.metric)

    def is_worse_than(self, scores: Scores) -> bool:
        return not self.epoch or rank_of(self.metric, self.value, self.loss) < scores.rank

    def describe(self, has_ema: bool) -> str:
        if not self.epoch:
            return "no best.pth yet"
        weights = f", {'EMA' if self.suffix else 'raw weights'}" if has_ema else ""
        interval = confidence(self.value, self.num_images) if self.metric == "top1" else ""
        value = format_value(self.metric, self.value)
        return (
            f"best validation {TITLES[self.metric]} {value} (epoch {self.epoch}{weights}{interval and f'; {interval}'})"
        )


def confidence(top1: float, num_images: int) -> str:
    """Of few images, the 95% interval of the accuracy on others like them (Wilson's, which holds near 0 and 100%)."""
    if not 0 < num_images < 1000:
        return ""
    p, z2 = top1 / 100, 1.96**2 / num_images
    half = math.sqrt(z2 * (p * (1 - p) + z2 / 4))
    low, high = (100 * (p + z2 / 2 + side * half) / (1 + z2) for side in (-1, 1))
    digits = 0 if num_images < 100 else 1
    return f"95%: {low:.{digits}f} to {high:.{digits}f}%, {counted(num_images, 'image')}"


def describe_scores(scores: Scores, name: str, seconds: float) -> list[str]:
    """Lines about one evaluation of -eval. `name`: of the weights, before their figures."""
    excluded = f"; {scores.num_excluded} unreadable ones left out" if scores.num_excluded else ""
    interval = confidence(scores.top1, scores.num_images)
    return [
        f"----- {scores.describe(f'{name}Validation')}, time: {seconds:.2f}",
        f"{name}top-1 {scores.top1:.3f}%{interval and f' ({interval})'}, top-5 {scores.top5:.3f}% of "
        f"{counted(scores.num_images, 'image')}{excluded}; {scores.describe_more()}",
    ]
