"""Shows the record of a choice (engine/choice/): as a table in the terminal and the report, and as a picture."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.tables import METRICS
from engine.evaluation.scores import format_value
from engine.report.plot import DPI, MARGINS, SIZE
from utils.text import align, format_duration

Record = dict[str, Any]


def columns_of(record: Record) -> tuple[str, ...]:
    title = METRICS[record["metric"]].title
    return "candidate", title, "95% interval", "", "parameters", "training", "prediction", "fine-tuning", "licence"


def cells_of(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield the row of each candidate that could be used, the best first."""
    metric = record["metric"]
    for number, row in enumerate(record["candidates"]):
        low, high = (format_value(metric, each) for each in row["interval"])
        speeds = row["train_images_per_s"], row["predict_images_per_s"]
        if row["is_worse"]:
            verdict = "worse"
        else:
            verdict = "not worse" if number else "best"
        yield (
            row["word"],
            format_value(metric, row["score"]),
            f"{low} to {high}",
            verdict,
            f"{row['parameters'] / 1e6:,.1f} M",
            *(f"{speed:,.0f} images/s" if speed >= 100 else f"{speed:.3g} images/s" for speed in speeds),
            time_of(row),
            row["licence"] or "-",
        )


def time_of(row: dict[str, Any]) -> str:
    """Return the time of a fine-tuning, and what a budget does to it."""
    time = format_duration(row["seconds"])
    if row["exceeds_budget"]:
        return f"{time} (over the budget)"
    return f"{time} (shortened by the budget)" if row["is_shortened"] else time


def section_of(record: Record) -> dict[str, Any]:
    """Return the section of a report."""
    return {"columns": columns_of(record), "rows": [*cells_of(record)], "notes": notes_of(record)}


def lines_of(record: Record) -> list[str]:
    """Return the table with everything that it leaves out."""
    return [*align([columns_of(record), *cells_of(record)]), *notes_of(record)]


def by_reason(failed: Sequence[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the names of candidates that failed for the same reason, and the reason of the first of them."""
    names: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for candidate in failed:
        # A message names its candidate, without the size of its images.
        same = candidate["reason"].replace(re.sub(r"@\d+$", "", candidate["name"]), "")
        names.setdefault(same, []).append(candidate["name"])
        reasons.setdefault(same, candidate["reason"])
    for same, reason in reasons.items():
        yield ", ".join(names[same]), reason


def notes_of(record: Record) -> list[str]:
    lines = [f"cannot be used: {names}: {reason}" for names, reason in by_reason(record["failed"])]
    lines += [*record["notes"], f"by {record['images']}"]
    if all(row["exceeds_budget"] for row in record["candidates"]):
        limit = format_duration(record["budget_seconds"])
        lines.append(f"even the shortest run of every candidate takes longer than {limit}, so the fastest is chosen")
    return [*lines, f"chosen: {record['best']}"]


def picture_of(record: Record) -> bytes:
    """Return a picture of the score of each candidate over the time of its fine-tuning, as a PNG."""
    from matplotlib.figure import Figure  # unlike pyplot, Figure needs no screen

    figure, content, row = Figure(figsize=[1.6 * side for side in SIZE]), io.BytesIO(), METRICS[record["metric"]]
    axes = figure.subplots(gridspec_kw=MARGINS)
    for candidate in record["candidates"]:
        minutes, score, (low, high) = candidate["seconds"] / 60, candidate["score"], candidate["interval"]
        ends = [[max(score - low, 0)], [max(high - score, 0)]]
        color = "grey" if candidate["is_worse"] else "C0"
        axes.errorbar([minutes], [score], yerr=ends, fmt="o", capsize=3, color=color)
        axes.annotate(f" {Path(candidate['word']).name}", (minutes, score), fontsize="x-small")
    if record["budget_seconds"]:
        axes.axvline(record["budget_seconds"] / 60, color="C3", linestyle="--")
    axes.set_xscale("log")
    title = f"{row.title}{row.unit and f', {row.unit}'}"
    axes.set(xlabel="minutes of a fine-tuning", ylabel=title, title="worse candidates are grey; dashed: the budget")
    axes.grid(alpha=0.3)
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()
