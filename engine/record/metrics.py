"""metrics.csv and metrics.jsonl (a row per epoch), steps.csv (a row per report); a resumed run continues them."""

import csv
import io
import json
from pathlib import Path

from utils.files import write_text


class Metrics:
    """All rows so far. Values that were not measured in an epoch are empty."""

    def __init__(self, folder: Path, first_epoch: int):
        """Keeps the rows before `first_epoch` of an earlier start of this run."""
        self._folder = folder
        self.rows: list[dict] = []
        self.is_written = True
        written = folder / "metrics.jsonl"
        if written.exists():
            rows = [json.loads(line) for line in written.read_text().splitlines()]
            self.rows = [row for row in rows if row["epoch"] < first_epoch]

    def add(self, row: dict) -> None:
        """Add a row and write all: also those that found no room before."""
        self.rows.append(row)
        self.is_written = False
        self.write()

    def write(self) -> None:
        write_text(self._folder / "metrics.jsonl", "".join(json.dumps(each) + "\n" for each in self.rows))
        columns = list(dict.fromkeys(name for each in self.rows for name in each))
        table = io.StringIO()
        writer = csv.DictWriter(table, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self._folder / "metrics.csv", table.getvalue())
        self.is_written = True


class StepRows:
    """steps.csv: figures of single updates, one row every REPORT_FREQ."""

    def __init__(self, folder: Path, first_step: int, columns: tuple[str, ...]):
        """Keeps the rows before `first_step`, without a line that a kill cut off."""
        path = folder / "steps.csv"
        self._columns = columns
        self.rows: list[dict] = []
        if path.exists():
            with open(path, newline="") as file:
                rows = [row for row in csv.DictReader(file) if None not in row.values()]
            self.rows = [
                {name: float(row[name]) if row.get(name) else None for name in columns}
                for row in rows
                if int(row["step"]) < first_step
            ]
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(self._texts(row) for row in self.rows)
        write_text(path, table.getvalue())
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def add(self, row: dict) -> None:
        self.rows.append(row)
        print(",".join(self._texts(row)), file=self._file)

    def _texts(self, row: dict) -> list[str]:
        """Unknown values are empty."""
        return ["" if row[name] is None else f"{row[name]:.10g}" for name in self._columns]

    def close(self) -> None:
        self._file.close()
