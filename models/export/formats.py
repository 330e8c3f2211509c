"""The formats by name, and how an export comes about: written beside its place, loaded again, compared, then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from models.export.graphs import ONNX, TORCH
from models.export.hugging_face import HUGGING_FACE
from models.export.plain_vit import PADDLE
from models.export.subject import Format, Subject, WrongExport, largest_difference
from models.weights.files import RECORD_SUFFIX
from utils.errors import ConfigError, cause_of
from utils.files import refuse_special, sync_folder

FORMATS: dict[str, Format] = {"hf": HUGGING_FACE, "onnx": ONNX, "torch": TORCH, "paddle": PADDLE}


def export(subject: Subject, name: str, target: Path) -> str:
    """Write the model in the format of that name and compare it. Returns how that went, for the summary."""
    chosen = FORMATS[name]
    check_target(name, target)
    chosen.refuse(subject)
    with staged(target) as path:
        chosen.write(subject, path)
        try:
            difference, bound = largest_difference(subject, chosen.load(subject, path))
        except WrongExport as error:
            raise WrongExport(
                f"-to {name}: loaded again by {chosen.loaded_by}, {error}; {target} is not written. Choose another format"
            ) from None
    return f"loaded again by {chosen.loaded_by}, largest difference of logits {difference:.1e} (at most {bound:.1e})"


def check_target(name: str, target: Path) -> None:
    suffix = FORMATS[name].suffix
    if suffix and target.suffix != suffix:
        raise ConfigError(f"-output: {target} must end in {suffix}, as files of -to {name} do")
    if suffix and target.is_dir():
        raise ConfigError(f"-output: {target} is a folder; name a file that ends in {suffix}")
    beside = target.with_suffix(RECORD_SUFFIX)
    if name == "paddle" and beside.exists() and not target.exists():
        raise ConfigError(
            f"-output: {beside} is there already, and what is written beside {target} has that name; name another"
        )
    if not suffix and target.suffix in {".safetensors", ".pth", *(each.suffix for each in FORMATS.values())} - {""}:
        raise ConfigError(f"-output: {target} has the name of a file; -to {name} writes a folder, name one")
    if not suffix and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"-output: {target} is there already; -to {name} writes a new folder, name another")


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
