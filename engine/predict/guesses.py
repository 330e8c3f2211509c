"""What a model says about an image: classes with probabilities, or numbers with intervals, for people and in tables."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.tasks.number_figures import decimals_of
from utils.text import csv_cell, one_line

EVERYTHING = (-math.inf, math.inf)
PER_CLASS = ("class", "probability")  # the columns of the CSV table for each predicted class


class Guess(NamedTuple):
    """A class and its probability according to the model."""

    number: int
    name: str
    probability: float

    @property
    def line(self) -> str:
        return f"{one_line(self.name)}\t{self.probability:.4f}"

    @property
    def caption(self) -> str:
        return f"{self.name} {self.probability:.2f}"

    @property
    def cells(self) -> list[str]:
        return [csv_cell(self.name), f"{self.probability:.6f}"]

    @property
    def record(self) -> dict[str, Any]:
        return {"class": self.name, "number": self.number, "probability": round(self.probability, 6)}

    @staticmethod
    def titles(rows: Sequence[Sequence["Guess"]]) -> list[str]:
        """Return the columns of a table with these guesses for each image."""
        width = max([1, *map(len, rows)])
        return [f"{name}{'' if number == 1 else f'_{number}'}" for number in range(1, width + 1) for name in PER_CLASS]


class Measure(NamedTuple):
    """A number according to the model, in the units of the data, and half the width of its interval, if it is known.

    `limits`: the numbers that an interval never passes, or None (number_limits.py).
    """

    number: int
    name: str
    value: float
    half: float | None
    limits: Sequence[float | None] = (None, None)

    def text(self, value: float) -> str:
        """Return a number with three digits of the width of the interval, or five of the number if there is none."""
        return f"{value:.{max(decimals_of(self.half, 3), 0)}f}" if self.half else f"{value:.5g}"

    @property
    def bounds(self) -> tuple[float, ...]:
        if self.half is None:
            return ()
        least, most = (other if limit is None else limit for limit, other in zip(self.limits, EVERYTHING, strict=True))
        return tuple(min(max(self.value + half, least), most) for half in (-self.half, self.half))

    @property
    def line(self) -> str:
        ends = " to ".join(self.text(each) for each in self.bounds)
        return "\t".join([one_line(self.name), self.text(self.value), *filter(None, [ends])])

    @property
    def caption(self) -> str:
        return f"{self.name} {self.text(self.value)}"

    @property
    def cells(self) -> list[str]:
        if not self.half:
            return [f"{each:.8g}" for each in (self.value, *self.bounds)]
        return [f"{round(each, decimals_of(self.half, 6)):.15g}" for each in (self.value, *self.bounds)]

    @property
    def record(self) -> dict[str, Any]:
        ends = dict(zip(("low", "high"), self.bounds, strict=False))
        return {"output": self.name, "number": self.number, "value": self.value} | ends

    @staticmethod
    def titles(rows: Sequence[Sequence["Measure"]]) -> list[str]:
        """Return the columns of a table. All images have the same outputs."""
        first = rows[0] if rows else ()
        ends = ("", "_low", "_high")
        return [csv_cell(f"{each.name}{end}") for each in first for end in ends[: 1 + len(each.bounds)]]
