"""The doctor's callbacks in a run.

The callbacks keep the last update, examine it if updates are skipped, and save it if the run stops because gradients
are not finite. The code that examines and saves is imported late, because most runs skip few updates.
"""

from collections.abc import Callable
from pathlib import Path

from configs.schema import Config
from datasets import Batch
from engine.parallel import is_sharded
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.log import Log


def doctor_callbacks(session: Session, plan: TrainPlan) -> tuple[list[Callback], Callable[[], str] | None]:
    """Return the callbacks of this process, and a function that returns the doctor's advice.

    Processes without a doctor get None instead of the function.
    """
    last_update = LastUpdate()
    callbacks = [last_update, KeepLastUpdate(session, plan, last_update)]
    # The doctor runs in process 0 and copies the whole model, so a sharded run has no doctor.
    if not session.process.is_first or is_sharded(plan.config, session.process):
        return callbacks, None
    doctor = AutoDoctor(plan.config, session.path, session.log, last_update)
    return [*callbacks, doctor], doctor.get_advice


class LastUpdate(Callback):
    """Keeps the batches of the last update, as references to the loader's tensors, not as copies."""

    def __init__(self):
        self.step, self._batches, self._shares = 0, [], []

    def on_window(self, trainer: Trainer) -> None:
        self.step, self._batches, self._shares = trainer.step, [], []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        self._batches.append(batch)
        self._shares.append(share)

    def batches(self) -> list[tuple[Batch, float]]:
        """Return the batches, each with its weight in the loss of the update."""
        return list(zip(self._batches, self._shares, strict=True))

    def state_dict(self) -> dict:
        """Return images (uint8) and targets of all micro-batches, and the pieces that determine mixing and erasing."""
        from extras.doctor.overflow import content_of

        return {"step": self.step, "shares": self._shares, **content_of(self._batches)}


class KeepLastUpdate(Callback):
    """Saves the last update, in every process, when the run stops because gradients are not finite."""

    def __init__(self, session: Session, plan: TrainPlan, last_update: LastUpdate):
        self._session, self._plan, self._last_update = session, plan, last_update

    def on_non_finite(self, trainer: Trainer) -> str:
        from extras.doctor.overflow import save_last_update

        return save_last_update(self._session, self._plan, self._last_update.state_dict, trainer)


class AutoDoctor(Callback):
    """Examines the last update once, on a copy of the model, after `SKIPS` consecutive skipped updates."""

    SKIPS = 10

    def __init__(self, config: Config, folder: Path, log: Log, last_update: LastUpdate):
        self._config, self._folder, self._log, self._last_update = config, folder, log, last_update
        self._advice: str | None = None  # None: not examined yet

    def get_advice(self) -> str:
        """Return the finding and the remedy, or an empty string if nothing was examined."""
        return self._advice or ""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        enough = min(self.SKIPS, self._config.PRECISION.MAX_CONSECUTIVE_SKIPS)
        if self._advice is None and report.skips_in_a_row >= enough:
            from extras.doctor.overflow import examine

            batches = self._last_update.batches()
            self._advice = examine(self._config, self._folder, self._log, self._last_update.step, batches, trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self._advice = None
