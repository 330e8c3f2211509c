"""The curves of groups over each other: each run thin, the mean of a group thick."""

from collections.abc import Sequence
from pathlib import Path

from engine.evaluation.scores import TITLES
from scripts.comparing.groups import Group
from utils.files import replacing

STYLES = ("-", "--", ":", "-.")  # each for matplotlib's ten colours
FEWEST_EPOCHS = 8  # of curves that are shown from their first quarter on
FEW = 7  # groups whose legend has room inside the axes
LONGEST_NAME = 44


def write_curves(path: Path, groups: Sequence[Group]) -> None:
    """A PNG with a panel for the metric that is compared, and one for the loss."""
    from matplotlib.figure import Figure  # which needs no screen, other than pyplot

    metric = "top1" if groups[0].metric == "loss" else groups[0].metric
    rows = -(-len(groups) // 3) if len(groups) > FEW else 0
    figure = Figure(figsize=(12.4, 3.8 + 0.19 * rows), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, title in zip(panels, (metric, "loss"), (f"{TITLES[metric]}, %", "loss"), strict=True):
        _draw(axes, groups, f"eval_{column}")
        axes.set_ylabel(f"validation {title}")
    if rows:
        lines, names = panels[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    else:
        panels[1].legend(frameon=False, fontsize=9)
    with replacing(path) as file:
        figure.savefig(file, dpi=130, format="png")


def _draw(axes, groups: Sequence[Group], column: str) -> None:
    for index, group in enumerate(groups):
        look = look_of(index)
        for run in group.runs if len(group.runs) > 1 else ():
            axes.plot(*_places(group.curve(run, column)), **look, linewidth=0.7, alpha=0.45)
        points = group.mean_curve(column)  # also without points, so that each group is in the legend
        mark, name = "o" if len(points) == 1 else "", group.name[:LONGEST_NAME].replace("$", r"\$")  # no formula
        axes.plot(*_places(points), **look, linewidth=2.0 if len(groups) <= FEW else 1.4, marker=mark, label=name)
    axes.set(xlabel="epoch", ylim=limits(groups, column))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)


def _places(points: Sequence[tuple[float, float]]) -> tuple[Sequence[float], Sequence[float]]:
    return tuple(zip(*points, strict=True)) or ([], [])


def look_of(index: int) -> dict[str, str]:
    """Colour and style of a line; forty differ."""
    return {"color": f"C{index % 10}", "linestyle": STYLES[index // 10 % len(STYLES)]}


def limits(groups: Sequence[Group], column: str) -> tuple[float, float] | None:
    """The range without the first quarter of the epochs, in which a rise from nothing hides how the ends differ."""
    points = [point for group in groups for run in group.runs for point in group.curve(run, column)]
    last = max((epoch for epoch, _ in points), default=0)
    if last < FEWEST_EPOCHS:
        return None
    values = [value for epoch, value in points if epoch > last / 4]
    margin = 0.05 * (max(values) - min(values)) or 1e-3
    return min(values) - margin, max(values) + margin
