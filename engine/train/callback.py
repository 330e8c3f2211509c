"""The base class of callbacks, which observe the training."""

from datasets import Batch
from engine.evaluation.scores import Scores
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.errors import ConfigError


class Callback:
    """Observes the training. A callback changes no weights but may end the run. The base class ignores every event.

    The trainer calls its callbacks in list order. Each process has its own list. Most callbacks exist only in process 0
    (callback_list.py), so they must not call collectives. Read values of tensors only in `on_report`, because reading
    them in every update would synchronise host and device.
    """

    refusal: ConfigError | None = None  # set by a callback that stops the run because of an error that the user can fix

    def on_start_scored(self, trainer: Trainer, scores: Scores, seconds: float) -> None:
        """Called after the evaluation of the initial weights, which took `seconds`. No update has been made yet."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Called when epoch `trainer.epoch` begins, or continues after a resume."""

    def before_update(self, trainer: Trainer) -> None:
        """Called before each update, or before it is left out. The report of the previous update is complete."""

    def on_micro_batch(self, trainer: Trainer, batch: Batch, weight: float) -> None:
        """Called after the backward pass of a micro-batch. `weight` is the factor by which its loss was multiplied."""

    def on_update(self, trainer: Trainer) -> None:
        """Called after each update, done or skipped. `trainer.step` already includes it."""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Called after the first and the last update of an epoch, and every REPORT_FREQ updates between them."""

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        """Called after an epoch and, if one is due, its evaluation. `trainer.epoch` does not include the epoch yet."""

    def on_rollback(self, trainer: Trainer) -> None:
        """Called after the trainer has returned to an earlier state."""

    def on_non_finite(self, trainer: Trainer) -> str:
        """Return advice for the last message of a run that ends because of non-finite gradients. Collective."""
        return ""

    def should_stop(self, trainer: Trainer, updates_left: int) -> bool:
        """Return whether to save and end the run before this update. `updates_left`: remaining updates of the epoch."""
        return False

    def shortens_run(self, trainer: Trainer) -> bool:
        """Return whether the run continues with fewer updates although a callback asks to stop. Collective."""
        return False

    def close(self) -> None:
        """Called when the training has ended, also after an error, but not if a signal kills the process."""
