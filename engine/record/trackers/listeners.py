"""What a tracker gets, and TensorBoard. The trackers on servers have files of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = "halfstep"  # of all runs on a server, unless the server's own settings name another


class TrackedRow(NamedTuple):
    """Metrics of one update ("step") or one epoch, with their names on a tracker."""

    axis: str
    number: int  # number of the update or epoch
    figures: Mapping[str, float]


class Start(NamedTuple):
    """The run starts at this update and epoch, or went back to them."""

    step: int
    epoch: int


class Ending(NamedTuple):
    """How a run ended. `state`: done, failed, or stopped (it can be resumed)."""

    state: str
    best: Mapping[str, Any]  # the figures of the best epoch; empty if there is none
    pictures: Sequence[Path]


class Listener:
    """Connects to a tracker when it is made, and then sends it rows, in a thread of its own.

    Any error ends the listener, not the run. Its arguments are the run's folder, its settings without secrets, and its
    `identity`, if an earlier start sent something.
    """

    # The ID of the run on the tracker. None: the tracker has only files in the run's folder.
    identity: str | None = None
    place: str = ""  # where to see the run, for the log
    may_have_lost_rows: bool = False  # rows that an earlier start sent

    def go_back(self, step: int) -> bool:
        """Delete the figures of this update and later ones. Return False if the tracker cannot delete figures."""
        return False

    def add(self, rows: Sequence[TrackedRow]) -> None:
        raise NotImplementedError

    def end(self, ending: Ending) -> None:
        raise NotImplementedError


class TensorBoard(Listener):
    """Writes TensorBoard's files. A resumed run discards earlier figures for its first step and later steps."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], identity: str | None):
        self._folder, self._first_step = folder / "tensorboard", 0
        self._writer: Any = None  # made for the first row, because the import takes a second of CPU time

    def go_back(self, step: int) -> bool:
        if self._writer:
            self._writer.close()
        self._writer, self._first_step = None, step
        return True

    def add(self, rows: Sequence[TrackedRow]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        for row in rows:
            for name, value in row.figures.items():
                self._writer.add_scalar(name, value, row.number)
        self._writer.flush()

    def end(self, ending: Ending) -> None:
        if self._writer is None:
            return
        import numpy
        from PIL import Image

        for path in ending.pictures:
            with Image.open(path, formats=("PNG",)) as picture:
                self._writer.add_image(path.stem, numpy.asarray(picture.convert("RGB")), dataformats="HWC")
        self._writer.close()
