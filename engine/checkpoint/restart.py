"""A run that is started again with smaller micro-batches, as one of its processes ran out of memory: what it finds then."""

import json
import os
from pathlib import Path
from typing import Any

from engine.checkpoint.format import newest_in
from engine.checkpoint.resume import find_checkpoint, run_folder_of
from engine.memory.recovery import RanOut
from engine.session import Session
from engine.train.trainer import Trainer
from utils.errors import ToldError, UserError
from utils.files import write_text

NAME = "micro_batches.json"


def find_start(session: Session) -> tuple[Path | None, Path | None]:
    """The folder and the checkpoint to go on with; for process 0, which tells the others."""
    word = session.process.take_word()
    if not word:
        checkpoint = find_checkpoint(session)
        return run_folder_of(checkpoint), checkpoint
    folder = Path(word).parent
    # A later one is of another start, where -resume named one before it.
    checkpoint = newest_in(folder, session.log.warn, last_step=read_smaller(folder)["step"])
    if checkpoint is None and session.config.MODEL.RESUME != "auto":
        checkpoint = find_checkpoint(session)
    session.log.say(
        f"starting again in {folder}{'' if checkpoint else ', from the first update: nothing was saved yet'}"
    )
    return folder, checkpoint


def read_smaller(folder: Path) -> dict[str, Any]:
    """What an earlier start wrote when memory ran out; nothing where none did."""
    path = folder / NAME
    return json.loads(path.read_text()) if path.exists() else {}


def take_up(session: Session, trainer: Trainer, smaller: dict[str, Any]) -> None:
    """Begin with the micro-batches that an earlier start ended with."""
    if smaller and smaller["images"] < session.config.DATA.BATCH_SIZE:
        trainer.limit(smaller["images"])
        session.log.say(
            f"micro-batches of at most {smaller['images']} images, as memory ran out at step {smaller['step']} of an "
            f"earlier start; without {session.path / NAME} it begins with DATA.BATCH_SIZE again"
        )


def leave(session: Session, short: RanOut) -> UserError:
    """Write down with what the next start is to begin, and ask for it. Returns what this start ends with."""
    path = session.path / NAME
    facts = {"images": short.size, "step": short.step, "batch_size": session.config.DATA.BATCH_SIZE}
    mine = session.path / f"micro_batches_{session.process.rank}.json"  # several may run out at once
    try:
        write_text(mine, json.dumps(facts) + "\n")
        os.replace(mine, path)
    except OSError as error:
        session.log.warn(f"cannot write {path} ({error})")
        return short
    if not session.process.ask_for_restart(str(path)):
        return short
    session.log.warn(f"{short.what}; all start again from the last save, {short.remedy}")
    return ToldError(f"{short.what}; all start again")
