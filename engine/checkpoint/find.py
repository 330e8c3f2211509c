"""Reads checkpoints and finds the newest valid checkpoint of a run."""

from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.format import numbered
from models.weights.torch_files import read_torch
from utils.errors import ConfigError, naming_damage
from utils.runs import DATED, newest_first, weights_in


def read_checkpoint(path: Path, lazily: bool = False, verify: bool = True) -> dict:
    """Read a checkpoint that this or another program wrote. Raise ConfigError if it is damaged.

    No code in the file is executed. `lazily` and `verify` are passed to read_torch.
    """
    try:
        state = read_torch(path, lazily, verify)
    except ConfigError as error:
        raise ConfigError(f"-resume: {error}, or use an older checkpoint in the same folder") from error
    return state if isinstance(state, dict) else {}


def read_lazily(path: Path) -> dict:
    """Return a checkpoint. Its checksums are verified now, and its tensors are read when they are used."""
    return read_checkpoint(path, lazily=True)


def find_newest(save: str, warn: Callable[[str], None], read: Callable[[Path], dict] = read_lazily) -> Path | None:
    """Return the newest valid checkpoint of the newest run that has no -name (-resume auto). `read`: see newest_in."""
    runs = newest_first(path for path in Path(save).glob("train-*") if DATED.fullmatch(path.name))
    return next((found for run in runs if (found := newest_in(run, warn, read))), None)


def newest_in(run: Path, warn: Callable[[str], None], read: Callable[[Path], dict] = read_lazily) -> Path | None:
    """Return the newest valid checkpoint of a run. `read` reads a file, or raises ConfigError if it is invalid."""

    def is_whole(path: Path) -> bool:
        read(path)
        return True

    numbers = numbered(run) if run.is_dir() else []
    return _first([run / "last.pth", run / "previous.pth", *numbers, run / "best.pth"], is_whole, warn)


def find_before(folder: Path, step: int, warn: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint of a run at or before this step."""
    return _first([folder / "last.pth", folder / "previous.pth"], lambda path: read_lazily(path)["step"] <= step, warn)


def _first(paths: list[Path], is_wanted: Callable[[Path], bool], warn: Callable[[str], None]) -> Path | None:
    """Return the first file for which `is_wanted` is true, or None. Warn about each file that cannot be read."""
    for path in filter(Path.is_file, paths):
        try:
            with naming_damage(path):
                if is_wanted(path):
                    return path
        except ConfigError as error:
            warn(f"{error}; trying the previous checkpoint")
    return None


def no_checkpoint_at(resume: str) -> ConfigError:
    remedy = "name a run's folder or a checkpoint, or use -resume auto"
    return ConfigError(f"-resume: there is no checkpoint at {resume}; {remedy}")


def checkpoint_at(
    resume: str,
    save: str,
    name: str,
    is_evaluated: bool,
    warn: Callable[[str], None],
    read: Callable[[Path], dict] = read_lazily,
) -> Path | None:
    """Return the checkpoint for -resume, which is `auto`, a run's folder or a file. `read` is as in newest_in.

    A run continues from its newest checkpoint. An evaluation uses the run's best weights.
    """
    if resume != "auto" and (is_evaluated or not Path(resume).is_dir()):
        from models.weights.files import find_file

        return find_file(resume)
    run = Path(resume) if resume != "auto" else Path(save, name) if name else None
    found = newest_in(run, warn, read) if run else find_newest(save, warn, read)
    return weights_in(found.parent) if found and is_evaluated else found
