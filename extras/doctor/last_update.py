"""Examines the last update of a run, or saves it for the doctor."""

import copy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from configs.schema import Config
from configs.values import flatten
from datasets import Batch, Piece
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.trainer import Trainer
from extras.doctor.diagnosis import diagnose
from extras.doctor.overflow import DOCTOR_FILE, Batches, advice, make_case, prescribe, save_overflow
from utils.errors import cause_of
from utils.log import Log
from utils.seed import unchanged_random_state


def content_of(batches: list[Batch]) -> dict[str, Any]:
    """Return the images (uint8), targets and pieces of these batches."""
    return {
        "images": torch.cat([batch.images.cpu() for batch in batches]),
        "targets": torch.cat([batch.targets.cpu() for batch in batches]),
        "sizes": [len(batch.targets) for batch in batches],
        "pieces": [plain(batch.piece) for batch in batches],
    }


def plain(piece: Piece) -> dict[str, Any]:
    """Return a piece as plain values, because torch reads these files with weights_only."""
    return {**piece._asdict(), "indices": piece.indices.tolist(), "repeats": piece.repeats.tolist()}


def save_last_update(
    session: Session, plan: TrainPlan, get_state: Callable[[], dict[str, Any]], trainer: Trainer
) -> str:
    """Save the last update in every process. Return advice, or an empty text if it cannot be saved. Collective.

    `get_state`: the method state_dict of LastUpdate.
    """
    parallel, config, folder = trainer.parallel, plan.config, session.path
    facts = {
        **parallel.gather_state({"state_dict": parallel.local_state(trainer.model)}),
        "config": flatten(config),
        "seed": config.SEED,
        "class_names": list(plan.classes),
        "class_weights": plan.class_weights,
        "amp_scaler": trainer.precision.state_dict(),
    }
    try:
        return save_overflow(folder, trainer.process.rank, get_state(), facts)
    except (OSError, RuntimeError) as error:
        session.log.warn(f"cannot save the last batch in {folder} ({cause_of(error)})")
        return ""


def examine(
    config: Config, folder: Path, log: Log, step: int, batches: list[tuple[Batch, float]], trainer: Trainer
) -> str:
    """Return the finding and the remedy for the update of this step, or an empty string if the doctor fails."""
    try:
        update = Batches(step, trainer.process.rank, batches)
        with unchanged_random_state(trainer.process.device):
            model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
            trainer.transforms.revert(model)
            found = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
        is_written = bool(prescribe(found, config, folder))
    except Exception as error:  # for example, out of memory or a full disk; no error here ends the run
        log.warn(
            f"the doctor cannot examine step {step} ({type(error).__name__}: {error}); training continues without it"
        )
        return ""
    log.say(f"doctor: updates are skipped, the last one at step {step}. Replay of that step: {found.finding()}")
    path = shlex.quote(str(folder / DOCTOR_FILE))
    if is_written:
        settings = ", ".join(f"{name}: {value}" for name, value in found.prescription(config.PRECISION).items())
        outcome = "is finite" if found.is_fixed else "still breaks"
        log.say(f"doctor: {settings}; with these settings the replayed update {outcome}; to use them: -cfg {path}")
    return advice(found, path if is_written and found.is_fixed else None)
