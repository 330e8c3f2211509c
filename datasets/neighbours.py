"""Finds the nearest neighbours of all points exactly, in much less time than comparing every pair.

The points are halved again and again, at the median of the principal axis along which they vary most (a k-d tree). A
point is compared with a part only if the box around the part is nearer than the neighbours that the point already has.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from utils.log import shown

PART = 512  # points in the smallest parts, at most
BLOCK = 512  # points that are compared with a part at once, so that their distances stay in the cache of the processor
# float32 products of matrices give squared distances with an error of less than 3e-6 of the squares of the coordinates.
# Comparisons allow for more than that, and the distances of the remaining pairs are computed again.
MARGIN = np.float32(1e-5)

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, their neighbours, squared distances (float32)


def nearest(points: np.ndarray, limits: np.ndarray, count: int, title: str) -> Pairs:
    """Return the `count` nearest points of each point within its limit, sorted by row, distance and number.

    `points`: float32 [N, D]. `limits`: the largest distances, float32 [N]. A point is a neighbour of itself. Of points
    at equal distances, the first ones are taken. `title` is the title of the progress bar.
    """
    if not len(points):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    # If more than `count` points are equal, only the first `count` of them can be neighbours of any point.
    _, places, sizes = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(places.ravel(), kind="stable")
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_first = np.arange(len(points)) - starts < count
    firsts, others = np.sort(order[is_first]), order[~is_first]
    rows, neighbours, squares = Search(points[firsts], limits[firsts], count).run(title)
    equal = order[starts[~is_first, None] + np.arange(count)]
    rows = np.concatenate([firsts[rows], np.repeat(others, count)])
    neighbours = np.concatenate([firsts[neighbours], equal.ravel()])
    squares = np.concatenate([squares, np.zeros(equal.size, np.float32)])
    by_row = np.argsort(rows, kind="stable")
    return rows[by_row], neighbours[by_row], squares[by_row]


class Search:
    """The search among points of which at most `count` are equal. It numbers the points in the order of the parts."""

    def __init__(self, points: np.ndarray, limits: np.ndarray, count: int):
        self.count, self.axes = count, {}
        centred = points - points.mean(0, np.float64)
        columns = np.linalg.eigh(centred.T @ centred)[1].T @ centred.T
        self.order = self._divide(columns)
        self.points, self.limits = points[self.order], limits[self.order] ** 2
        self.columns = columns[:, self.order]  # coordinates along the principal axes, float64 [D, N]
        self.smallest = np.full((len(points), count), np.inf, np.float32)  # squared distances of its pairs, sorted
        self.bounds = self.limits * (1 + MARGIN)  # no neighbour of a point has a larger squared distance
        self.pairs: list[Pairs] = []

    def run(self, title: str) -> Pairs:
        """Return the same as `nearest`."""
        num_points, num_axes = self.points.shape
        self._bound_within_parts()
        everywhere = np.full(num_axes, -np.inf), np.full(num_axes, np.inf)
        parts = self._visit(0, num_points, np.arange(num_points), np.zeros(num_points), everywhere)
        for _ in shown(parts, title, num_points, size=int):
            pass
        rows, others, squares = map(np.concatenate, zip(*self.pairs, strict=True))
        is_near = squares <= np.minimum(self.limits, self.smallest[:, -1])[rows]
        rows, others, squares = self.order[rows[is_near]], self.order[others[is_near]], squares[is_near]
        by_row = np.lexsort((others, squares, rows))
        rows, others, squares = rows[by_row], others[by_row], squares[by_row]
        is_chosen = ranks(rows) < self.count
        return rows[is_chosen], others[is_chosen], squares[is_chosen]

    def _divide(self, columns: np.ndarray) -> np.ndarray:
        """Return an order of the points in which each part is a slice. Store the axis along which a part is halved."""
        order, parts = np.arange(columns.shape[1]), [(0, columns.shape[1])]
        while parts:
            start, stop = parts.pop()
            if stop - start > PART:
                part, middle = order[start:stop], (start + stop) // 2
                axis = self.axes[start, stop] = int(columns[:, part].var(1).argmax())
                order[start:stop] = part[np.argpartition(columns[axis, part], middle - start)]
                parts += [(start, middle), (middle, stop)]
        return order

    def _bound_within_parts(self) -> None:
        """Lower the bounds to the distances of neighbours in the same part, so that fewer parts are compared."""
        edges = {0, len(self.points), *((start + stop) // 2 for start, stop in self.axes)}
        for start, stop in pairwise(sorted(edges)):
            if stop - start > self.count:
                part = self.points[start:stop] - self.points[start:stop].mean(0)
                lengths = (part**2).sum(1)
                squares = lengths[:, None] + lengths - 2 * part @ part.T
                last = np.partition(squares, self.count - 1)[:, self.count - 1]
                bounds = last.clip(0) * (1 + MARGIN) + MARGIN * (lengths + lengths.max())
                self.bounds[start:stop] = np.minimum(self.bounds[start:stop], bounds)

    def _visit(
        self, start: int, stop: int, rows: np.ndarray, gaps: np.ndarray, box: tuple[np.ndarray, np.ndarray]
    ) -> Iterator[int]:
        """Compare rows with the points from `start` to `stop`, and yield the number of points of each finished part.

        `box`: the lowest and the highest coordinates of these points. `gaps`: squared distances of the rows from it.
        """
        is_near = gaps <= self.bounds[rows]
        rows, gaps = rows[is_near], gaps[is_near]
        if stop - start <= PART:
            self._compare(start, stop, rows)
            yield stop - start
            return
        axis, middle = self.axes[start, stop], (start + stop) // 2
        values = self.columns[axis, rows]
        before = (values - values.clip(box[0][axis], box[1][axis])) ** 2
        for half in ((start, middle), (middle, stop)):
            lows, highs = box[0].copy(), box[1].copy()
            lows[axis], highs[axis] = self.columns[axis, slice(*half)].min(), self.columns[axis, slice(*half)].max()
            after = (values - values.clip(lows[axis], highs[axis])) ** 2
            yield from self._visit(*half, rows, gaps + (after - before), (lows, highs))

    def _compare(self, start: int, stop: int, rows: np.ndarray) -> None:
        """Add the pairs of a row and a point of the part whose distance is within the bound of the row."""
        centre = self.points[start:stop].mean(0)  # small coordinates have small errors
        part = self.points[start:stop] - centre
        # The product of the matrices `left` and `right` is the squared distance minus the bound.
        right = np.concatenate([-2 * part.T, [(part**2).sum(1) * (1 - MARGIN)], [np.ones(len(part), np.float32)]])
        left = np.ones((BLOCK, len(right)), np.float32)
        products, is_near = np.empty((BLOCK, len(part)), np.float32), np.empty((BLOCK, len(part)), bool)
        places = [np.zeros(0, np.int64)]  # in a matrix with all rows
        for first in range(0, len(rows), BLOCK):
            block = rows[first : first + BLOCK]
            size = len(block)
            points = np.subtract(self.points[block], centre, out=left[:size, :-2])
            left[:size, -1] = np.einsum("nd,nd->n", points, points) * (1 - MARGIN) - self.bounds[block]
            np.matmul(left[:size], right, out=products[:size])
            np.less_equal(products[:size], 0, out=is_near[:size])
            places.append(np.flatnonzero(is_near[:size]) + first * len(part))
        places = np.concatenate(places)
        self._add(rows[places // len(part)], start + places % len(part))

    def _add(self, rows: np.ndarray, others: np.ndarray) -> None:
        """Add pairs, sorted by row, and lower the bounds of the rows."""
        differences = self.points[rows].astype(np.float64) - self.points[others]
        squares = np.einsum("nd,nd->n", differences, differences).astype(np.float32)
        is_near = squares <= self.bounds[rows]
        rows, others, squares = rows[is_near], others[is_near], squares[is_near]
        self.pairs.append((rows, others, squares))
        changed, places = np.unique(rows, return_inverse=True)
        columns = ranks(rows)
        new = np.full((len(changed), int(columns.max(initial=-1)) + 1), np.inf, np.float32)
        new[places, columns] = squares
        smallest = np.sort(np.concatenate([self.smallest[changed], new], 1))[:, : self.count]
        self.smallest[changed] = smallest
        self.bounds[changed] = np.minimum(self.bounds[changed], smallest[:, -1] * (1 + MARGIN))


def ranks(rows: np.ndarray) -> np.ndarray:
    """Return the places of the elements among their equals, from 0. The rows are sorted."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)
