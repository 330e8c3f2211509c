"""A place for files that are not to have their names before they are complete and compared."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from utils.errors import ConfigError, cause_of
from utils.files import refuse_special, sync_folder


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A path to write to. That and what lies beside it take their places, that of `target` last, if all goes well.

    The place is a folder and not a file of another name, because the graph of a large model names the file of its weights.
    """
    target = target.absolute()
    folder = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        try:
            yield folder / target.name
            for path in folder.rglob("*"):
                _sync(path)
            for path in sorted(folder.iterdir(), key=lambda each: each.name == target.name):
                place = target.with_name(path.name)
                if not path.is_dir():
                    refuse_special(place)
                os.replace(path, place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sync_folder(target.parent)
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and not isinstance(error.__context__, OSError):
            raise
        raise ConfigError(f"-output: {target} cannot be written ({cause_of(error)})") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
