"""A comparison as Markdown."""

import re
from collections.abc import Sequence

from scripts.comparing.tables import Comparison, Table


def to_markdown(comparison: Comparison, pictures: Sequence[str] = ()) -> str:
    """`pictures`: files of the curves, as links."""
    parts = [f"# {comparison.title}"]
    if comparison.warning:
        parts.append(f"**Warning: {_text(comparison.warning)}**")
    parts.append(_text(comparison.result))
    for number, table in enumerate(comparison.tables):
        parts += [f"## {table.title}", _table(table)]
        if number == 0 and comparison.notes:
            parts.append("\n".join(f"- {_text(note)}" for note in comparison.notes))
    parts += [f"![curves](<{picture}>)" for picture in pictures]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" if cell else "" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    header = [_text(cell) for cell in table.header]
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _text(cell: str) -> str:
    """Names of files and values may have anything in them; in a table it stays text in one cell."""
    one_line = " ".join(str(cell).split())
    return re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", one_line)
