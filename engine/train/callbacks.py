"""What may watch the training: a callback sees every step and changes none. CONTRIBUTING.md shows how to write one."""

from typing import TYPE_CHECKING

from torch import Tensor

from datasets import Batch
from engine.train.counters import EpochResult, Report

if TYPE_CHECKING:
    from engine.train.trainer import Trainer

# An update runs through them in this order, micro-batch by micro-batch from "data" to "other"; "communication" is the part
# of the backward in which only gradients travel.
PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")


class Callback:
    """Does nothing at every event. The trainer calls its callbacks in the order of its list, in each process.

    What needs a tensor's value waits for `on_report`: reading it in every update would make the host wait for the device.
    """

    def on_epoch_start(self, trainer: "Trainer") -> None:
        """Training begins, or goes on, in epoch `trainer.epoch`."""

    def on_window(self, trainer: "Trainer") -> None:
        """An update begins, or begins again with smaller micro-batches."""

    def on_phase(self, trainer: "Trainer", name: str) -> None:
        """A phase of the update begins; it lasts until the next one does."""

    def on_loss(self, trainer: "Trainer", loss: Tensor, is_last: bool) -> None:
        """The backward of a micro-batch is next; is_last: gradients are synchronised in it."""

    def on_micro_batch(self, trainer: "Trainer", batch: Batch, share: float) -> None:
        """A micro-batch went forward and backward, with this weight in the loss of the update."""

    def on_update(self, trainer: "Trainer") -> None:
        """An update is done, or skipped; `trainer.step` counts it already."""

    def on_report(self, trainer: "Trainer", report: Report) -> None:
        """The counters were read: after the first update of an epoch, every REPORT_FREQ, and after the last."""

    def on_epoch_end(self, trainer: "Trainer", result: EpochResult) -> None:
        """The epoch is trained, and evaluated if it is its turn; `trainer.epoch` does not count it yet."""

    def on_rollback(self, trainer: "Trainer") -> None:
        """The trainer went back to an earlier state."""

    def should_stop(self, trainer: "Trainer", updates_left: int) -> bool:
        """Asked before each update whether the run must save and end; `updates_left`: to the end of the epoch."""
        return False

    def close(self) -> None:
        """The run is over, however it ended."""
