"""The scores of an evaluation, and which of two are better."""

import math
from dataclasses import asdict, dataclass

# The names of the metrics that can decide which epoch is best, as log lines have them.
TITLES = {
    "top1": "top-1",
    "top5": "top-5",
    "loss": "loss",
    "macro_recall": "macro recall",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "map": "mAP",
}


@dataclass(frozen=True)
class Scores:
    """Mean loss, and the other figures in percent, of `num_images` images; `num_excluded` more could not be read."""

    loss: float
    top1: float
    top5: float
    num_images: int
    num_excluded: int
    macro_recall: float | None = None
    macro_f1: float | None = None
    micro_f1: float | None = None  # this and mAP only where an image can have several labels
    map: float | None = None
    metric: str = "top1"  # the one that decides, TRAIN.BEST_METRIC

    def describe(self, name: str) -> str:
        """The line in PaddleViT's format, with accuracies as fractions, and the metric that decides."""
        line = f"{name} Loss: {self.loss:.4f}, {name} Acc@1: {self.top1 / 100:.4f}, {name} Acc@5: {self.top5 / 100:.4f}"
        if self.metric in ("loss", "top1", "top5"):
            return line
        return f"{line}, {name} {TITLES[self.metric]}: {self.value / 100:.4f}"

    def more(self) -> dict[str, float]:
        """The metrics besides loss, top-1 and top-5 that were measured."""
        found = {name: getattr(self, name) for name in ("macro_recall", "macro_f1", "micro_f1", "map")}
        return {name: value for name, value in found.items() if value is not None}

    def figures(self) -> dict[str, float]:
        """All that was measured, by name, for status.json."""
        return {key: value for key, value in asdict(self).items() if value is not None and key != "metric"}

    def describe_more(self) -> str:
        return ", ".join(f"{TITLES[name]} {value:.3f}%" for name, value in self.more().items())

    @property
    def value(self) -> float:
        """Of the metric that decides."""
        return getattr(self, self.metric)

    @property
    def rank(self) -> tuple[float, float]:
        """Greater is better: by the metric that decides; of equal ones the smaller loss."""
        return rank_of(self.metric, self.value, self.loss)


def rank_of(metric: str, value: float, loss: float) -> tuple[float, float]:
    """Greater is better. What is not finite loses."""
    gains = (-value if metric == "loss" else value, -loss)
    return tuple(gain if math.isfinite(gain) else -math.inf for gain in gains)


def format_value(metric: str, value: float) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{value:.2f}%"
