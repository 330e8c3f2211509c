"""Where the time of a run went."""

from engine.record.html import Markup, element, joined, section, table
from engine.record.saved_run import SavedRun
from utils.text import format_duration

# The phases of an update as steps.csv names them, and how the page does.
PHASES = {
    "data": "waiting for data",
    "copy": "copying to the device",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "optimizer": "optimizer",
    "other": "other",
}
LEAST = 0.05  # percent that are shown


def times(run: SavedRun) -> Markup | None:
    shares = phase_shares(run)
    evaluation = sum(row.get("eval_seconds") or 0 for row in run.epochs)
    training = sum(row.get("train_seconds") or 0 for row in run.epochs)
    shown = {name: share for name, share in shares.items() if share >= LEAST}
    if not shown:
        return None
    bar, left = [], 0.0
    for color, (name, share) in enumerate(shares.items(), start=1):
        if name in shown:
            rect = element("rect", element("title", f"{PHASES[name]} {share:.1f}%"), x=f"{left:.2f}%", y=0, height=26)
            bar.append(Markup(rect.replace("<rect", f'<rect width="{share:.2f}%" class="f{color}"', 1)))
            left += share
    numbers = dict(zip(shares, range(1, len(shares) + 1), strict=True))
    rows = [
        (
            joined([element("span", element("i", class_=f"c{numbers[name]}"), PHASES[name], class_="key")]),
            f"{share:.1f}%",
            *([format_duration(training * share / 100)] if training else []),
        )
        for name, share in sorted(shown.items(), key=lambda item: -item[1])
    ]
    label = "Shares of the training time: " + ", ".join(f"{PHASES[name]} {share:.1f}%" for name, share in shown.items())
    told = ""
    if training and evaluation:
        told = f"Training took {format_duration(training)}, evaluation {format_duration(evaluation)}, {evaluation / (training + evaluation):.0%} of both."
    return section(
        "Where the time went",
        element("p", told) if told else None,
        element("svg", *bar, width="100%", height=26, role="img", aria_label=label),
        table(("in an update", "share", *(["time"] if training else [])), rows, "Time of each phase", numbers=(1, 2)),
    )


def phase_shares(run: SavedRun) -> dict[str, float]:
    """Percent of the time in each phase over all reports of the run."""
    rows = [row for row in run.steps if row.get("seconds")]
    total = sum(row["seconds"] for row in rows)
    sums = {name: sum(row["seconds"] * (row.get(f"{name}_pct") or 0) for row in rows) for name in PHASES}
    return {name: value / total for name, value in sums.items()} if total else {}
