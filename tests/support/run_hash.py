"""The hash of a run. Two runs have the same hash if their results are bit-identical."""

import hashlib
from pathlib import Path

import torch

from engine.record.columns import COLUMNS
from engine.record.timing import PHASES
from models.weights.torch_files import read_torch
from tests.support.runs import rows_of

# These values depend on the speed of the machine.
NOT_REPEATABLE = (
    *(column.name for column in COLUMNS if not column.is_repeatable),
    "seconds",
    *(f"{name}_pct" for name in PHASES),
)


def run_hash(folder: Path) -> str:
    """Return the sha256 over weights, EMA weights, optimizer, loss scaler, counters and metrics of a run."""
    state = read_torch(folder / "last.pth")
    digest = hashlib.sha256()
    for name in ("state_dict", "state_dict_ema", "optimizer", "amp_scaler", "step", "epoch", "progress"):
        _feed(digest, name, state.get(name))
    for name in ("metrics.csv", "steps.csv"):
        for row in rows_of(folder / name):
            digest.update(repr([(key, row[key]) for key in row if key not in NOT_REPEATABLE]).encode())
    return digest.hexdigest()


def state_hash(state: dict) -> str:
    """Return the sha256 over a whole checkpoint."""
    digest = hashlib.sha256()
    _feed(digest, "", state)
    return digest.hexdigest()


def _feed(digest, name: str, value) -> None:
    digest.update(name.encode())
    if isinstance(value, dict):
        if not value.get("infinite", 1):  # checkpoints of 2.3 have no such count
            value = {key: content for key, content in value.items() if key != "infinite"}
        for key in value:
            _feed(digest, str(key), value[key])
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            _feed(digest, str(index), each)
    elif isinstance(value, torch.Tensor):
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
