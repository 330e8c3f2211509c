"""Which classes are recognised, and which are taken for which."""

import io
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.record.html import Markup, element, scrolling, section, table
from engine.record.page import picture
from engine.record.saved_run import SavedRun
from utils.text import counted

MOST_IN_MATRIX = 30  # classes in a table with a row for each; more become a picture
MOST_BINS = 250  # of the picture's sides
MOST_ROWS = 15  # of a table of classes or pairs
FEW = 12  # classes that are all shown


class Confusion(NamedTuple):
    """The cells of the confusion matrix that are not zero."""

    names: list[str]
    labels: np.ndarray
    predictions: np.ndarray
    counts: np.ndarray


def classes(run: SavedRun) -> list[Markup]:
    """Nothing without results, or if they are not those of one evaluation."""
    record = run.json("results.json")
    if not record:
        return []
    rows = run.table("per_class.csv")
    confusion = read_confusion(run, [row["class"] for row in rows if "class" in row])
    parts: list[Markup | None] = []
    if record.get("epoch") != run.best.epoch and isinstance(record.get("epoch"), int):
        parts.append(
            element("p", f"Of epoch {record['epoch']}, the best one when these figures were written.", class_="soft")
        )
    if confusion and len(confusion.names) > 1:
        small = len(confusion.names) <= MOST_IN_MATRIX
        parts += [_matrix(confusion)] if small else [_map(confusion), *_pairs(confusion)]
    found = [section("What is taken for what", *parts)] if confusion and len(confusion.names) > 1 else []
    return [*found, *_class_table(rows)]


def read_confusion(run: SavedRun, names: list[str]) -> Confusion | None:
    """confusion.csv: a matrix, or with very many classes a list of its cells."""
    rows = run.cells("confusion.csv")
    if len(rows) < 2:
        return None
    try:
        if rows[0] == ["label", "prediction", "count"]:
            number = {name: index for index, name in enumerate(names)}
            found = [(number[label], number[prediction], int(count)) for label, prediction, count in rows[1:]]
            return Confusion(names, *np.array(found, np.int64).T)
        matrix = np.array([row[1:] for row in rows[1:]]).astype(np.int64)
        names = rows[0][1:]
        if matrix.shape != (len(names), len(names)):
            return None
    except (ValueError, KeyError):  # cut off, or edited
        return None
    labels, predictions = np.nonzero(matrix)
    return Confusion(names, labels, predictions, matrix[labels, predictions])


def _totals(confusion: Confusion) -> np.ndarray:
    return np.bincount(confusion.labels, confusion.counts, minlength=len(confusion.names))


def _matrix(confusion: Confusion) -> Markup:
    """A table with the counts, darker where it is a larger share of its row."""
    names, totals = confusion.names, _totals(confusion)
    cells = {
        (row, column): count for row, column, count in zip(*(each.tolist() for each in confusion[1:]), strict=True)
    }

    def cell(row: int, column: int) -> Markup:
        count = cells.get((row, column), 0)
        level = min(4, 1 + int(4 * count / totals[row])) if count else 0
        kind = f"{'r' if row == column else 'w'}{level}" if count else "zero"
        return element("td", f"{count:,}", class_=kind)

    head = [element("th", "label", scope="col"), *(element("th", name, scope="col", title=name) for name in names)]
    body = [
        element(
            "tr", element("th", name, scope="row", title=name), *(cell(row, column) for column in range(len(names)))
        )
        for row, name in enumerate(names)
    ]
    content = element("table", element("thead", element("tr", *head)), element("tbody", *body), class_="matrix")
    told = element("p", "Rows are labels, columns predictions; what is not on the diagonal is wrong.", class_="soft")
    return Markup(told + scrolling(content, "Confusion matrix"))


def _map(confusion: Confusion) -> Markup:
    """A picture of all classes, several in a pixel where there are more than MOST_BINS."""
    number = len(confusion.names)
    bins = min(number, MOST_BINS)
    rows, columns = (each * bins // number for each in (confusion.labels, confusion.predictions))
    share = confusion.counts / np.maximum(_totals(confusion)[confusion.labels], 1)
    right = confusion.labels == confusion.predictions
    layers = [np.zeros((bins, bins)) for _ in range(2)]
    for layer, chosen in zip(layers, (right, ~right), strict=True):
        np.add.at(layer, (rows[chosen], columns[chosen]), share[chosen])
    per_bin = max(number / bins, 1)
    strength = [np.minimum(layers[0] / per_bin, 1), np.minimum(np.sqrt(layers[1] / per_bin), 1)]
    wrong_wins = (layers[1] > 0) & (layers[0] == 0)
    pixels = np.zeros((bins, bins, 4), np.uint8)
    pixels[:] = (56, 135, 205, 0)
    pixels[wrong_wins] = (220, 80, 45, 0)
    pixels[..., 3] = np.round(255 * np.where(wrong_wins, strength[1], strength[0]))
    alt = f"Confusion matrix of {number:,} classes: rows are labels, columns predictions"
    several = f", {number / bins:.0f} classes to a point" if number > bins else ""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    told = f"Rows are labels, columns predictions{several}; blue is right, orange wrong."
    return Markup(element("p", told, class_="soft") + picture(content.getvalue(), "png", alt, "pixels"))


def _pairs(confusion: Confusion) -> Iterator[Markup]:
    """The pairs of classes that are confused most."""
    totals = _totals(confusion)
    wrong = np.flatnonzero(confusion.labels != confusion.predictions)
    wrong = wrong[np.lexsort((-confusion.counts[wrong] / totals[confusion.labels[wrong]], -confusion.counts[wrong]))]
    if not len(wrong):
        return
    rows = []
    for index in wrong[:MOST_ROWS].tolist():
        label, count = confusion.labels[index], int(confusion.counts[index])
        names = confusion.names[label], confusion.names[confusion.predictions[index]]
        rows.append((*names, f"{count:,}", f"{100 * count / totals[label]:.0f}%"))
    yield element("h3", "Confused most often")
    yield table(("label", "taken for", "images", "of the class"), rows, "Pairs confused most often", numbers=(2, 3))


def _class_table(rows: list[dict[str, str]]) -> list[Markup]:
    """The classes with the smallest F1; all if there are few."""
    rated = [row for row in rows if row.get("count", "0") not in ("", "0")]
    if len(rated) < 2:
        return []
    rated.sort(key=lambda row: float(row.get("f1") or 0))
    shown = rated if len(rated) <= FEW else rated[:MOST_ROWS]
    cells = []
    for row in shown:
        taken = row.get("taken_for") or ""
        times = f" ({row['times_taken_for']} of {row['count']})" if taken and row.get("times_taken_for") else ""
        shares = (_percent(row.get(name)) for name in ("f1", "recall", "precision"))
        cells.append((row["class"], *shares, row["count"], taken + times))
    columns = ["class", "F1", "recall", "precision", "images", "most often taken for"]
    if not any(row[-1] for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    everything = len(shown) == len(rated)
    title = "Classes, the worst first" if everything else "The worst classes"
    more = (
        None
        if everything
        else element("p", f"Of {counted(len(rated), 'class')} with images; all: per_class.csv.", class_="soft")
    )
    return [section(title, more, table(columns, cells, title, numbers=range(1, 5)))]


def _percent(share: str | None) -> str:
    try:
        return f"{100 * float(share):.1f}%" if share else ""
    except ValueError:
        return ""
