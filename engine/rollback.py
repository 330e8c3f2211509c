"""The rollback of a run to the newest checkpoint before a streak of skipped updates."""

import json
from collections.abc import Iterable
from pathlib import Path

from datasets import TrainData
from engine.checkpoint.find import find_before, read_checkpoint
from engine.saves import Saves
from engine.train.stop_conditions import NonFinite
from utils.errors import cause_of
from utils.files import write_text

BAD_BATCHES_FILE = "bad_batches.jsonl"


def roll_back(saves: Saves, error: NonFinite) -> bool:
    """Return to the newest checkpoint before a streak of skipped updates. Collective.

    Return False and do nothing if there is no such checkpoint or the run has already rolled back once.
    """
    trainer, process, folder, log, streak = saves.trainer, saves.process, saves.folder, saves.log, error.streak
    if trainer.left_out:  # a second rollback would not help
        return False
    saves.wait()
    path = process.first(lambda: find_before(folder, streak.start, log.warn))
    if path is None:
        return False
    trainer.roll_back(read_checkpoint(path, lazily=True), streak)
    saves.reload_best_from_disk()
    left_out = trainer.left_out[-1]
    log.say(
        f"{error}; going back to {path}, after step {trainer.step}; updates {left_out.start} to "
        f"{left_out.stop - 1} are left out this time; {BAD_BATCHES_FILE} names their images"
    )
    if process.is_first:
        try:
            write_bad_batches(folder, trainer.data, trainer.left_out)
        except OSError as failure:
            log.warn(f"cannot write {folder / BAD_BATCHES_FILE} ({cause_of(failure)}); training continues")
    saves.save()
    return True


def write_bad_batches(folder: Path, data: TrainData, left_out: Iterable[range]) -> None:
    """Write bad_batches.jsonl: the images of all updates that rollbacks left out, one line per update and process.

    The file is rewritten, not appended to, so that a run that is killed and rolls back again lists images only once.
    """
    lines = []
    for step in (step for each in left_out for step in each):
        for rank in range(data.order.world_size):
            indices = [int(i) for piece in data.order.pieces(step, rank) if piece.num_samples for i in piece.indices]
            # Repeated augmentation uses the same image several times.
            names = list(dict.fromkeys(map(data.image_set.name, indices)))
            lines.append(json.dumps({"step": step, "rank": rank, "names": names}) + "\n")
    write_text(folder / BAD_BATCHES_FILE, "".join(lines))
