"""Writes TensorBoard's files to the run's folder."""

from collections.abc import Sequence
from typing import Any

from extras.trackers.tracker import Ending, Row, Tracker


class TensorBoard(Tracker):
    """Writes TensorBoard's files. A resumed run discards earlier figures for its first step and later steps."""

    _writer = None
    _first_step = 0

    def open(self) -> str:
        return ""  # TensorBoard is imported at the first row, because the import takes a second of CPU time

    def go_back(self, step: int, epoch: int) -> None:
        if self._writer:
            self._writer.close()
        self._writer, self._first_step = None, step
        self.last = {"step": step - 1, "epoch": epoch - 1}

    def add(self, rows: Sequence[Row]) -> None:
        writer = self._open_writer()
        for row in rows:
            for name, value in row.figures.items():
                writer.add_scalar(name, value, row.number)
        writer.flush()

    def _open_writer(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._first_step)
        return self._writer

    def end(self, ending: Ending) -> None:
        if self._writer is None:
            return
        writer = self._open_writer()
        import numpy
        from PIL import Image

        for path in ending.pictures:
            with Image.open(path, formats=("PNG",)) as picture:
                writer.add_image(path.stem, numpy.asarray(picture.convert("RGB")), dataformats="HWC")
        writer.close()
