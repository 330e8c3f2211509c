"""The curves of a run: score, loss, learning rate, gradient norm."""

from collections.abc import Callable, Iterable
from typing import Any

from engine.evaluation.scores import TITLES, format_value
from engine.record.html import Markup, element, section
from engine.record.page_chart import Axis, Curve, Point, chart, epoch_axis, linear_axis
from engine.record.saved_run import SavedRun

MANY_CLASSES = 5  # with so few, every top-5 is 100%


def curves(run: SavedRun) -> Markup | None:
    x = epoch_axis(length(run))
    best = run.best
    mark = (
        ((best.epoch, best.value), f"{format_value(best.metric, best.value)}", _color(best.suffix))
        if best.epoch
        else None
    )
    charts = [
        chart(_score_title(run), _score_curves(run), x, mark=mark if best.metric != "loss" else None),
        chart("Loss", _loss_curves(run), x, mark=mark if best.metric == "loss" else None),
        chart("Learning rate", [Curve("", by_epoch(run, "lr"), 1)], x, _from_zero(by_epoch(run, "lr"))),
        chart("Gradient norm", [Curve("", by_epoch(run, "grad_norm"), 1)], x, _from_zero(by_epoch(run, "grad_norm"))),
    ]
    found = [each for each in charts if each]
    return section("Course of training", element("div", *found, class_="grid")) if found else None


def _color(suffix: str) -> int:
    return 3 if suffix else 2


def _score_title(run: SavedRun) -> str:
    metric = "top1" if run.metric == "loss" else run.metric
    return f"{'Accuracy' if metric == 'top1' else TITLES.get(metric, metric)}, %"


def _score_curves(run: SavedRun) -> list[Curve]:
    metric = "top1" if run.metric == "loss" else run.metric
    found = [Curve("training, augmented", column(run, f"train_{metric}"), 1)]
    for suffix in run.suffixes:
        kind = " (EMA)" if suffix else ""
        found.append(Curve(f"validation{kind}", column(run, f"eval_{metric}{suffix}"), _color(suffix)))
    classes = run.about.get("classes")
    if metric == "top1" and isinstance(classes, int) and classes > MANY_CLASSES:
        suffix = run.best.suffix
        points = column(run, f"eval_top5{suffix}")
        if any(value < 99.995 for _, value in points[len(points) // 4 :]):
            found.append(Curve("validation top-5", points, 4))
    return found


def _loss_curves(run: SavedRun) -> list[Curve]:
    found = [Curve("training", column(run, "train_loss"), 1)]
    for suffix in run.suffixes:
        kind = " (EMA)" if suffix else ""
        found.append(Curve(f"validation{kind}", column(run, f"eval_loss{suffix}"), _color(suffix)))
    return found


def column(run: SavedRun, name: str) -> list[Point]:
    """The values of a column of metrics.jsonl, at the ends of their epochs."""
    return points_of(run.epochs, name, lambda row: row["epoch"] + 1)


def by_epoch(run: SavedRun, name: str) -> list[Point]:
    """The values of a column of steps.csv, at their part of the run in epochs."""
    per_epoch = updates_per_epoch(run)
    if not per_epoch or len(run.steps) < 2:
        return column(run, name)
    return points_of(run.steps, name, lambda row: row["step"] / per_epoch)


def length(run: SavedRun) -> float:
    """The epochs of the run, with the part of one that it did not finish."""
    per_epoch = updates_per_epoch(run)
    part = run.steps[-1]["step"] / per_epoch if per_epoch and run.steps else 0
    return max(run.epochs[-1]["epoch"] + 1, part)


def updates_per_epoch(run: SavedRun) -> float | None:
    last = run.epochs[-1]
    return last["step"] / (last["epoch"] + 1) if last.get("step") else None


def points_of(rows: Iterable[dict[str, Any]], name: str, place: Callable[[dict[str, Any]], float]) -> list[Point]:
    return [(place(row), row[name]) for row in rows if row.get(name) is not None]


def _from_zero(points: list[Point]) -> Axis | None:
    return linear_axis([0.0, *(value for _, value in points)]) if points else None
