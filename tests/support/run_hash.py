"""The hash of a run. Two runs have the same hash if their results are bit-identical."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.record.columns import COLUMNS
from engine.train.clock import PHASES
from models.weights.torch_files import read_torch
from tests.support.runs import rows_of

# These values depend on the speed of the machine.
NOT_REPEATABLE = (
    *(column.name for column in COLUMNS if not column.is_repeatable),
    "seconds",
    *(f"{name}_pct" for name in PHASES),
)


def run_hash(folder: Path) -> str:
    """Return the sha256 over `results`. It depends on their names, not on their order in the files of a run."""
    digest = hashlib.sha256()
    for name, value in sorted(results(folder).items()):
        digest.update(name.encode())
        digest.update(as_bytes(value))
    return digest.hexdigest()


def results(folder: Path) -> dict[str, Any]:
    """Return the weights, averages, optimizer moments, loss scaler, counters and metrics of a run, each by its name."""
    state = read_torch(folder / "last.pth")
    progress = state["progress"]
    named = {f"counters/{name}": state[name] for name in ("step", "epoch")}
    named |= {f"counters/{name}": progress[name] for name in ("totals", "skips_in_a_row", "not_better", "left_out")}
    named |= {f"choices/{number}": choice for number, choice in enumerate(progress.get("choices", ()))}
    sections = {"weights": "state_dict", "averages": "state_dict_ema", "scaler": "amp_scaler"}
    for title, key in sections.items():
        named |= named_leaves(title, state.get(key) or {})
    named |= named_leaves("moments", state["optimizer"]["state"])
    named |= named_leaves("groups", state["optimizer"]["param_groups"])
    best = json.loads((folder / "status.json").read_text()).get("best")
    named |= named_leaves("best", {name: best[name] for name in ("epoch", "weights")} if best else {})
    for file in ("metrics.csv", "steps.csv"):
        for number, row in enumerate(rows_of(folder / file)):
            named |= {f"{file}/{number}/{key}": row[key] for key in row if key not in NOT_REPEATABLE}
    return named


def state_hash(state: dict) -> str:
    """Return the sha256 over a whole checkpoint, in the order of its keys."""
    digest = hashlib.sha256()
    for name, value in leaves("", state):
        digest.update(name.encode())
        digest.update(as_bytes(value))
    return digest.hexdigest()


def named_leaves(title: str, value: Any) -> dict[str, Any]:
    return dict(leaves(title, value))


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each tensor and plain value in nested dicts and lists."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for index, content in enumerate(value):
            yield from leaves(f"{name}/{index}", content)
    else:
        yield name, value


def as_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return (
            f"{value.dtype}{tuple(value.shape)}".encode()
            + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return repr(value).encode()
