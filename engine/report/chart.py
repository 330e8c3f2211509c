"""Lays out the charts of report.html in pixels. page.html draws them as SVG."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.report.plot import MOST_MARKED, Plot, Point

# A chart fits on a phone at its full size, so that its text is never made smaller.
WIDTH, HEIGHT = 328, 200
LEFT, RIGHT, TOP, BOTTOM = 60, 318, 10, 164  # the edges of the plot area
MOST_TICKS = 6
MOST_POINTS = 300  # a line with more points becomes the lowest and the highest points of its parts


class Axis(NamedTuple):
    """One axis of a chart: `low` is drawn at the pixel `start`, and `high` at the pixel `end`."""

    low: float
    high: float
    start: int
    end: int

    def place(self, value: float) -> float:
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low), 1)

    def ticks(self, smallest_step: float) -> list[tuple[float, str]]:
        """Return the pixel and the text of round values."""
        rough = (self.high - self.low) / MOST_TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = max(next(each * power for each in (1, 2, 5, 10) if each * power >= rough), smallest_step)
        form = f",.{max(0, -math.floor(math.log10(step) + 1e-9))}f" if 1e-4 <= step < 1e5 else ".3g"
        multiples = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.place(each * step), f"{each * step:{form}}") for each in multiples]


class Series(NamedTuple):
    """Points of a chart that look the same."""

    kind: str  # line, dots, cloud, bars (each from its point to the next one), rings or guide
    name: str  # "" for a guide
    points: Sequence[Point]

    def path(self, x: Axis, y: Axis) -> str:
        """Return the points as a path of SVG."""
        places = [(x.place(across), y.place(up)) for across, up in self.points]
        if self.kind == "bars":
            sides = zip(places, places[1:], strict=False)
            base = y.place(0)
            return "".join(f"M{left} {base}V{up}H{right - 1:.1f}V{base}" for (left, up), (right, _) in sides)
        if self.kind in ("dots", "cloud"):
            return "".join(f"M{across} {up}h0" for across, up in dict.fromkeys(places))
        if self.kind == "rings":
            return "".join(f"M{across - 5:.1f} {up}a5 5 0 1 0 10 0a5 5 0 1 0-10 0" for across, up in places)
        return "M" + "L".join(f"{across} {up}" for across, up in places)


def chart(title: str, x: str, marks: Sequence[Series], text: str, ends: tuple[float, float] = ()) -> dict[str, Any]:
    """Lay out a chart. `x`: title of the horizontal axis; `text`: the chart in words; `ends`: the ends of both axes."""
    xs, ys = zip(*(point for mark in marks for point in mark.points), strict=True)
    across, up = (
        Axis(*(ends or wider(values)), *pixels) for values, pixels in ((xs, (LEFT, RIGHT)), (ys, (BOTTOM, TOP)))
    )
    colors = {name: number for number, name in enumerate(dict.fromkeys(mark.name for mark in marks if mark.name))}
    is_whole = all(float(value).is_integer() for value in xs)
    return {
        **{"title": title, "x": x, "text": text, "size": (WIDTH, HEIGHT), "edges": (LEFT, RIGHT, TOP, BOTTOM)},
        "paths": [(mark.kind, colors.get(mark.name, 0), mark.path(across, up)) for mark in marks],
        "names": {mark.name: mark.kind for mark in marks if mark.name} if len(colors) > 1 else {},
        "across": across.ticks(smallest_step=float(is_whole)),
        "up": up.ticks(smallest_step=0),
    }


def wider(values: Sequence[float]) -> tuple[float, float]:
    """Return a range that is a little wider than the range of the values."""
    low, high = min(values), max(values)
    extra = 0.04 * (high - low) or 0.5 * abs(high) or 0.5
    return low - extra, high + extra


def chart_of(plot: Plot) -> dict[str, Any]:
    """Lay out the curves of a run."""
    title, marks = plot.title, [Series("line", name, thinned(points)) for name, points in plot.curves.items()]
    marks += [mark._replace(kind="dots") for mark in marks if len(mark.points) < MOST_MARKED]
    marks += [Series("rings", f"best epoch, {plot.best[0]}", [plot.best])] if plot.best else []
    marks += [Series("dots", "updates skipped", plot.skipped)] if plot.skipped else []
    if plot.is_scale:
        marks = [mark._replace(points=[(step, math.log2(scale)) for step, scale in mark.points]) for mark in marks]
        title += ", as a power of 2"
    return chart(title, plot.x, marks, plot.text)


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return the lowest and the highest point of each part of a long line, which looks the same."""
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        point for part in parts for point in sorted({choose(part, key=lambda each: each[1]) for choose in (min, max)})
    ]
