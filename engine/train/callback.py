"""Callbacks: what watches the training."""

from typing import TYPE_CHECKING

from torch import Tensor

from datasets import Batch
from engine.evaluation.scores import Scores
from engine.train.counters import EpochResult, Report
from utils.errors import ConfigError

if TYPE_CHECKING:
    from engine.train.trainer import Trainer

# The phases of an update, in order; "data" to "other" repeat for each micro-batch. "copy" is what is left of the way to the
# device (where it has streams, loading/workers.py has copied ahead), normalising and mixing; "communication" is the part of
# the backward that only waits for the all-reduce.
PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")


class Callback:
    """Watches the training: it changes no weights, but may end the run. The base class ignores every event.

    The trainer calls its callbacks in list order. Each process has its own list, and most callbacks are in that of process 0
    only (callback_list.py): they call no collective. Read values of tensors only in `on_report`: reading them in every
    update would synchronise host and device.
    """

    refusal: ConfigError | None = None  # why it stops the run, if that is a mistake of the user

    def on_start_scored(self, trainer: "Trainer", scores: Scores, seconds: float) -> None:
        """Before the first update, where the weights know all classes: they were evaluated, which took so long."""

    def on_epoch_start(self, trainer: "Trainer") -> None:
        """Epoch `trainer.epoch` begins, or continues after a resume."""

    def on_window(self, trainer: "Trainer") -> None:
        """An update begins, or is repeated with smaller micro-batches."""

    def on_phase(self, trainer: "Trainer", name: str) -> None:
        """A phase of the update begins and lasts until the next one."""

    def on_loss(self, trainer: "Trainer", loss: Tensor, is_last: bool) -> None:
        """The backward of a micro-batch follows; `is_last`: it synchronises the gradients."""

    def on_micro_batch(self, trainer: "Trainer", batch: Batch, share: float) -> None:
        """Forward and backward of a micro-batch are done; `share`: its weight in the loss of the update."""

    def on_update(self, trainer: "Trainer") -> None:
        """An update is done or skipped; `trainer.step` already includes it."""

    def on_report(self, trainer: "Trainer", report: Report) -> None:
        """The counters were read: after the first update of an epoch, every REPORT_FREQ updates, and after the last."""

    def on_epoch_end(self, trainer: "Trainer", result: EpochResult) -> None:
        """The epoch is trained, and evaluated if due; `trainer.epoch` does not include it yet."""

    def on_rollback(self, trainer: "Trainer") -> None:
        """The trainer returned to an earlier state."""

    def on_non_finite(self, trainer: "Trainer") -> str:
        """The run stops because of gradients that are not finite. Returns advice for the reason that it gives. Collective."""
        return ""

    def should_stop(self, trainer: "Trainer", updates_left: int) -> bool:
        """Called before each update: whether the run must save and end. `updates_left`: in this epoch."""
        return False

    def choose(self, trainer: "Trainer") -> int:
        """Called before each update: of how many updates the run is to be; 0: of as many as before."""
        return 0

    def on_choice(self, trainer: "Trainer") -> None:
        """The run has another number of updates from this step on; no update has used it yet."""

    def close(self) -> None:
        """The training ends, also by an error, but not by a signal that ends the process at once."""
