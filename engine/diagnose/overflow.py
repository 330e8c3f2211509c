"""What a run does when updates overflow: keeps the last one's batches, examines them once, writes doctor.yaml, saves them."""

import copy
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from datasets import Batch, Piece, Preparation
from engine.diagnose.doctor import Case, Diagnosis, diagnose
from engine.precision.policy import Precision
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.loss import Loss
from engine.train.trainer import Trainer
from models.transforms import choose_transforms
from models.weights.torch_files import read_torch
from utils.errors import ConfigError
from utils.files import Kind, replacing, write_text
from utils.log import Log
from utils.seed import unchanged_random_state

OVERFLOW_FILE = "overflow-batch.pth"
PRESCRIPTION = Kind("a file of scripts/doctor.py", (b"BASE: config.yaml\nPRECISION:", b"PRECISION:"))  # DOCTOR_FILE
DOCTOR_FILE = "doctor.yaml"


class LastUpdate(Callback):
    """Keeps the batches of the last update: references to the loader's tensors, no copies."""

    def __init__(self):
        self.step, self._batches, self._shares = 0, [], []

    def on_window(self, trainer: Trainer) -> None:
        self.step, self._batches, self._shares = trainer.step, [], []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        self._batches.append(batch)
        self._shares.append(share)

    def batches(self, rank: int) -> "Batches":
        """Its batches, ready to be replayed."""
        return Batches(self.step, rank, list(zip(self._batches, self._shares, strict=True)))

    def state_dict(self) -> dict:
        """Images (uint8) and targets of all micro-batches, and the pieces, on which mixing and erasing depend."""
        return {
            "step": self.step,
            "images": torch.cat([batch.images.cpu() for batch in self._batches]),
            "targets": torch.cat([batch.targets.cpu() for batch in self._batches]),
            "sizes": [len(batch.targets) for batch in self._batches],
            "pieces": [_plain(batch.piece) for batch in self._batches],
            "shares": self._shares,
        }


@dataclass
class Batches:
    """The batches of one process's update, from a run, a file or the data set."""

    step: int
    rank: int
    batches: list[tuple[Batch, float]]  # each with its weight in the update's loss
    state: dict = field(default_factory=dict)  # content of the file: weights and settings, if present


def name_of(rank: int) -> str:
    """A file per process: each had other images, any of which may be the cause."""
    return OVERFLOW_FILE if rank == 0 else f"overflow-batch-{rank}.pth"


def save_overflow(folder: Path, rank: int, last_update: LastUpdate, facts: dict) -> str:
    """Write the batch of this process; process 0 adds `facts`. Returns advice how to use it."""
    path = folder / name_of(rank)
    with replacing(path) as file:
        torch.save({**last_update.state_dict(), "rank": rank, **(facts if rank == 0 else {})}, file)
    return f"to see where it breaks: python scripts/doctor.py {shlex.quote(str(folder))}"


def read_overflow(path: Path) -> Batches:
    """Read a file of save_overflow, or a hand-made one with uint8 `images` and `targets`."""
    if not path.is_file():
        raise ConfigError(f"-batch: no file at {path}; a run writes {OVERFLOW_FILE} into its folder when it stops")
    state = read_torch(path)
    images, targets = (state.get("images"), state.get("targets")) if isinstance(state, dict) else (None, None)
    if not (isinstance(images, Tensor) and isinstance(targets, Tensor)):
        raise ConfigError(
            f"-batch: {path} holds no batch (tensors `images` and `targets`); give a run's {OVERFLOW_FILE}"
        )
    sizes = state.get("sizes", [len(targets)])
    if images.dtype != torch.uint8 or images.ndim != 4 or not len(targets) == len(images) == sum(sizes) > 0:
        raise ConfigError(
            f"-batch: {path}: `images` must be uint8 [B, C, H, W] with one of `targets` for each, and B at least 1"
        )
    shares = state.get("shares", [size / len(targets) for size in sizes])
    pieces = state.get("pieces", [None] * len(sizes))
    split = zip(images.split(sizes), targets.split(sizes), pieces, shares, strict=True)
    batches = [(Batch(*tensors, len(tensors[0]), [], _piece(plain)), share) for *tensors, plain, share in split]
    return Batches(state.get("step", 0), state.get("rank", 0), batches, state)


def _plain(piece: Piece) -> dict:
    """A piece as plain values, which a checkpoint may contain."""
    return {**piece._asdict(), "indices": piece.indices.tolist(), "repeats": piece.repeats.tolist()}


def _piece(plain: dict | None) -> Piece | None:
    """The inverse of _plain; a hand-made batch has no piece, and is neither erased nor mixed."""
    return plain and Piece(**{**plain, "indices": np.array(plain["indices"]), "repeats": np.array(plain["repeats"])})


def make_case(
    config: Config, model: torch.nn.Module, prepare: Preparation, update: Batches, scale: float, loss: Loss
) -> Case:
    """An update of a run with these settings, to be replayed on `model`, which has no transforms yet.

    `prepare`, `loss`: those of the run, on the device of the replay.
    """
    # Both replays use one model: a white list would bring half precision into the exact one, and naive mode has no
    # lists. float8 layers scale their inputs, so they cannot overflow.
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
    """Write doctor.yaml into the run folder if there are settings that help. Returns its text."""
    settings = [f"    {name}: {value}" for name, value in found.prescription(config.PRECISION).items()]
    if not settings:
        return ""
    base = ["BASE: config.yaml"] if (folder / "config.yaml").exists() else []
    text = "\n".join([*base, "PRECISION:", *settings]) + "\n"
    write_text(folder / DOCTOR_FILE, text)
    return text


class AutoDoctor(Callback):
    """Examines the last update once, on a copy, after `SKIPS` consecutive skipped updates."""

    SKIPS = 10

    def __init__(self, config: Config, folder: Path, log: Log, last_update: LastUpdate):
        self._config, self._folder, self._log, self._last_update = config, folder, log, last_update
        self._advice: str | None = None  # None: not examined yet

    def get_advice(self) -> str:
        """Finding and remedy; empty without one."""
        return self._advice or ""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        enough = min(self.SKIPS, self._config.PRECISION.MAX_CONSECUTIVE_SKIPS)
        if self._advice is None and report.skips_in_a_row >= enough:
            self._advice = self._examine(trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self._advice = None

    def _examine(self, trainer: Trainer) -> str:
        """Returns finding and remedy; empty if the doctor fails."""
        log, config, device = self._log, self._config, trainer.process.device
        update = self._last_update.batches(trainer.process.rank)
        try:
            with unchanged_random_state(device):
                model, scale = copy.deepcopy(trainer.model), trainer.precision.scaler.get_scale()
                trainer.transforms.revert(model)
                found = diagnose(make_case(config, model, trainer.prepare, update, scale, trainer.loss))
            is_written = bool(prescribe(found, config, self._folder))
        except Exception as error:  # out of memory, a full disk, an untraceable operation: no reason to end a run
            log.warn(
                f"the doctor cannot look at step {update.step} ({type(error).__name__}: {error}); training continues "
                "without it"
            )
            return ""
        log.say(
            f"doctor: updates are skipped, the last one at step {update.step}. In a replay of it: {found.finding()}"
        )
        path = shlex.quote(str(self._folder / DOCTOR_FILE))
        if is_written:
            settings = ", ".join(f"{name}: {value}" for name, value in found.prescription(config.PRECISION).items())
            outcome = "a replay with them is finite" if found.is_mended else "a replay with them still breaks"
            log.say(f"doctor: {settings}; {outcome}; written for -cfg to {path}")
        return advice(found, path if is_written and found.is_mended else None)


def advice(found: Diagnosis, path: str | None) -> str:
    """One sentence: what breaks, and what to try. `path`: the file of settings that help."""
    finding = f"first non-finite: {found.finding()}" if found.first else found.finding()
    if found.breaks_in_float32:
        return finding
    remedies = [f"-cfg {path}"] if path else []
    remedies += ["-amp_dtype bfloat16"] if found.half is torch.float16 else []
    return f"{finding}; try {' or '.join(remedies or ['a lower TRAIN.BASE_LR'])}"
