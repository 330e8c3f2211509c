"""Saves the batch on which a run stopped, with its weights, and reads it to be replayed."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datasets import Batch, Draws, Piece
from engine.train.trainer import Callback, Trainer
from models.weights.torch_files import read_torch
from utils.errors import ConfigError
from utils.files import replacing

OVERFLOW_FILE = "overflow-batch.pth"


class LastUpdate(Callback):
    """Keeps the batches of the last update: references to the loader's tensors, no copies."""

    def __init__(self):
        self.step, self._batches, self._shares = 0, [], []

    def on_window(self, trainer: Trainer) -> None:
        self.step, self._batches, self._shares = trainer.step, [], []

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        self._batches.append(batch)
        self._shares.append(share)

    @property
    def last_batch(self) -> Batch:
        return self._batches[-1]

    def batches(self, rank: int) -> "Batches":
        """Its batches, ready to be replayed."""
        return Batches(self.step, rank, list(zip(self._batches, self._shares, strict=True)))

    def state_dict(self) -> dict:
        """uint8 images and targets of all micro-batches, and on what mixing, erasing and augmentation on the device depend."""
        return {
            "step": self.step,
            "images": torch.cat([batch.images.cpu() for batch in self._batches]),
            "targets": torch.cat([batch.targets.cpu() for batch in self._batches]),
            "sizes": [len(batch.targets) for batch in self._batches],
            "pieces": [_plain(batch.piece) for batch in self._batches],
            "draws": [batch.draws and [torch.from_numpy(each) for each in batch.draws] for batch in self._batches],
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
    draws = state.get("draws", [None] * len(sizes))
    split = zip(images.split(sizes), targets.split(sizes), pieces, draws, shares, strict=True)
    batches = [
        (Batch(*tensors, len(tensors[0]), [], _piece(plain), drawn and Draws(*(each.numpy() for each in drawn))), share)
        for *tensors, plain, drawn, share in split
    ]
    return Batches(state.get("step", 0), state.get("rank", 0), batches, state)


def _plain(piece: Piece) -> dict:
    """A piece as plain values, which a checkpoint may contain."""
    return {**piece._asdict(), "indices": piece.indices.tolist(), "repeats": piece.repeats.tolist()}


def _piece(plain: dict | None) -> Piece | None:
    """The inverse of _plain; a hand-made batch has no piece, and is neither erased nor mixed."""
    return plain and Piece(**{**plain, "indices": np.array(plain["indices"]), "repeats": np.array(plain["repeats"])})
