"""The section on predicted numbers in report.html: figures, true against predicted numbers, errors."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from configs.tables import METRICS
from engine.evaluation.scores import format_value
from engine.record.saved_files import read_json, read_table, to_number
from engine.record.saved_run import SavedRun
from engine.report.chart import Series, chart
from engine.tasks.class_tables import PREDICTIONS
from engine.tasks.number_figures import ENDS, PREDICTED
from engine.tasks.numbers import PER_OUTPUT, PER_OUTPUT_KEY
from utils.text import counted

OF_MEAN = "_of_mean"  # the end of the names of the errors of always predicting the training mean
MOST_OUTPUTS = 6  # with charts
NUM_BINS, MOST_DOTS = 30, 1500
FULL_TITLES = {"mae": "mean absolute error", "rmse": "root mean square error"}


def number_section(run: SavedRun) -> dict[str, Any] | None:
    """Return the section, or None for runs without complete results."""
    record = read_json(run.folder / "results.json")
    if PER_OUTPUT_KEY not in record:
        return None
    table, rows = read_table(run.folder / PER_OUTPUT), []
    figures = [name for name in METRICS if any(name in row for row in table)]
    of_mean = [name for name in figures if any(f"{name}{OF_MEAN}" in row for row in table)]
    for row in table:
        cells = [_with_interval(row, name) for name in figures]
        rows.append((row["output"], row["images"], *cells, *(_short(row[f"{name}{OF_MEAN}"]) for name in of_mean)))
    titles = {name: METRICS[name].title for name in figures}
    of_means = [f"mean's {titles[name]}" for name in of_mean]  # such as: mean's MAE
    columns = ("output", "images", *titles.values(), *of_means)
    notes = ["In parentheses: 95% intervals. The last columns are the errors of always predicting the training mean."]
    if widths := record.get("calibration", {}).get("interval"):
        names = [row[0] for row in rows]
        halves = (f"{name} ± {half:.4g}" for name, half in zip(names, widths, strict=False) if half is not None)
        chose = "; these also chose the weights" if record["calibration"]["chose_weights"] else ""
        images = counted(record["calibration"]["num_images"], "validation image")
        if groups := record["calibration"].get("num_groups"):
            images += f" of {counted(groups, 'group')}"
        share = f"{record['calibration']['share']:.0%}"
        notes.append(
            f"Intervals of halfstep predict with {share} of the true numbers, by {images}{chose}: {', '.join(halves)}."
        )
    return {
        "columns": columns,
        "rows": rows,
        "notes": notes,
        "charts": list(_charts(run, [row[0] for row in rows])),
    }


def describe_score(run: SavedRun) -> str:
    """Return a sentence on the best score: its interval, its images, and the score of the training mean."""
    best, record = run.best, read_json(run.folder / "results.json")
    text = f"On {counted(best.num_images, 'validation image')}" if best.num_images else "On the validation images"
    outputs = record.get(PER_OUTPUT_KEY, {})
    names = f" of {', '.join(outputs)}" if 0 < len(outputs) < MOST_OUTPUTS else ""
    title = FULL_TITLES.get(best.metric, METRICS[best.metric].title)
    text += f", the {title}{names} is {format_value(best.metric, best.value)}"
    if record.get("epoch") == best.epoch and best.metric in next(iter(outputs.values()), {}):
        values = np.array([each[best.metric] for each in outputs.values()], np.float64)
        low, high = (format_value(best.metric, each) for each in values[:, 1:].mean(0))
        if np.isfinite(values).all():
            text += f" (95%: {low} to {high})"
        key = f"{best.metric}{OF_MEAN}"
        mean = float(np.array([each.get(key, [None])[0] for each in outputs.values()], np.float64).mean())
        if math.isfinite(mean):
            text += f"; predicting the mean: {format_value(best.metric, mean)}"
    return text


def _short(text: str) -> str:
    value = to_number(text)
    return "" if value is None else f"{value:.4g}"


def _with_interval(row: dict[str, str], name: str) -> str:
    value, low, high = (_short(row[f"{name}{end}"]) for end in ENDS)
    return f"{value}\n({low} to {high})" if low and high else value


def _charts(run: SavedRun, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the charts of the first outputs."""
    rows = read_table(run.folder / PREDICTIONS)
    for name in names[:MOST_OUTPUTS]:
        pairs = [(to_number(row[name]), to_number(row[f"{name}{PREDICTED}"])) for row in rows]
        known = np.array([each for each in pairs if None not in each], np.float64).reshape(-1, 2)
        if len(known):
            yield from _charts_of(name, *known.T)


def _charts_of(name: str, true: np.ndarray, predicted: np.ndarray) -> Iterator[dict[str, Any]]:
    errors = predicted - true
    shown = np.linspace(0, len(true) - 1, min(len(true), MOST_DOTS)).astype(int)
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    for what, y, line in (("predicted", predicted, ends), ("predicted - true", errors, [0, 0])):
        points = [*zip(true[shown].tolist(), y[shown].tolist(), strict=True)]
        marks = [
            Series("cloud", what, points),
            Series("guide", "", [*zip(map(float, ends), map(float, line), strict=True)]),
        ]
        yield chart(f"{name}: {what}", f"true {name}", marks, f"{name}: {what} against true numbers")
    counts, sides = np.histogram(errors, NUM_BINS)
    tops = [*zip(sides.tolist(), [*counts.tolist(), 0], strict=True)]
    text = f"{name}: histogram of the errors, {errors.min():.4g} to {errors.max():.4g}"
    yield chart(f"{name}: number of images", "predicted - true", [Series("bars", "images", tops)], text)
