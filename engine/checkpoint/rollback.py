"""Rolls back to before a series of skipped updates, and names the images that are left out then."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from datasets import TrainData
from engine.checkpoint.format import read_checkpoint
from utils.errors import ConfigError
from utils.files import write_text

BAD_BATCHES_FILE = "bad_batches.jsonl"


def find_before(folder: Path, step: int, warn: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint of a run from before this step."""
    for path in (folder / "last.pth", folder / "previous.pth"):
        if path.is_file():
            try:
                if read_checkpoint(path, lazily=True)["step"] <= step:
                    return path
            except ConfigError as error:
                warn(f"{error}; trying the one before")
    return None


def write_bad_batches(folder: Path, data: TrainData, left_out: Iterable[range]) -> None:
    """Write bad_batches.jsonl: the images of all updates that are left out, one line per update and process.

    Always rewritten: a run that is killed now and rolls back again must not list them twice.
    """
    lines = []
    for step in (step for each in left_out for step in each):
        for rank in range(data.order.world_size):
            indices = [int(i) for piece in data.order.pieces(step, rank) if piece.num_samples for i in piece.indices]
            names = list(
                dict.fromkeys(map(data.image_set.name, indices))
            )  # repeated augmentation uses an image several times
            lines.append(json.dumps({"step": step, "rank": rank, "names": names}) + "\n")
    write_text(folder / BAD_BATCHES_FILE, "".join(lines))
