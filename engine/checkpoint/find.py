"""Reads checkpoints and finds the newest valid checkpoint of a run."""

from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.format import numbered, progress_in
from models.weights.record import VERSION_KEY
from models.weights.torch_files import read_torch
from utils.errors import ConfigError, naming_damage
from utils.runs import DATED, is_locked, newest_first, refuse_old_run, status_in, weights_in

NEXT = "; trying the previous checkpoint"


def read_checkpoint(path: Path, lazily: bool = False, verify: bool = True) -> dict:
    """Read a checkpoint that this or another program wrote. Raise ConfigError if it is damaged.

    No code in the file is executed. `lazily` and `verify` are passed to read_torch.
    """
    try:
        state = read_torch(path, lazily, verify)
    except ConfigError as error:
        raise ConfigError(f"-resume: {error}, or use an older checkpoint in the same folder") from error
    return state if isinstance(state, dict) else {}


def find_newest(save: str, warn: Callable[[str], None], verify: bool = True) -> Path | None:
    """Return the newest valid checkpoint of the newest run that has no -name (-resume auto)."""
    runs = newest_first(path for path in Path(save).glob("train-*") if DATED.fullmatch(path.name))
    return next((found for run in runs if (found := newest_in(run, warn, verify))), None)


def newer_named_run(save: str, checkpoint: Path | None) -> str:
    """Return how to continue the newest unfinished run that -resume auto leaves out because of its -name, or ''.

    `checkpoint`: the one that -resume auto continues from. Older runs than this one do not count.
    """
    for run in newest_first(file.parent for file in Path(save).glob("*/config.yaml") if weights_in(file.parent)):
        if checkpoint and run == checkpoint.parent:
            break
        is_done = status_in(run).get("state") == "done"
        if not (DATED.fullmatch(run.name) or is_done or is_locked(run)):
            only = "-resume auto finds only runs without -name"
            return f"{run} is newer and not finished, but {only}; continue it with -resume {run}"
    return ""


def newest_in(run: Path, warn: Callable[[str], None], verify: bool = True) -> Path | None:
    """Return the newest valid checkpoint of a run."""
    numbers = numbered(run) if run.is_dir() else []
    paths = [run / "last.pth", run / "previous.pth", *numbers, run / "best.pth"]
    return _first(paths, lambda state: True, warn, verify)


def find_before(folder: Path, step: int, warn: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint of a run at or before this step."""
    return _first([folder / "last.pth", folder / "previous.pth"], lambda state: state["step"] <= step, warn)


def _first(
    paths: list[Path], is_wanted: Callable[[dict], bool], warn: Callable[[str], None], verify: bool = True
) -> Path | None:
    """Return the first file with a state for which `is_wanted` is true. Warn about each file that cannot be read."""
    for path in filter(Path.is_file, paths):
        try:
            with naming_damage(path):
                if is_wanted(read_checkpoint(path, lazily=True, verify=verify)):
                    return path
        except ConfigError as error:
            warn(f"{error}{NEXT}")
    return None


def no_checkpoint_at(resume: str) -> ConfigError:
    reasons: list[str] = []
    newest_in(Path(resume), reasons.append)
    if reasons:
        why = reasons[0].removesuffix(NEXT)
        return ConfigError(f"{why}; none of its {len(reasons)} checkpoints can be read")
    remedy = "name a run's folder or a checkpoint, or use -resume auto"
    return ConfigError(f"-resume: there is no checkpoint at {resume}; {remedy}")


def checkpoint_at(
    resume: str,
    save: str,
    name: str,
    is_evaluated: bool,
    warn: Callable[[str], None],
    verify: bool = True,
) -> Path | None:
    """Return the checkpoint for -resume, which is `auto`, a run's folder or a file.

    A run continues from its newest checkpoint. An evaluation uses the run's best weights. Raise ConfigError if halfstep
    1.x or 2.x wrote the run.
    """
    if resume != "auto" and (is_evaluated or not Path(resume).is_dir()):
        from models.weights.files import find_file

        checkpoint = find_file(resume)
    else:
        run = Path(save, name) if name else None
        if resume != "auto":
            run = Path(resume)
        checkpoint = newest_in(run, warn, verify) if run else find_newest(save, warn, verify)
        if run is None and (named := newer_named_run(save, checkpoint)):
            warn(named)
        checkpoint = weights_in(checkpoint.parent) if checkpoint and is_evaluated else checkpoint
    if checkpoint:
        refuse_old_run(checkpoint, progress_in(checkpoint).get(VERSION_KEY))
    return checkpoint
