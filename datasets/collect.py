"""Process strings on their way into an index: encode them, number distinct strings, and find equal rows."""

import os
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np


def encoded(values: list[str]) -> list[bytes]:
    """Encode strings as os.fsencode does, but all at once, because that is much faster."""
    together = os.fsencode("\n".join(values)).split(b"\n")
    return together if len(together) == len(values) else [os.fsencode(value) for value in values]


class Distinct:
    """Distinct strings, such as classes or folders, in order of first occurrence, each with its first row and line."""

    def __init__(self):
        self.numbers: dict[str, int] = {}
        self.rows, self.lines, self.num_rows = array("Q"), array("Q"), 0

    def add(self, values: Sequence[str], lines: np.ndarray) -> np.ndarray:
        """Add the values of the next rows. Return the number of each value as uint32."""
        numbers, before = self.numbers, len(self.numbers)
        found = np.fromiter((numbers.setdefault(each, len(numbers)) for each in values), np.uint32, len(values))
        if len(numbers) > before:
            new, places = np.unique(found, return_index=True)
            places = places[new >= before]
            self.rows.extend((places + self.num_rows).tolist())
            self.lines.extend(lines[places].tolist())
        self.num_rows += len(values)
        return found


class RowHashes:
    """The 64-bit hashes of strings, to find equal strings without keeping them in memory."""

    def __init__(self):
        self._all = array("q")  # grows in place; many small arrays would fragment the memory

    def add(self, values: Sequence[str] | Sequence[bytes]) -> None:
        # Python's own hash differs between processes, which does not matter here.
        self._all.frombytes(np.fromiter(map(hash, values), np.int64, len(values)).tobytes())

    def take(self) -> np.ndarray:
        """Return all hashes, and remove them from this object."""
        found, self._all = self._all, array("q")
        return np.frombuffer(found, np.int64)


def equal_rows(hashes: np.ndarray, text: Callable[[int], Hashable]) -> Iterator[list[int]]:
    """Yield the rows of each string that occurs more than once, in order. `text(row)` returns the string of a row."""
    in_order = np.sort(hashes)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    del in_order
    if not len(repeated):
        return
    found = [
        start + np.flatnonzero(_is_among(hashes[start : start + 2**20], repeated))
        for start in range(0, len(hashes), 2**20)
    ]
    rows = np.concatenate(found)
    rows = rows[np.argsort(hashes[rows], kind="stable")]
    ends = np.append(np.flatnonzero(np.diff(hashes[rows])) + 1, len(rows))
    start = 0
    for end in ends:
        by_text: dict[Hashable, list[int]] = {}
        for row in rows[start:end].tolist():
            by_text.setdefault(text(row), []).append(row)
        yield from (each for each in by_text.values() if len(each) > 1)
        start = end


def _is_among(values: np.ndarray, sorted_values: np.ndarray) -> np.ndarray:
    places = np.searchsorted(sorted_values, values)
    return sorted_values[np.minimum(places, len(sorted_values) - 1)] == values
