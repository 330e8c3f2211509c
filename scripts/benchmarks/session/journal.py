"""The results of a session: appended to session.md and session.jsonl at once, so that a session that is cut short keeps them."""

import json
import time
from pathlib import Path

MARKDOWN, LINES = "session.md", "session.jsonl"


class Journal:
    """What one part writes. Parts that run at once append whole lines to the same files."""

    def __init__(self, folder: Path, part: str, columns: tuple[str, ...] = ()):
        """`columns`: of a table that is open already."""
        self.folder, self.part, self._columns = folder, part, columns

    def heading(self, text: str) -> None:
        self._markdown(f"\n{text}\n")

    def columns(self, *names: str) -> None:
        """Begin a table."""
        self._columns = names
        self._markdown(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")

    def row(self, **values) -> None:
        """One result, under the columns of these names."""
        if tuple(values) != self._columns:
            self.columns(*values)
        self._append(LINES, json.dumps({"part": self.part, "time": now(), **values}))
        self._markdown(f"| {' | '.join(map(cell, values.values()))} |")

    def note(self, text: str) -> None:
        self._append(LINES, json.dumps({"part": self.part, "time": now(), "note": text}))
        self._columns = ()
        self._markdown(f"\n{text}")

    def _markdown(self, text: str) -> None:
        self._append(MARKDOWN, text)
        print(text, flush=True)

    def _append(self, name: str, text: str) -> None:
        with open(self.folder / name, "a") as file:
            file.write(text + "\n")


def cell(value) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
