"""Keeps the last update of a run, saves and replays the batches of one that overflowed, and writes doctor.yaml."""

import copy
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from configs.values import flatten
from datasets import Batch, Piece, Preparation
from engine.plan import TrainPlan
from engine.precision.policy import Precision
from engine.session import Session
from engine.train.loss import Loss
from engine.train.trainer import Trainer
from extras.doctor.diagnosis import Case, Diagnosis, diagnose
from models.transforms import choose_transforms
from models.weights.torch_files import read_torch
from utils.errors import ConfigError, cause_of
from utils.files import Kind, replacing, write_text
from utils.log import Log
from utils.seed import unchanged_random_state

OVERFLOW_FILE = "overflow-batch.pth"
DOCTOR_FILE = "doctor.yaml"  # the settings that prevent the overflow
PRESCRIPTION = Kind("a file of scripts/doctor.py", (b"BASE: config.yaml\nPRECISION:", b"PRECISION:"))


@dataclass
class Batches:
    """The batches of one update in one process, from a run, a file or the data set."""

    step: int
    rank: int
    batches: list[tuple[Batch, float]]  # each with its weight in the update's loss
    state: dict = field(default_factory=dict)  # content of the file, with the run's weights and settings if it has them


def name_of(rank: int) -> str:
    """Return the name of a process's file. Each process has one, because the images of any process may be the cause."""
    return OVERFLOW_FILE if rank == 0 else f"overflow-batch-{rank}.pth"


def save_overflow(folder: Path, rank: int, last_update: dict, facts: dict) -> str:
    """Write the last update of this process; process 0 adds `facts`. Return a sentence on how to use the file.

    `last_update`: the state_dict of LastUpdate.
    """
    path = folder / name_of(rank)
    with replacing(path) as file:
        torch.save({**last_update, "rank": rank, **(facts if rank == 0 else {})}, file)
    return f"to see where it breaks: python scripts/doctor.py {shlex.quote(str(folder))}"


def read_overflow(path: Path) -> Batches:
    """Read a file that save_overflow wrote, or a hand-made file with uint8 `images` and `targets`."""
    if not path.is_file():
        raise ConfigError(
            f"-batch: there is no file {path}; a run writes {OVERFLOW_FILE} into its folder when it stops"
        )
    state = read_torch(path)
    images, targets = (state.get("images"), state.get("targets")) if isinstance(state, dict) else (None, None)
    if not (isinstance(images, Tensor) and isinstance(targets, Tensor)):
        raise ConfigError(
            f"-batch: {path} contains no batch (tensors `images` and `targets`); give a run's {OVERFLOW_FILE}"
        )
    sizes = state.get("sizes", [len(targets)])
    # Images at their own aspect ratio (DATA.TOKENS) are [B, N + 1, P * P * C].
    is_batch = images.dtype == torch.uint8 and images.ndim in (3, 4) and len(targets) == len(images) == sum(sizes) > 0
    if not is_batch:
        raise ConfigError(
            f"-batch: {path}: `images` must be uint8 [B, C, H, W] (with DATA.TOKENS: [B, N + 1, P * P * C]) with B at "
            "least 1, and `targets` must have B entries"
        )
    shares = state.get("shares", [size / len(targets) for size in sizes])
    pieces = state.get("pieces", [None] * len(sizes))
    split = zip(images.split(sizes), targets.split(sizes), pieces, shares, strict=True)
    batches = [(Batch(*tensors, len(tensors[0]), [], _piece(plain)), share) for *tensors, plain, share in split]
    return Batches(state.get("step", 0), state.get("rank", 0), batches, state)


def _piece(plain: dict | None) -> Piece | None:
    """Return the Piece that was saved as plain values. A hand-made batch has none, and is neither erased nor mixed."""
    return plain and Piece(**{**plain, "indices": np.array(plain["indices"]), "repeats": np.array(plain["repeats"])})


def make_case(
    config: Config, model: torch.nn.Module, prepare: Preparation, update: Batches, scale: float, loss: Loss
) -> Case:
    """Return an update of a run with these settings, to replay on `model`, which has no transforms yet.

    `prepare`, `loss`: the run's preparation and loss, on the device of the replay.
    """
    # Both replays use one model. A white list would bring half precision into the float32 replay, and naive mode has
    # no lists. float8 layers scale their inputs, so they cannot overflow.
    settings = replace(config.PRECISION, MODE="autocast", CUSTOM_WHITE_LIST=())
    config = replace(config, PRECISION=settings)
    precision = Precision(config, prepare.device)
    transforms = choose_transforms(config, prepare.device, precision.half)
    transforms.apply(model)
    return Case(
        model.to(prepare.device),
        precision,
        transforms,
        loss,
        [(*prepare(batch), share) for batch, share in update.batches],
        scale,
        (config.SEED, update.step, update.rank),
    )


def prescribe(found: Diagnosis, config: Config, folder: Path) -> str:
    """Write the settings that prevent the overflow, if any, to doctor.yaml. Return its text, or an empty string."""
    settings = [f"    {name}: {value}" for name, value in found.prescription(config.PRECISION).items()]
    if not settings:
        return ""
    base = ["BASE: config.yaml"] if (folder / "config.yaml").exists() else []
    text = "\n".join([*base, "PRECISION:", *settings]) + "\n"
    write_text(folder / DOCTOR_FILE, text)
    return text


def advice(found: Diagnosis, path: str | None) -> str:
    """Return one sentence with the finding and the remedies. `path`: doctor.yaml, if it prevents the overflow."""
    finding = f"the update breaks at {found.finding()}" if found.first else found.finding()
    if found.breaks_in_float32:
        return finding
    remedies = [f"-cfg {path}"] if path else []
    remedies += ["-amp_dtype bfloat16"] if found.half is torch.float16 else []
    return f"{finding}; try {' or '.join(remedies or ['a lower TRAIN.BASE_LR'])}"


# --- the last update of a run ---


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
