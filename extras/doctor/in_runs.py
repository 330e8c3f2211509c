"""The doctor's callbacks in a run.

The callbacks keep the last update, examine it if updates are skipped, and save it if the run stops because gradients
are not finite. The code that examines and saves is imported late, because most runs skip few updates.
"""

import copy
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from configs.schema import Config
from configs.values import flatten
from datasets import Batch, Piece
from engine.parallel import is_sharded
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.errors import cause_of
from utils.log import Log
from utils.seed import unchanged_random_state


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
        return {
            "step": self.step,
            "images": torch.cat([batch.images.cpu() for batch in self._batches]),
            "targets": torch.cat([batch.targets.cpu() for batch in self._batches]),
            "sizes": [len(batch.targets) for batch in self._batches],
            "pieces": [_plain(batch.piece) for batch in self._batches],
            "shares": self._shares,
        }


def _plain(piece: Piece) -> dict:
    """Return a piece as plain values, because torch reads these files with weights_only."""
    return {**piece._asdict(), "indices": piece.indices.tolist(), "repeats": piece.repeats.tolist()}


class KeepLastUpdate(Callback):
    """Saves the last update, in every process, when the run stops because gradients are not finite."""

    def __init__(self, session: Session, plan: TrainPlan, last_update: LastUpdate):
        self._session, self._plan, self._last_update = session, plan, last_update

    def on_non_finite(self, trainer: Trainer) -> str:
        from extras.doctor.overflow import save_overflow

        parallel, config, folder = trainer.parallel, self._plan.config, self._session.path
        facts = {
            **parallel.gather_state({"state_dict": parallel.local_state(trainer.model)}),
            "config": flatten(config),
            "seed": config.SEED,
            "class_names": list(self._plan.classes),
            "class_weights": self._plan.class_weights,
            "amp_scaler": trainer.precision.state_dict(),
        }
        try:
            return save_overflow(folder, trainer.process.rank, self._last_update.state_dict(), facts)
        except (OSError, RuntimeError) as error:
            self._session.log.warn(f"cannot save the last batch in {folder} ({cause_of(error)})")
            return ""


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
            self._advice = self._examine(trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self._advice = None

    def _examine(self, trainer: Trainer) -> str:
        """Return the finding and the remedy, or an empty string if the doctor fails."""
        log, config, device = self._log, self._config, trainer.process.device
        step = self._last_update.step
        try:
            from extras.doctor.diagnosis import diagnose
            from extras.doctor.overflow import DOCTOR_FILE, Batches, advice, make_case, prescribe

            update = Batches(step, trainer.process.rank, self._last_update.batches())
            with unchanged_random_state(device):
                model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
                trainer.transforms.revert(model)
                found = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
            is_written = bool(prescribe(found, config, self._folder))
        except Exception as error:  # for example, out of memory or a full disk; no error here ends the run
            log.warn(
                f"the doctor cannot examine step {step} ({type(error).__name__}: {error}); training continues "
                "without it"
            )
            return ""
        log.say(f"doctor: updates are skipped, the last one at step {step}. Replay of that step: {found.finding()}")
        path = shlex.quote(str(self._folder / DOCTOR_FILE))
        if is_written:
            settings = ", ".join(f"{name}: {value}" for name, value in found.prescription(config.PRECISION).items())
            outcome = "is finite" if found.is_fixed else "still breaks"
            log.say(f"doctor: {settings}; with these settings the replayed update {outcome}; to use them: -cfg {path}")
        return advice(found, path if is_written and found.is_fixed else None)
