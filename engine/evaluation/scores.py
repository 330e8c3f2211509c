"""The scores of an evaluation, their ranking, and the confidence interval of an accuracy."""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from configs.tables import METRICS
from utils.text import counted

FEW = 100  # with fewer images an accuracy says little: at 50% its 95% interval is wider than 20 points

USUAL = ("loss", "top1", "top5")  # scores that have their own columns and words


@dataclass(frozen=True)
class Scores:
    """The scores of `num_images` images: mean loss, other metrics in percent. `num_excluded` images were unreadable."""

    loss: float
    top1: float
    top5: float
    num_images: int
    num_excluded: int
    macro_recall: float | None = None
    macro_f1: float | None = None
    micro_f1: float | None = None  # micro F1 and mAP are set only if an image can have several labels
    map: float | None = None
    metric: str = "top1"  # TRAIN.BEST_METRIC, the metric that decides which epoch is best
    num_groups: int | None = None  # of the images (engine/evaluation/groups.py); None: each image counts
    top1_low: float | None = None  # the 95% interval by groups; None: there are too few groups, or images count
    top1_high: float | None = None

    def describe(self, name: str) -> str:
        """Return the log line in PaddleViT's format, with accuracies as fractions, plus the deciding metric."""
        line = f"{name} Loss: {self.loss:.4f}, {name} Acc@1: {self.top1 / 100:.4f}, {name} Acc@5: {self.top5 / 100:.4f}"
        if self.metric in USUAL:
            return line
        value = self.value / 100 if METRICS[self.metric].unit == "%" else self.value
        return f"{line}, {name} {METRICS[self.metric].title}: {value:.4f}"

    def describe_short(self) -> str:
        return describe_score(self.metric, self.value, self.loss)

    def describe_all(self, name: str, classes: str) -> str:
        """Return the line that -eval prints about one evaluation.

        `name`: the name of the weights, printed before their scores. `classes`: the number of classes with images, as
        text.
        """
        interval = confidence(self.top1, self.num_images, self.by_groups)
        more = ", ".join(f"{METRICS[name].title} {format_value(name, value, 3)}" for name, value in self.more().items())
        # With five classes or fewer, top-5 is always 100%.
        top5 = "" if self.top5 == 100 else f", top-5 {self.top5:.3f}%"
        return (
            f"{name}top-1 {self.top1:.3f}%{interval and f' ({interval})'}{top5}, loss {self.loss:.4f} of "
            f"{counted(self.num_images, 'image')} of {classes}{self._excluded()}; {more}"
        )

    @property
    def by_groups(self) -> "ByGroups | None":
        return self.num_groups and ByGroups(self.num_groups, self.top1_low, self.top1_high)

    def _excluded(self) -> str:
        return f"; {counted(self.num_excluded, 'unreadable one')} left out" if self.num_excluded else ""

    def more(self) -> dict[str, float]:
        """Return the measured metrics other than loss, top-1 and top-5."""
        values = {name: getattr(self, name, None) for name in METRICS if name not in USUAL}
        return {name: value for name, value in values.items() if value is not None}

    def figures(self) -> dict[str, float]:
        """Return all measured metrics and counts by name, for status.json."""
        return {key: value for key, value in asdict(self).items() if value is not None and key != "metric"}

    @property
    def value(self) -> float:
        """Return the value of the metric that decides which epoch is best."""
        return float(getattr(self, self.metric))  # checkpoints cannot hold a number of numpy

    @property
    def rank(self) -> tuple[float, float]:
        """Return a sort key. Greater is better: the deciding metric first, then the smaller loss."""
        return rank_of(self.metric, self.value, self.loss)


def rank_of(metric: str, value: float, loss: float) -> tuple[float, float]:
    """Return a sort key for which greater is better. Values that are not finite rank last."""
    gains = (-value if METRICS[metric].smaller_is_better else value, -loss)
    return tuple(gain if math.isfinite(gain) else -math.inf for gain in gains)


def describe_score(metric: str, value: float, loss: float) -> str:
    more = "" if metric == "loss" else f", loss {loss:.4f}"
    return f"{METRICS[metric].title} {format_value(metric, value)}{more}"


def format_value(metric: str, value: float, digits: int | None = None) -> str:
    row = METRICS[metric]
    digits = row.digits if digits is None else digits
    form = ".4g" if row.in_units else f".{digits}f"
    return f"{value:{form}}{row.unit}"


def column_title(metric: str, shared: str = "") -> str:
    """Return the title of a column of best values. `shared`: words about the images."""
    row = METRICS[metric]
    return f"best {row.title}{shared}{row.unit and f', {row.unit}'}"


class ByGroups(NamedTuple):
    """The 95% interval of an accuracy by the groups of its images."""

    num_groups: int
    low: float | None = None  # None: there are too few groups
    high: float | None = None


def confidence(top1: float, num_images: int, by_groups: ByGroups | None = None) -> str:
    """Return the 95% interval of an accuracy and the number of images as text, or "" if there are many images."""
    interval, images = interval_of(top1, num_images, by_groups=by_groups), counted(num_images, "image")
    if not by_groups:
        return interval and f"95%: {interval}, {images}"
    images = f"{images} in {counted(by_groups.num_groups, 'group')}"
    return f"95%: {interval}, {images}" if interval else f"{images}, too few for an interval"


def interval_of(top1: float, num_images: int, most: float = 1000, by_groups: ByGroups | None = None) -> str:
    """Return the 95% confidence interval of an accuracy on fewer than `most` images, or "". Groups have any number."""
    if by_groups:
        digits = 0 if by_groups.num_groups < FEW else 1
        return "" if by_groups.low is None else f"{by_groups.low:.{digits}f} to {by_groups.high:.{digits}f}%"
    if not (0 < num_images < most and 0 <= top1 <= 100):
        return ""
    low, high = wilson_interval(top1, num_images)
    digits = 0 if num_images < FEW else 1
    return f"{low:.{digits}f} to {high:.{digits}f}%"


def wilson_interval(percent: float, total: float, deviations: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95% interval of a percentage of `total` images. It is valid near 0 and 100% too."""
    p, z2 = percent / 100, deviations**2 / total
    half = math.sqrt(z2 * (p * (1 - p) + z2 / 4))
    low, high = (100 * (p + z2 / 2 + side * half) / (1 + z2) for side in (-1, 1))
    return low, high
