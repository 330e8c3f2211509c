"""Follows the tables of a run while it writes them: the rows that are new since the last look."""

import csv
import json
import os
from pathlib import Path
from typing import IO

from engine.record.board import Row


class Tables:
    """The rows of a run's folder behind a position: `epoch` and `step` of the last rows that were taken."""

    def __init__(self, folder: Path, epoch: int = -1, step: int = -1):
        self._folder, self.epoch, self.step = folder, epoch, step
        self._file: IO[str] | None = None
        self._columns: list[str] = []
        self._rest = ""  # the beginning of a line that is being written

    def status(self) -> dict:
        """status.json; {} where it cannot be read."""
        try:
            return json.loads((self._folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def new_epochs(self, all_of_them: bool) -> list[Row]:
        """The new rows of metrics.jsonl; unless `all_of_them`, only what a checkpoint holds.

        An epoch that no checkpoint holds is trained again after a kill, and its times differ then.
        """
        try:
            lines = (self._folder / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        saved = (self.status().get("saved") or {}).get("epoch", 0)
        rows = [json.loads(line) for line in lines]
        found = [row for row in rows if row["epoch"] > self.epoch and (all_of_them or row["epoch"] < saved)]
        if found:
            self.epoch = found[-1]["epoch"]
        return found

    def new_steps(self) -> list[Row]:
        """The new rows of steps.csv. A resumed or rolled-back run writes a new file, which repeats some."""
        found = self._read() if self._file else []
        if self._is_replaced():
            self._open()
            found += self._read()
        rows = []
        for row in found:
            if row["step"] > self.step:
                self.step = int(row["step"])
                rows.append(row)
        return rows

    def _is_replaced(self) -> bool:
        try:
            now = os.stat(self._folder / "steps.csv").st_ino
        except FileNotFoundError:
            return False
        return self._file is None or os.fstat(self._file.fileno()).st_ino != now

    def _open(self) -> None:
        if self._file:
            self._file.close()
        self._file = open(self._folder / "steps.csv", newline="")  # noqa: SIM115
        self._rest = ""
        self._columns = self._file.readline().strip().split(",")

    def _read(self) -> list[Row]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        return [
            {name: float(text) if text else None for name, text in zip(self._columns, values, strict=True)}
            for values in csv.reader(lines)
        ]
