"""Saves, reads and replays the batches of an update that overflowed, and writes doctor.yaml."""

import copy
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from configs.schema import Config
from configs.values import flatten
from datasets import Batch, Piece, Preparation
from engine.precision.policy import Precision
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
    state: dict = field(default_factory=dict)  # further content of the file, such as the run's weights and settings


def save_overflow(folder: Path, update: Batches) -> str:
    """Write the update of this process; process 0 adds its `state`. Return a sentence on how to use the file."""
    batches, shares = zip(*update.batches, strict=True)
    content = {
        "step": update.step,
        "rank": update.rank,
        "shares": list(shares),
        "images": torch.cat([batch.images.cpu() for batch in batches]),
        "targets": torch.cat([batch.targets.cpu() for batch in batches]),
        "sizes": [len(batch.targets) for batch in batches],
        # The pieces determine mixing and erasing. They are saved as plain values, because torch reads with weights_only.
        "pieces": [
            {**batch.piece._asdict(), "indices": batch.piece.indices.tolist(), "repeats": batch.piece.repeats.tolist()}
            for batch in batches
        ],
    }
    name = OVERFLOW_FILE if update.rank == 0 else f"overflow-batch-{update.rank}.pth"
    with replacing(folder / name) as file:
        torch.save(content | (update.state if update.rank == 0 else {}), file)
    return f"to see where it breaks: python scripts/doctor.py {shlex.quote(str(folder))}"


def read_overflow(path: Path) -> Batches:
    """Read a file that save_overflow wrote."""
    if not path.is_file():
        raise ConfigError(
            f"-batch: there is no file {path}; a run writes {OVERFLOW_FILE} into its folder when it stops"
        )
    state = read_torch(path)
    if not isinstance(state, dict) or not {"images", "targets", "sizes", "pieces", "shares"} <= state.keys():
        raise ConfigError(f"-batch: {path} contains no batch; give a run's {OVERFLOW_FILE}")
    batches = []
    for *tensors, plain, share in zip(
        state["images"].split(state["sizes"]),
        state["targets"].split(state["sizes"]),
        state["pieces"],
        state["shares"],
        strict=True,
    ):
        arrays = {name: np.array(plain[name]) for name in ("indices", "repeats")}
        batches.append((Batch(*tensors, len(tensors[0]), [], Piece(**plain | arrays)), share))
    return Batches(state["step"], state["rank"], batches, state)


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


# --- in a run ---


def save_last_update(config: Config, folder: Path, log: Log, update: Batches, trainer: Trainer) -> str:
    """Save the last update in every process. Return advice, or an empty text if it cannot be saved. Collective."""
    parallel = trainer.parallel
    update.state = {
        **update.state,
        **parallel.gather_state({"state_dict": parallel.local_state(trainer.model)}),
        "config": flatten(config),
        "seed": config.SEED,
        "amp_scaler": trainer.precision.state_dict(),
    }
    try:
        return save_overflow(folder, update)
    except (OSError, RuntimeError) as error:
        log.warn(f"cannot save the last batch in {folder} ({cause_of(error)})")
        return ""


def examine(config: Config, folder: Path, log: Log, update: Batches, trainer: Trainer) -> str:
    """Return the finding and the remedy for an update, or an empty string if the doctor fails."""
    try:
        with unchanged_random_state(trainer.process.device):
            model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
            trainer.transforms.revert(model)
            found = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
        is_written = bool(prescribe(found, config, folder))
    except Exception as error:  # for example, out of memory or a full disk; no error here ends the run
        log.warn(
            f"the doctor cannot examine step {update.step} ({type(error).__name__}: {error}); training continues without it"
        )
        return ""
    log.say(f"doctor: updates are skipped, the last one at step {update.step}. Replay of that step: {found.finding()}")
    path, remedies = shlex.quote(str(folder / DOCTOR_FILE)), []
    if is_written:
        settings = ", ".join(f"{name}: {value}" for name, value in found.prescription(config.PRECISION).items())
        outcome = "is finite" if found.is_fixed else "still breaks"
        log.say(f"doctor: {settings}; with these settings the replayed update {outcome}; to use them: -cfg {path}")
        remedies += [f"-cfg {path}"] if found.is_fixed else []
    finding = f"the update breaks at {found.finding()}" if found.first else found.finding()
    if found.breaks_in_float32:
        return finding
    remedies += ["-amp_dtype bfloat16"] if found.half is torch.float16 else []
    return f"{finding}; try {' or '.join(remedies or ['a lower TRAIN.BASE_LR'])}"
