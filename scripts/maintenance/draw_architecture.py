"""Draw docs/images/architecture.png from the imports:  python scripts/maintenance/draw_architecture.py"""

import argparse
import ast
import textwrap
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent.parent
FLOORS = [["main_single_gpu", "main_multi_gpu"], ["engine"], ["models", "datasets"], ["configs"], ["utils"]]
COLOURS = {"engine": "#dbe8f6", "models": "#dff0dc", "datasets": "#fdebd0", "configs": "#ece2f3", "utils": "#ebebeb"}
WIDTH, TITLE, LINE, GAP = 100.0, 4.3, 1.55, 3.0  # of the picture; heights of text, and of the space for an arrow


def location(box: str) -> Path:
    path = ROOT / box.replace(".", "/")
    return path if path.is_dir() else path.with_suffix(".py")


@cache
def imported(box: str) -> str:
    """Dotted names of everything that a room, a package or a file imports, each as " name."."""
    files = location(box).rglob("*.py") if location(box).is_dir() else [location(box)]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = [f"{node.module}.{each.name}" for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    names += [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    return "".join(f" {name}." for name in names)


def arrows_between(boxes: list[str]) -> dict[str, set[str]]:
    """Which boxes import which, without the arrows that follow from others."""
    arrows = {box: {to for to in boxes if to != box and f" {to}." in imported(box)} for box in boxes}
    below: dict[str, set[str]] = {}
    for box in TopologicalSorter(arrows).static_order():  # a circle is an error
        below[box] = arrows[box].union(*(below[to] for to in arrows[box]))
    return {box: {to for to in arrows[box] if not any(to in below[over] for over in arrows[box])} for box in boxes}


def own_files(room: str) -> list[str]:
    return sorted(path.stem for path in location(room).glob("*.py") if path.stem != "__init__")


def rows_inside(box: str) -> list[list[str]]:
    """What a room holds, from top to bottom: each box stands above all that it imports."""
    inner = [f"{box}.{path.parent.name}" for path in location(box).glob("*/__init__.py")] if box in COLOURS else []
    inner += [f"{box}.{name}" for name in own_files(box)] if box == "engine" else []  # they tell the story of a run
    arrows, rows, centre = arrows_between(sorted(inner)), [], {}
    (sorter := TopologicalSorter(arrows)).prepare()
    while sorter.is_active():
        rows.insert(0, list(sorter.get_ready()))
        sorter.done(*rows[0])
    for row in rows:  # each box below those that import it, so that few arrows cross
        row.sort(key=lambda box: (mean([centre[over] for over in arrows if box in arrows[over]] or [0.5]), box))
        centre |= {box: (i + 0.5) / len(row) for i, box in enumerate(row)}
    return rows


def text_of(box: str, width: float) -> list[str]:
    """The sentence that a box's code opens with, and the files of a room that have no box."""
    file = location(box) / "__init__.py" if location(box).is_dir() else location(box)
    first_line = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).split("\n")[0]
    lines = textwrap.wrap(first_line, int((width - 3) * 1.48))
    files = ", ".join(own_files(box)) if box in COLOURS and box != "engine" else ""
    return lines + textwrap.wrap(files, int((width - 3) * 1.48), initial_indent="Files: ")


def height_of(row: list[str], width: float) -> float:
    width = width / len(row) - 2
    insides = [sum(height_of(inner, width) + GAP for inner in rows_inside(box)) for box in row]
    return max(TITLE + LINE * len(text_of(box, width)) + inside for box, inside in zip(row, insides, strict=True))


def draw_box(axes: Axes, box: str, place: tuple[float, float, float, float]) -> dict[str, set[str]]:
    left, bottom, width, height = place
    lines, top, style = text_of(box, width), bottom + height, "round,pad=0,rounding_size=0.7"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, style, facecolor=COLOURS.get(box, "white")))
    axes.text(left + 1, top - 0.8, location(box).name, size=12, weight="bold", va="top")
    axes.text(left + 1, top - 3.4, "\n".join(lines), size=9.3, va="top", linespacing=1.18)
    return draw_rows(axes, rows_inside(box), (left, top - TITLE - LINE * len(lines), width))


def draw_rows(axes: Axes, rows: list[list[str]], corner: tuple[float, float, float]) -> dict[str, set[str]]:
    left, top, width = corner
    places: dict[str, tuple[float, float, float, float]] = {}  # left, bottom, width, height
    for row in rows:
        share, height = width / len(row), height_of(row, width)
        places |= {box: (left + i * share + 1, top - height, share - 2, height) for i, box in enumerate(row)}
        top -= height + GAP
    drawn = arrows_between(list(places))
    for box, (start, bottom, wide, _) in places.items():
        for end, low, other_wide, high in (places[to] for to in drawn[box]):
            shared = max(start, end), min(start + wide, end + other_wide)  # where one stands above the other
            tail, tip = (sum(shared) / 2,) * 2 if shared[0] < shared[1] else (start + wide / 2, end + other_wide / 2)
            style = {"lw": 1.2, "mutation_scale": 14} if "." in box else {"lw": 2.2, "mutation_scale": 19}
            axes.add_patch(
                FancyArrowPatch((tail, bottom), (tip, low + high), arrowstyle="-|>", color="#66717d", **style)
            )
        drawn |= draw_box(axes, box, places[box])
    return drawn


def draw(path: Path) -> dict[str, set[str]]:
    """Draw the picture into a file; returns the boxes and arrows in it."""
    height = 2 + sum(height_of(floor, WIDTH) + GAP for floor in FLOORS)
    figure = Figure(figsize=(WIDTH / 10, height / 10), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, height), frameon=False, xticks=[], yticks=[])
    drawn = draw_rows(axes, FLOORS, (0, height - 1, WIDTH))
    axes.text(1, 1.5, "An arrow points at what is imported. Every room may import utils.", size=9.3)
    arrows = "; ".join(f"{box}: {', '.join(sorted(drawn[box]))}" for box in sorted(drawn))
    figure.savefig(path, metadata={"Arrows": arrows})  # for the test that the picture is up to date
    return drawn


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    draw(ROOT / "docs" / "images" / "architecture.png")
