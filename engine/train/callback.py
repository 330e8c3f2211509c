"""The base class of callbacks, which watch the training."""

from typing import TYPE_CHECKING

from torch import Tensor

from datasets import Batch
from engine.evaluation.scores import Scores
from engine.train.counters import EpochResult, Report
from utils.errors import ConfigError

if TYPE_CHECKING:
    from engine.train.trainer import Trainer

# The phases of an update. All but "communication" and "optimizer" repeat for each micro-batch. "copy" is the copy to
# the device, if it was not prefetched (loading/to_device.py), normalising and mixing. "communication" is the part of
# the backward pass that only waits for the all-reduce.
PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")


class Callback:
    """Watches the training. It changes no weights, but may end the run. The base class ignores every event.

    The trainer calls its callbacks in list order. Each process has its own list. Most callbacks exist only in process 0
    (callback_list.py), so they must not call collectives. Read values of tensors only in `on_report`, because reading
    them in every update would synchronise host and device.
    """

    refusal: ConfigError | None = None  # the error with which it stops the run, if the user can fix it

    def on_start_scored(self, trainer: "Trainer", scores: Scores, seconds: float) -> None:
        """The initial weights were evaluated, which took this many seconds. No update has been made yet."""

    def on_epoch_start(self, trainer: "Trainer") -> None:
        """Epoch `trainer.epoch` begins, or continues after a resume."""

    def on_window(self, trainer: "Trainer") -> None:
        """An update begins, or is repeated with smaller micro-batches."""

    def on_phase(self, trainer: "Trainer", name: str) -> None:
        """A phase of the update begins and lasts until the next one."""

    def on_loss(self, trainer: "Trainer", loss: Tensor, is_last: bool) -> None:
        """The backward pass of a micro-batch is next. If `is_last`, it synchronises the gradients."""

    def on_micro_batch(self, trainer: "Trainer", batch: Batch, share: float) -> None:
        """Forward and backward of a micro-batch are done. `share` is its weight in the loss of the update."""

    def on_update(self, trainer: "Trainer") -> None:
        """An update is done or skipped. `trainer.step` already includes it."""

    def on_report(self, trainer: "Trainer", report: Report) -> None:
        """The counters were read: after the first update of an epoch, every REPORT_FREQ updates, and after the last."""

    def on_epoch_end(self, trainer: "Trainer", result: EpochResult) -> None:
        """The epoch is trained, and evaluated if due. `trainer.epoch` does not include it yet."""

    def on_rollback(self, trainer: "Trainer") -> None:
        """The trainer returned to an earlier state."""

    def on_non_finite(self, trainer: "Trainer") -> str:
        """Non-finite gradients end the run. Return advice for its last message. Collective."""
        return ""

    def should_stop(self, trainer: "Trainer", updates_left: int) -> bool:
        """Return whether to save and end the run before this update. `updates_left`: remaining updates of the epoch."""
        return False

    def choose(self, trainer: "Trainer") -> int:
        """Return the new total number of updates, or 0 to keep the current one. Called before each update."""
        return 0

    def on_choice(self, trainer: "Trainer") -> None:
        """The total number of updates has changed. No update has used the new schedule yet."""

    def close(self) -> None:
        """The training has ended, also after an error, but not if a signal ends the process at once."""
