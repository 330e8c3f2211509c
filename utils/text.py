"""How messages write quantities and tables."""

import math
from collections.abc import Sequence


def format_bytes(count: float) -> str:
    """1.5 GiB, 12 MiB; rounded up below a GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{math.ceil(count / 2**20):,} MiB"


def first_of(names: Sequence[str], separator: str = ", ", limit: int = 10, total: int | None = None) -> str:
    """The first names, and how many more there are. `total`: of all names, where not all are given."""
    total = len(names) if total is None else total
    more = f" and {total - limit:,} more" if total > limit else ""
    return separator.join(names[:limit]) + more


def counted(number: int, noun: str) -> str:
    """1 image, 1,437 images, 2 processes."""
    plural = "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row, columns two spaces apart; what looks like a number stands to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
