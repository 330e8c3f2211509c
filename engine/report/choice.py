"""Shows the record of a choice (engine/choice/): as a table in the terminal and the report, and as a picture."""

from collections.abc import Iterator
from typing import Any

from configs.tables import METRICS
from engine.evaluation.scores import format_value
from engine.report.plot import Plot, to_png
from utils.text import align, format_duration

Record = dict[str, Any]
FILE = "choice.json"


def columns_of(record: Record) -> tuple[str, ...]:
    title = METRICS[record["metric"]].title
    return "candidate", title, "95% interval", "", "parameters", "training", "prediction", "fine-tuning", "licence"


def cells_of(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield the row of each candidate that could be used, the best first."""
    metric = record["metric"]
    for number, row in enumerate(record["candidates"]):
        low, high = (format_value(metric, each, None) for each in row["interval"])
        verdict = "worse" if row["is_worse"] else "not worse" if number else "best"
        yield (
            row["word"],
            format_value(metric, row["score"]),
            f"{low} to {high}",
            verdict,
            f"{row['parameters'] / 1e6:,.1f} M",
            f"{row['train_images_per_s']:,.3g} images/s",
            f"{row['predict_images_per_s']:,.3g} images/s",
            format_duration(row["seconds"]) + " (over the budget)" * row["exceeds_budget"],
            row["licence"] or "-",
        )


def section_of(record: Record) -> dict[str, Any]:
    """Return the section of a report."""
    return {"columns": columns_of(record), "rows": [*cells_of(record)], "text": f"By {record['images']}."}


def lines_of(record: Record) -> list[str]:
    """Return the table with everything that it leaves out."""
    lines = align([columns_of(record), *cells_of(record)])
    lines += [f"cannot be used: {each['name']}: {each['reason']}" for each in record["failed"]]
    lines += [*record["notes"], f"by {record['images']}"]
    if all(row["exceeds_budget"] for row in record["candidates"]):
        lines.append("every candidate exceeds the budget, so the fastest is chosen")
    return [*lines, f"chosen: {record['best']}"]


def picture_of(record: Record) -> bytes:
    """Return a picture of the score of each candidate over the time of its fine-tuning, as a PNG."""
    title, budget = METRICS[record["metric"]].title, record["budget_seconds"]
    points = {row["word"]: [(row["seconds"] / 60, row["score"])] for row in record["candidates"]}
    if budget:
        scores = [row["score"] for row in record["candidates"]]
        points["budget"] = [(budget / 60, min(scores)), (budget / 60, max(scores))]
    return to_png(Plot(FILE, title, points, "minutes of a fine-tuning"), f"{title} of a linear model")
