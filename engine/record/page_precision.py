"""What became of half precision: the loss scale, skipped updates, the doctor's finding, the comparison with float32."""

import re
from collections import Counter
from collections.abc import Iterator

from engine.record.html import Markup, element, section, table
from engine.record.page_chart import Curve, chart, epoch_axis, linear_axis, log_axis
from engine.record.page_curves import by_epoch, length
from engine.record.saved_run import SavedRun
from utils.text import counted

MOST_ROWS = 20


def precision(run: SavedRun) -> Markup | None:
    """None where nothing happened: a run whose scale stayed and whose updates all counted."""
    parts = [*_scale(run), *_doctor(run), *_comparison(run), *_types(run)]
    return section("Precision", *parts) if parts else None


def _scale(run: SavedRun) -> Iterator[Markup]:
    skipped = sum(run.skipped.values())
    updates = run.steps[-1]["step"] + 1 if run.steps else run.epochs[-1].get("step")
    scales = [(place, scale) for place, scale in by_epoch(run, "loss_scale") if scale > 0]
    moves = len({scale for _, scale in scales}) > 1
    if skipped:
        of = f" of {updates:,.0f}" if updates else ""
        yield element("p", f"{counted(skipped, 'update')}{of} skipped, because gradients were not finite.")
    for first, last in run.left_out:
        yield element("p", f"Updates {first:,} to {last:,} were left out after a rollback; see bad_batches.jsonl.")
    axis = epoch_axis(length(run))
    charts = []
    if moves:
        curve = Curve("", scales, 1, is_stepped=True)
        charts.append(chart("Loss scale", [curve], axis, log_axis([scale for _, scale in scales])))
    if skipped:
        points = [(min(epoch + 1, axis.high), number) for epoch, number in sorted(run.skipped.items())]
        y = linear_axis([0.0, *(number for _, number in points)], smallest_step=1)
        charts.append(chart("Skipped updates of each epoch", [Curve("", points, 2)], axis, y))
    if charts:
        yield element("div", *charts, class_="grid")


def _doctor(run: SavedRun) -> Iterator[Markup]:
    """Its lines in the log, and the settings that it wrote."""
    lines = re.findall(r"^[\d-]{10} [\d:]{8} (?:warning: )?doctor: (.*)$", run.text("log.txt"), re.M)
    settings = run.text("doctor.yaml")
    if lines or settings:
        yield element("h3", "The doctor's finding")
        yield from (element("p", line) for line in dict.fromkeys(lines[-4:]))
    if settings:
        yield element("p", "doctor.yaml, for -cfg:")
        yield element("pre", element("code", settings))


def _comparison(run: SavedRun) -> Iterator[Markup]:
    """shadow.csv."""
    rows = run.numbers("shadow.csv")
    points = [
        (row["step"], row["least_cosine"]) for row in rows if None not in (row.get("step"), row.get("least_cosine"))
    ]
    if not points:
        return
    axis = epoch_axis(max(step for step, _ in points), "update")
    yield element("h3", "Compared with float32")
    told = "The gradient that is least alike in both precisions: 1 is the same direction, 0 an unrelated one."
    yield element("p", told, class_="soft")
    yield element("div", chart("Smallest cosine similarity", [Curve("", points, 1)], axis), class_="grid")


def _types(run: SavedRun) -> Iterator[Markup]:
    """precision.csv: in which type how many modules compute."""
    columns, *rows = run.cells("precision.csv") or [[]]
    if not rows or "computes_in" not in columns:
        return
    index = columns.index("computes_in")
    found = Counter(row[index] for row in rows).most_common(MOST_ROWS)
    yield element("h3", "Types of operations")
    yield table(("computes in", "modules"), [(name, f"{count:,}") for name, count in found], "Types", numbers=(1,))
