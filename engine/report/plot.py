"""Draws loss.png, accuracy.png and loss_scale.png."""

import time
from pathlib import Path

from utils.files import replacing


def plot_metrics(rows: list[dict], folder: Path, title: str) -> None:
    """Draw loss.png and accuracy.png of all epochs so far."""
    import matplotlib

    matplotlib.use("Agg")  # a server has no screen
    from matplotlib import pyplot

    charts = {
        "loss.png": ("loss", {"train_loss": "training", "eval_loss": "validation", "eval_loss_ema": "validation, EMA"}),
        "accuracy.png": (
            "accuracy, %",
            {
                "train_top1": "training, augmented",
                "eval_top1": "validation top-1",
                "eval_top5": "validation top-5",
                "eval_top1_ema": "validation top-1, EMA",
                "eval_map": "validation mAP",
                "eval_map_ema": "validation mAP, EMA",
            },
        ),
    }
    for name, (label, curves) in charts.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        for column, legend in curves.items():
            points = [(row["epoch"] + 1, row[column]) for row in rows if row.get(column) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=legend, marker="." if len(points) < 40 else "")
        axes.set(xlabel="epoch", ylabel=label, title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        save(figure, folder / name)


def plot_loss_scale(rows: list[dict], folder: Path, title: str) -> None:
    """Draw loss_scale.png: the scale over the updates, with marks where updates were skipped."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
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

    def __init__(self, folder: Path, title: str, seconds_between: float = 60.0):
        self._folder, self._title, self._between = folder, title, seconds_between
        self._last = time.monotonic()

    def draw(self, rows: list[dict], steps: list[dict], now: bool) -> None:
        """`rows` of epochs, `steps` of single updates, drawn only if the loss scale changes."""
        if rows and (now or time.monotonic() - self._last > self._between):
            plot_metrics(rows, self._folder, self._title)
            if len({row["loss_scale"] for row in steps}) > 1:
                plot_loss_scale(steps, self._folder, self._title)
            self._last = time.monotonic()
