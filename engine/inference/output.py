"""What becomes of predictions: lines on stdout, a bar on stderr, tables and sheets. Only the first process writes."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.inference.pictures import Sheet
from engine.inference.predictor import Prediction
from engine.inference.tables import as_csv, as_json, write_table
from utils.program import nobody_reads


class Output:
    """Takes the predictions one by one, and writes tables at the end."""

    def __init__(self, paths: Sequence[str], *, is_first: bool, may_stop: bool, files: dict[str, Path | None]):
        """`may_stop`: end with BrokenPipeError once nobody reads stdout, as in `| head`, unless a file is to be written;
        `files`: those of csv, json and sheet, None for those that are not wanted.
        """
        self.paths, self.is_first, self.files = paths, is_first, files
        self.sheet = Sheet(files["sheet"]) if files["sheet"] and is_first else None
        self._keeps = is_first and bool(files["csv"] or files["json"])
        self._may_stop = may_stop and not any(files.values())
        self._kept: list[Prediction] = []
        self._is_read = bytearray(len(paths))
        self._bar = tqdm(
            total=len(paths), unit="image", file=sys.stderr, disable=not (is_first and sys.stderr.isatty())
        )

    @property
    def num_unreadable(self) -> int:
        return len(self.paths) - sum(self._is_read)

    def add(self, prediction: Prediction) -> None:
        self._is_read[prediction.index] = 1
        if not self.is_first:
            return
        self._print(prediction)
        self._bar.update()
        if self.sheet:
            self.sheet.add(prediction)
        if self._keeps:
            self._kept.append(prediction._replace(picture=None))

    def close(self, facts: dict[str, Any]) -> None:
        """`facts`: the model and its preprocessing, for the JSON document."""
        self._bar.close()
        if self.sheet:
            self.sheet.close()
        if self._keeps and self.files["csv"]:
            write_table(self.files["csv"], as_csv(self._kept))
        if self._keeps and self.files["json"]:
            unreadable = [path for path, is_read in zip(self.paths, self._is_read, strict=True) if not is_read]
            write_table(self.files["json"], as_json(self._kept, facts, unreadable))

    def _print(self, prediction: Prediction) -> None:
        line = "\t".join([prediction.path, *(f"{each.name}\t{each.probability:.4f}" for each in prediction.guesses)])
        try:
            # Above the bar, where stdout is the terminal too.
            print(line) if self._bar.disable or not sys.stdout.isatty() else self._bar.write(line)
        except BrokenPipeError:
            if self._may_stop or not nobody_reads():
                raise
