"""Line charts as SVG: curves over epochs or updates, in the colours of the page's style sheet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.record.html import Markup, element

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 28  # margins around the curves
MOST_POINTS = 400  # of a curve; more are not seen

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A line of a chart. `color`: 1 to 7 of the style sheet."""

    name: str
    points: Sequence[Point]
    color: int
    is_stepped: bool = False  # keeps its value until the next point


@dataclass(frozen=True)
class Axis:
    """What an axis shows: its ends, its ticks and how they are written."""

    low: float
    high: float
    ticks: Sequence[float]
    write: Callable[[float], str]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high, value = (
            math.log2(max(each, 1e-300)) if self.is_log else each for each in (self.low, self.high, value)
        )
        return (value - low) / (high - low)


def chart(
    title: str, curves: Sequence[Curve], x: Axis, y: Axis | None = None, mark: tuple[Point, str, int] | None = None
) -> Markup | None:
    """A figure with its legend; None without a point. `mark`: a point with its label and colour."""
    curves = [each for each in curves if each.points]
    if not curves:
        return None
    y = y or linear_axis([value for curve in curves for _, value in curve.points])
    parts = [_grid(x, y), *(_draw(curve, x, y) for curve in curves)]
    if mark:
        parts.append(_mark(*mark, x, y))
    keys = [element("span", element("i", class_=f"c{each.color}"), each.name, class_="key") for each in curves]
    caption = element("figcaption", element("b", title), *(keys if len(curves) > 1 or curves[0].name else []))
    label = f"{title}. " + "; ".join(_describe(each, y) for each in curves)
    svg = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    return element("figure", caption, svg)


def epoch_axis(last: float, name: str = "epoch") -> Axis:
    """From 0 to the last epoch, with ticks at whole ones."""
    last = max(last, 1)
    step = next(each for each in _steps(1) if last / each <= 8)
    ticks = [tick for tick in range(0, math.floor(last) + 1, int(step))]
    write = lambda tick: f"{tick:,g}" if tick else f"{name} 0"  # noqa: E731
    return Axis(0, last, ticks, write)


def linear_axis(values: Sequence[float], smallest_step: float = 0.0) -> Axis:
    """From below the smallest to above the largest value. `smallest_step`: between ticks; 1 for what is counted."""
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(abs(high), 1e-30) or high == low:
        low, high = low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9
    step = next(each for each in _steps((high - low) / 1000) if (high - low) / each <= 5 and each >= smallest_step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, max(last, first + 1) + 1)]
    return Axis(ticks[0], ticks[-1], ticks, lambda tick: format_number(0.0 if abs(tick) < step / 1e6 else tick))


def log_axis(values: Sequence[float]) -> Axis:
    """Powers of two around all values."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    high = max(high, low + 1)
    step = max(1, math.ceil((high - low) / 6))
    return Axis(2.0**low, 2.0**high, [2.0**power for power in range(low, high + 1, step)], format_number, is_log=True)


def format_number(value: float) -> str:
    """0.0015, 12,800, 2e-05."""
    return f"{value:,.6g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def _steps(smallest: float):
    """1, 2, 5, 10, 20 ... times a power of ten, from about `smallest` on."""
    power = math.floor(math.log10(smallest))
    while True:
        yield from (factor * 10.0**power for factor in (1, 2, 5))
        power += 1


def _place(point: Point, x: Axis, y: Axis) -> Point:
    across, up = x.share(point[0]), y.share(point[1])
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _grid(x: Axis, y: Axis) -> Markup:
    parts = []
    for tick in y.ticks:
        _, top = _place((x.low, tick), x, y)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{top:.1f}", y2=f"{top:.1f}", class_="rule"))
        parts.append(element("text", y.write(tick), x=LEFT - 7, y=f"{top + 4:.1f}", text_anchor="end"))
    for tick in x.ticks:
        left, _ = _place((tick, y.low), x, y)
        anchor = "end" if left > WIDTH - 2 * RIGHT else "middle"
        parts.append(element("text", x.write(tick), x=f"{left:.1f}", y=HEIGHT - 8, text_anchor=anchor))
    return element("g", *parts, aria_hidden="true")


def _draw(curve: Curve, x: Axis, y: Axis) -> Markup:
    places = [_place(point, x, y) for point in thinned(curve.points)]
    if len(places) == 1:  # a line of one point would not be seen
        return element("circle", cx=f"{places[0][0]:.1f}", cy=f"{places[0][1]:.1f}", r=3, class_=f"f{curve.color}")
    words = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"]
    for left, top in places[1:]:
        words.append(f"H{left:.1f}V{top:.1f}" if curve.is_stepped else f"L{left:.1f} {top:.1f}")
    return element("path", d="".join(words), class_=f"curve c{curve.color}")


def _mark(point: Point, text: str, color: int, x: Axis, y: Axis) -> Markup:
    left, top = _place(point, x, y)
    ring = element("circle", cx=f"{left:.1f}", cy=f"{top:.1f}", r=4.5, class_=f"ring c{color}")
    anchor = "end" if left > WIDTH / 2 else "start"
    below = top + 20 if top < TOP + 14 else top - 10
    return element(
        "g", ring, element("text", text, x=f"{left:.1f}", y=f"{below:.1f}", text_anchor=anchor, class_="label")
    )


def _describe(curve: Curve, y: Axis) -> str:
    first, last = (format_number(round(curve.points[index][1], 4)) for index in (0, -1))
    return f"{curve.name or 'from'} {first} to {last}"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS points, the highest and the lowest of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        ends = {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(ends)]
    return kept
