"""The section on predicted numbers in report.html: figures, true against predicted numbers, errors."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from configs.tables import METRICS
from engine.record.saved_files import read_json, read_table, to_number
from engine.record.saved_run import SavedRun
from engine.report.plot import DPI, MARGINS, SIZE
from engine.tasks.class_tables import PREDICTIONS
from engine.tasks.number_figures import FIGURES, PREDICTED
from engine.tasks.numbers import PER_OUTPUT, PER_OUTPUT_KEY
from utils.text import counted

MOST_OUTPUTS = 6  # with pictures
NUM_BINS = 30


def number_section(run: SavedRun) -> dict[str, Any] | None:
    """Return the section, or None for runs without numbers, or without complete results."""
    record = read_json(run.folder / "results.json")
    if PER_OUTPUT_KEY not in record:
        return None
    rows = []
    for row in read_table(run.folder / PER_OUTPUT):
        cells = [_with_interval(row, name) for name in FIGURES]
        rows.append(
            (row["output"], row["images"], *cells, *(_short(row[f"{name}_of_mean"]) for name in ("mae", "rmse")))
        )
    columns = ("output", "images", *(METRICS[name].title for name in FIGURES), "MAE of the mean", "RMSE of the mean")
    notes = ["In parentheses: 95% intervals. The last columns are for predictions that are always the training mean."]
    if widths := record.get("calibration", {}).get("interval"):
        names = [row[0] for row in rows]
        halves = (f"{name} ± {half:.4g}" for name, half in zip(names, widths, strict=False) if half is not None)
        chose = "; these also chose the weights" * record["calibration"]["chose_weights"]
        images = counted(record["calibration"]["num_images"], "validation image")
        if groups := record["calibration"].get("num_groups"):
            images += f" of {counted(groups, 'group')}"
        share = f"{record['calibration']['share']:.0%}"
        notes.append(
            f"Intervals of predict.py with {share} of the true numbers, by {images}{chose}: {', '.join(halves)}."
        )
    return {
        "columns": columns,
        "rows": rows,
        "notes": notes,
        "drawings": list(_drawings(run, [row[0] for row in rows])),
    }


def _short(text: str) -> str:
    value = to_number(text)
    return "" if value is None else f"{value:.4g}"


def _with_interval(row: dict[str, str], name: str) -> str:
    value, low, high = (_short(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{value} ({low} to {high})" if low and high else value


def _drawings(run: SavedRun, names: list[str]) -> Iterator[tuple[bytes, str]]:
    """Yield pictures of the first outputs as PNG, with their descriptions."""
    rows = read_table(run.folder / PREDICTIONS)
    for name in names[:MOST_OUTPUTS]:
        pairs = [(to_number(row[name]), to_number(row[f"{name}{PREDICTED}"])) for row in rows]
        known = np.array([each for each in pairs if None not in each], np.float64).reshape(-1, 2)
        if len(known):
            yield from _pictures(name, *known.T)


def _pictures(name: str, true: np.ndarray, predicted: np.ndarray) -> Iterator[tuple[bytes, str]]:
    errors = predicted - true
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    for title, x, y, line in (
        ("predicted against true numbers", true, predicted, (ends, ends)),
        ("errors against true numbers", true, errors, (ends, [0, 0])),
    ):
        figure, axes = _axes(f"{name}: {title}", f"true {name}", "predicted" if y is predicted else "predicted - true")
        axes.scatter(x, y, s=9, alpha=0.4, linewidths=0)
        axes.plot(*line, "--", color="gray", linewidth=1)
        yield _as_png(figure), f"{name}: {title}"
    figure, axes = _axes(f"{name}: errors", "predicted - true", "images")
    axes.hist(errors, NUM_BINS)
    axes.axvline(0, linestyle="--", color="gray", linewidth=1)
    yield _as_png(figure), f"{name}: histogram of the errors, {errors.min():.4g} to {errors.max():.4g}"


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE)
    axes = figure.subplots(gridspec_kw=MARGINS)
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    return figure, axes


def _as_png(figure: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()
