"""Draws loss.png, accuracy.png and loss_scale.png."""

import math
import time
from pathlib import Path

from engine.evaluation.scores import TITLES, rank_of
from utils.files import replacing

# Fixed margins: a layout that looks for them draws each picture twice.
SHAPE = {"figsize": (7, 4.2), "gridspec_kw": {"left": 0.12, "right": 0.97, "bottom": 0.12, "top": 0.92}}


def plot_metrics(rows: list[dict], folder: Path, title: str, metric: str = "top1") -> None:
    """Draw loss.png and accuracy.png of all epochs so far. `metric`: the one that decides which is best."""
    import matplotlib

    matplotlib.use("Agg")  # a server has no screen
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    for name, (label, curves) in choose_curves(rows, metric).items():
        figure, axes = pyplot.subplots(**SHAPE)
        for column, legend in curves.items():
            points = points_of(rows, column)
            if points:
                axes.plot(*zip(*points, strict=True), label=legend, marker="." if len(points) < 40 else "")
        epoch, suffix = find_best(rows, metric) or (0, "")
        judged = next(each for each in (f"eval_{metric}", "eval_loss", "eval_top1") if each in curves)
        if best := [point for point in points_of(rows, judged + suffix) if point[0] == epoch]:
            axes.plot(*zip(*best, strict=True), "ko", fillstyle="none", label=f"best epoch, {epoch}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if len(rows) == 1:
            axes.set_xlim(rows[0]["epoch"] + 0.5, rows[0]["epoch"] + 1.5)
        axes.set(xlabel="epoch", ylabel=label, title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        save(figure, folder / name)


def choose_curves(rows: list[dict], metric: str) -> dict[str, tuple[str, dict[str, str]]]:
    """{file: (what its axis shows, {column: what it is})}, without a top-5 that every image reaches."""
    curves = {
        "train_top1": "training, augmented",
        "eval_top1": "validation top-1",
        "eval_top5": "validation top-5",
        "eval_top1_ema": "validation top-1, EMA",
        "eval_map": "validation mAP",
        "eval_map_ema": "validation mAP, EMA",
    }
    if metric != "loss" and f"eval_{metric}" not in curves:
        curves |= {
            f"eval_{metric}": f"validation {TITLES[metric]}",
            f"eval_{metric}_ema": f"validation {TITLES[metric]}, EMA",
        }
    if all(value == 100 for _, value in points_of(rows, "eval_top5")):
        del curves["eval_top5"]
    losses = {"train_loss": "training", "eval_loss": "validation", "eval_loss_ema": "validation, EMA"}
    return {"loss.png": ("loss", losses), "accuracy.png": ("accuracy, %", curves)}


def points_of(rows: list[dict], column: str) -> list[tuple[int, float]]:
    """(epoch, counted from 1, and value) where it was measured."""
    return [(row["epoch"] + 1, row[column]) for row in rows if row.get(column) is not None]


def find_best(rows: list[dict], metric: str) -> tuple[int, str] | None:
    """The epoch, counted from 1, that scored best, and _ema where those weights did; of equal ones the first."""
    scored = []
    for row in rows:
        for suffix in ("", "_ema"):
            value, loss = row.get(f"eval_{metric}{suffix}"), row.get(f"eval_loss{suffix}")
            if value is not None:
                rank = rank_of(metric, value, math.inf if loss is None else loss)
                scored.append((rank, row["epoch"] + 1, suffix))
    return max(scored, key=lambda each: each[0])[1:] if scored else None


def plot_loss_scale(rows: list[dict], folder: Path, title: str) -> None:
    """Draw loss_scale.png: the scale over the updates, with marks where updates were skipped."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**SHAPE)
    axes.step([row["step"] for row in rows], [row["loss_scale"] for row in rows], where="post", label="loss scale")
    skipped = [row for before, row in zip(rows, rows[1:], strict=False) if row["skipped"] > before["skipped"]]
    axes.plot([row["step"] for row in skipped], [row["loss_scale"] for row in skipped], "rx", label="updates skipped")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="update", ylabel="loss scale", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, folder / "loss_scale.png")


def save(figure, path: Path) -> None:
    from matplotlib import pyplot

    try:
        with replacing(path) as file:
            figure.savefig(file, dpi=110, format="png")
    finally:
        pyplot.close(figure)


class Plotter:
    """Draws at the end, and before that rarely enough that it costs no training time."""

    def __init__(self, folder: Path, title: str, metric: str, seconds_between: float = 60.0):
        """`metric`: the one that decides which epoch is best."""
        self._folder, self._title, self._metric, self._between = folder, title, metric, seconds_between
        self._last = time.monotonic()

    def draw(self, rows: list[dict], steps: list[dict], now: bool) -> None:
        """`rows` of epochs, `steps` of single updates, drawn only if the loss scale changes."""
        if rows and (now or time.monotonic() - self._last > self._between):
            plot_metrics(rows, self._folder, self._title, self._metric)
            if len({row["loss_scale"] for row in steps}) > 1:
                plot_loss_scale(steps, self._folder, self._title)
            self._last = time.monotonic()
