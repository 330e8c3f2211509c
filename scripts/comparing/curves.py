"""The curves of groups over each other: each run thin, the mean of a group thick."""

import io
from collections.abc import Sequence
from pathlib import Path

from engine.evaluation.scores import TITLES
from scripts.comparing.groups import Group
from utils.files import replacing

PALETTE = ("#1f6fb4", "#c2541c", "#2b8653", "#8552a8", "#8a6a00", "#a83264", "#6b7280")
STYLES = ("-", "--", ":")
FEWEST_EPOCHS = 8  # of curves that are shown from their first quarter on
FEW = 7  # groups whose legend has room inside the axes


def draw(groups: Sequence[Group], columns: Sequence[str]) -> bytes:
    """A PNG with a panel for each column of `metrics.jsonl` (`eval_top1`, `eval_loss`...)."""
    import matplotlib

    matplotlib.use("Agg")  # a server has no screen
    from matplotlib import pyplot

    wide, across = 6.2, 3
    rows = -(-len(groups) // across) if len(groups) > FEW else 0
    size = (wide * len(columns), 0.61 * wide + 0.19 * rows)
    figure, panels = pyplot.subplots(1, len(columns), figsize=size, layout="constrained", squeeze=False)
    for axes, column in zip(panels[0], columns, strict=True):
        _draw(axes, groups, column)
    lines, names = panels[0][0].get_legend_handles_labels()
    if rows:
        figure.legend(lines, names, loc="outside lower center", ncols=across, fontsize=8, frameon=False)
    elif lines:
        panels[0][-1].legend(lines, names, frameon=False, fontsize=9)
    target = io.BytesIO()
    figure.savefig(target, dpi=130, format="png")
    pyplot.close(figure)
    return target.getvalue()


def _draw(axes, groups: Sequence[Group], column: str) -> None:
    for index, group in enumerate(groups):
        color, style = look(index, len(groups))
        if len(group.runs) > 1:
            for run in group.runs:
                points = group.curve(run, column)
                if points:
                    axes.plot(*zip(*points, strict=True), color=color, linestyle=style, linewidth=0.7, alpha=0.45)
        points = group.mean_curve(column)
        # Also without points, so that each group is in the legend.
        mark = "o" if len(points) == 1 else ""
        places = zip(*points, strict=True) if points else ([], [])
        width = 2.0 if len(groups) <= FEW else 1.4
        axes.plot(*places, color=color, linestyle=style, linewidth=width, marker=mark, label=short(group.name))
    axes.set(xlabel="epoch", ylabel=title_of(column), ylim=limits(groups, column))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)


def limits(groups: Sequence[Group], column: str) -> tuple[float, float] | None:
    """The range without the first quarter of the epochs, in which a rise from nothing hides how the ends differ."""
    curves = [group.curve(run, column) for group in groups for run in group.runs]
    last = max((curve[-1][0] for curve in curves if curve), default=0)
    values = [value for curve in curves for epoch, value in curve if epoch > last / 4]
    if last < FEWEST_EPOCHS or not values:
        return None
    margin = 0.05 * (max(values) - min(values)) or 1e-3
    return min(values) - margin, max(values) + margin


def look(index: int, number: int) -> tuple[object, str]:
    """Colour and style of a line: one of the palette's, with other styles for more groups, else along a colour scale."""
    if number <= len(PALETTE) * len(STYLES):
        return PALETTE[index % len(PALETTE)], STYLES[index // len(PALETTE)]
    from matplotlib import colormaps

    return colormaps["turbo"](0.08 + 0.84 * index / (number - 1)), STYLES[index % len(STYLES)]


def short(name: str) -> str:
    """A name that a legend has room for, in which matplotlib sees no formula and no line to hide."""
    name = name if len(name) <= 44 else f"{name[:43]}…"
    return name.replace("$", r"\$")


def title_of(column: str) -> str:
    kind, _, metric = column.partition("_")
    name = TITLES.get(metric, metric)
    return f"{'validation' if kind == 'eval' else 'training'} {name}{'' if metric == 'loss' else ', %'}"


def columns_of(groups: Sequence[Group]) -> list[str]:
    """The metric that is compared, and the loss."""
    metric = groups[0].metric
    return ["eval_top1" if metric == "loss" else f"eval_{metric}", "eval_loss"]


def write_curves(path: Path, groups: Sequence[Group]) -> None:
    with replacing(path) as file:
        file.write(draw(groups, columns_of(groups)))
