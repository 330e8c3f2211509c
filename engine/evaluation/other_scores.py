"""The scores of tasks without classes, which have no accuracy."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.tables import METRICS
from engine.evaluation.scores import Scores, format_value
from utils.text import counted

NO_ACCURACY: dict[str, Any] = {"top1": math.nan, "top5": math.nan}


@dataclass(frozen=True)
class OtherScores(Scores):
    """The scores of a model without classes. Its accuracies are NaN."""

    def figures(self) -> dict[str, float]:
        return {key: value for key, value in super().figures().items() if math.isfinite(value)}

    def describe(self, name: str) -> str:
        return ", ".join([f"{name} Loss: {self.loss:.4f}", *(f"{name} {text}" for text in self.texts())])

    def describe_all(self, name: str, classes: str) -> str:
        scores = ", ".join([*self.texts(), f"loss {self.loss:.4f}"])
        return f"{name}{scores} of {counted(self.num_images, 'image')}{self._excluded()}"

    def texts(self) -> Iterator[str]:
        """Yield each score with its name."""
        for name, value in self.more().items():
            yield f"{METRICS[name].title} {format_value(name, value)}"
