"""Chooses the curves of a run, and draws three of them as PNG into its folder. chart.py draws those of its report."""

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.tables import METRICS
from engine.evaluation.best import Best
from engine.record.saved_files import best_of
from utils.files import replacing

Rows = Sequence[Mapping[str, Any]]
Point = tuple[float, float]

# A picture's size in inches, pixels per inch (sharp enough to read on a phone), and margins as fractions. Margins are
# fixed, because automatic layout draws a plot twice.
SIZE, DPI, MARGINS = (4.5, 3), 160, {"left": 0.15, "right": 0.97, "bottom": 0.15, "top": 0.9}
MOST_MARKED = 40  # curves with fewer points get a marker on each point
IN_THE_FOLDER = ("loss.png", "accuracy.png", "loss_scale.png")
SECONDS_BETWEEN = 60.0  # the shortest time between two drawings during training


class Plot(NamedTuple):
    """One picture: curves over epochs or updates."""

    file: str
    title: str  # title of the vertical axis
    curves: Mapping[str, Sequence[Point]]
    x: str = "epoch"
    best: Point | None = None  # the point of the best epoch
    skipped: Sequence[Point] = ()  # the points of skipped updates
    is_scale: bool = False  # whether these are loss scales: drawn as steps, on a logarithmic axis

    @property
    def text(self) -> str:
        """Describe the picture in words, for people who cannot see it."""
        ends = (f"{name} {points[0][1]:.4g} to {points[-1][1]:.4g}" for name, points in self.curves.items())
        return f"{self.title} by {self.x}: {'; '.join(ends)}"


def plots_of(epochs: Rows, steps: Rows, metric: str, best: Best | None = None) -> Iterator[Plot]:
    """Yield the plots of a run that have at least one curve.

    `metric`: the metric that decides which epoch is best; `best`: the best epoch, or None to find it in the rows.
    """
    best_epoch = best or best_of(epochs, metric)
    for file, (title, columns) in choose_curves(epochs, metric).items():
        curves = {name: points for column, name in columns.items() if (points := points_of(epochs, column))}
        decides = next(each for each in (f"eval_{metric}", "eval_loss", "eval_top1") if each in columns)
        points = points_of(epochs, decides + best_epoch.suffix)
        mark = next((point for point in points if point[0] == best_epoch.epoch), None)
        yield from [Plot(file, title, curves, best=mark)] if curves else []
    for name, title in (("lr", "learning rate"), ("grad_norm", "gradient norm")):
        points = points_of(steps, name, "step")
        yield from [Plot(f"{name}.png", title, {title: points}, "update")] if len(points) > 1 else []
    scales = [point for point in points_of(steps, "loss_scale", "step") if point[1] > 0]
    if len({scale for _, scale in scales}) > 1:
        pairs = zip(steps, steps[1:], strict=False)
        later = [row for before, row in pairs if (row.get("skipped") or 0) > (before.get("skipped") or 0)]
        skipped = points_of(later, "loss_scale", "step")
        yield Plot("loss_scale.png", "loss scale", {"loss scale": scales}, "update", skipped=skipped, is_scale=True)


def choose_curves(epochs: Rows, metric: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Return {file: (axis title, {column: curve name})}. Top-5 is left out if it is always 100%."""
    names = {"top1": "top-1", "top5": "top-5", "map": "mAP"}
    names |= {} if metric in ("loss", *names) else {metric: METRICS[metric].title}
    if all(value == 100 for _, value in points_of(epochs, "eval_top5")):
        del names["top5"]
    curves = {"train_top1": "training, augmented"}
    for name, title in names.items():
        curves |= {f"eval_{name}": f"validation {title}"}
        curves |= {f"eval_{name}_ema": f"validation {title}, EMA"} if name != "top5" else {}
    losses = {"train_loss": "training", "eval_loss": "validation", "eval_loss_ema": "validation, EMA"}
    has_unit = METRICS[metric].unit or metric == "loss"
    title = "accuracy, %" if has_unit else METRICS[metric].title
    return {"loss.png": ("loss", losses), "accuracy.png": (title, curves)}


def points_of(rows: Rows, column: str, x: str = "epoch") -> list[Point]:
    """Return the values in a column as points: (epoch counted from 1, or update; value)."""
    return [(row[x] + (x == "epoch"), row[column]) for row in rows if row.get(column) is not None]


def figure_of(plot: Plot, title: str):
    """Return the plot as a matplotlib figure."""
    from matplotlib.figure import Figure  # unlike pyplot, Figure needs no screen
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE)
    axes = figure.subplots(gridspec_kw=MARGINS)
    for name, points in plot.curves.items():
        style = {"marker": "." if len(points) < MOST_MARKED else ""}
        if plot.is_scale:
            style = {"drawstyle": "steps-post"}
        axes.plot(*zip(*points, strict=True), label=name, **style)
    if plot.best:
        axes.plot(*plot.best, "ko", fillstyle="none", label=f"best epoch, {plot.best[0]}")
    if plot.skipped:
        axes.plot(*zip(*plot.skipped, strict=True), "rx", label="updates skipped")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    places = {place for points in plot.curves.values() for place, _ in points}
    if len(places) == 1:
        axes.set_xlim(min(places) - 0.5, min(places) + 0.5)
    if plot.is_scale:
        axes.set_yscale("log", base=2)
    axes.set(xlabel=plot.x, ylabel="" if title == plot.title else plot.title)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if list(plot.curves) != [title] or plot.best or plot.skipped:  # otherwise the title names the only curve
        axes.legend(frameon=False, fontsize="small")
    return figure


def to_png(plot: Plot, title: str) -> bytes:
    content = io.BytesIO()
    figure_of(plot, title).savefig(content, dpi=DPI, format="png")
    return content.getvalue()


class Plotter:
    """Draws the curves of a run at its end, and before that so rarely that training is not slowed down."""

    def __init__(self, folder: Path, title: str, metric: str):
        """Draw into `folder`. `metric`: the metric that decides which epoch is best."""
        self._folder, self._title, self._metric = folder, title, metric
        self._last = time.monotonic()

    def draw(self, epochs: Rows, steps: Rows, now: bool) -> None:
        """Write the plots of the rows so far if the last plots are old enough or `now` is true."""
        if epochs and (now or time.monotonic() - self._last > SECONDS_BETWEEN):
            for plot in plots_of(epochs, steps, self._metric):
                if plot.file in IN_THE_FOLDER:
                    with replacing(self._folder / plot.file) as file:
                        file.write(to_png(plot, self._title))
            self._last = time.monotonic()
