"""metrics.csv and metrics.jsonl: one row an epoch, the same after a resume as if the run had never stopped."""

import csv
import io
import json
from pathlib import Path

from utils.files import write_text


class Metrics:
    """The rows so far. Percent are percent; what was not measured in an epoch is empty."""

    def __init__(self, folder: Path, first_epoch: int):
        """Takes up the rows of epochs before `first_epoch` that an earlier start of this run wrote."""
        self._folder = folder
        self.rows: list[dict] = []
        written = folder / "metrics.jsonl"
        if written.exists():
            rows = [json.loads(line) for line in written.read_text().splitlines()]
            self.rows = [row for row in rows if row["epoch"] < first_epoch]

    def add(self, row: dict) -> None:
        self.rows.append(row)
        write_text(self._folder / "metrics.jsonl", "".join(json.dumps(each) + "\n" for each in self.rows))
        columns = list(dict.fromkeys(name for each in self.rows for name in each))
        table = io.StringIO()
        writer = csv.DictWriter(table, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self._folder / "metrics.csv", table.getvalue())
