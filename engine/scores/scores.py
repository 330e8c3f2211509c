"""The scores of an evaluation, and which of two are better."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """Mean loss, and accuracies in percent, of `num_images` images; `num_excluded` more could not be read."""

    loss: float
    top1: float
    top5: float
    num_images: int
    num_excluded: int

    def describe(self, name: str) -> str:
        """The line in PaddleViT's format, with accuracies as fractions."""
        return f"{name} Loss: {self.loss:.4f}, {name} Acc@1: {self.top1 / 100:.4f}, {name} Acc@5: {self.top5 / 100:.4f}"

    @property
    def rank(self) -> tuple[float, float]:
        """Greater is better: a higher top-1; of equal ones the smaller loss."""
        return self.top1, -self.loss if math.isfinite(self.loss) else -math.inf
