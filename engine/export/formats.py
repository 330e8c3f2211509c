"""Export formats by name. An export is written to a temporary folder, loaded again, compared, and then renamed."""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.export import hugging_face, web
from engine.export.subject import Subject, WrongExport, check_weights
from engine.open_model import SavedModel
from models.weights.files import read_weights
from models.weights.torch_files import to_safetensors
from utils.errors import ConfigError, cause_of, needing
from utils.files import refuse_special, sync_folder

if TYPE_CHECKING:
    from engine.export.photo import PhotoSubject


class Format(NamedTuple):
    """An export format."""

    suffix: str  # the suffix of an exported file; '' for a folder
    loaded_by: str  # the function or package that loads the file, for messages
    write: Callable[[Subject, Path], None]
    load: Callable[[Subject, Path], Callable[[Tensor], Tensor]]  # loads the exported file as users would
    graph: str = ""  # the file that `load` loads, if it is in an exported folder


SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node: the modules that contain it


def write_onnx(subject: Subject, path: Path) -> None:
    with needing("onnx onnxscript onnxruntime", "-to onnx"):
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    program = torch.onnx.export(
        subject.graph,
        (subject.example,),
        dynamo=True,
        dynamic_shapes=(subject.dimensions,),
        input_names=[subject.names[0]],
        output_names=[*subject.names[1:]],
        verbose=False,
    )
    for node in program.model.graph.all_nodes():  # the other entries name source files of this machine
        for key in {*node.metadata_props} - {SCOPES}:
            del node.metadata_props[key]
    program.model.metadata_props.update(subject.facts)
    program.save(path)  # weights above 2 GB, the limit of a protobuf, go into a second file


def load_onnx(subject: Subject, path: Path) -> Callable[[Tensor], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Any:
        first, *others = [
            torch.from_numpy(np.asarray(each)) for each in session.run(None, {subject.names[0]: images.numpy()})
        ]
        return (first, *others) if others else first

    return run


def write_program(subject: Subject, path: Path) -> None:
    program = torch.export.export(subject.graph, (subject.example,), dynamic_shapes=(subject.dimensions,))
    written = io.BytesIO()  # in memory, because torch aborts the process if the end of a file cannot be written
    torch.export.save(program, written, extra_files={f"{key}.json": value for key, value in subject.facts.items()})
    path.write_bytes(written.getbuffer())


def load_program(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    with open(path, "rb") as file:
        return torch.export.load(file).module()


def write_page(subject: "PhotoSubject", path: Path) -> None:
    path.mkdir()
    web.write(path, subject)  # first, because it may refuse -runtime
    write_onnx(subject, path / web.GRAPH)


FORMATS = {
    "hf": Format("", "timm.create_model", hugging_face.write, hugging_face.load),
    "onnx": Format(".onnx", "onnxruntime", write_onnx, load_onnx),
    "torch": Format(".pt2", "torch.export.load", write_program, load_program),
    "web": Format("", "onnxruntime", write_page, load_onnx, web.GRAPH),
}


def export_weights(saved: SavedModel, target: Path) -> str:
    """Write only the weights, in their own types, with their metadata, and read them again. Return the result."""
    with staged(target) as path:
        path.write_bytes(to_safetensors(saved.weights, saved.record))
        with naming_wrong_export("safetensors", "halfstep", target):
            check_weights(read_weights(path).state, saved.weights)
    return "read again, identical to the last bit"


@torch.no_grad()
def export(subject: Subject, name: str, target: Path, change: Callable[[Path], str] | None = None) -> str:
    """Write the model in this format, load it again, and compare its results with the original's. Return the result.

    `change`: changes the checked file, and returns how.
    """
    chosen = FORMATS[name]
    if subject.config.DATA.sequences and chosen.suffix:
        raise ConfigError(
            f"-to {name}: {subject.config.MODEL.NAME} takes {subject.config.DATA.sequences}. timm reads "
            "each size from the data, which an exported graph cannot; use -to hf or .safetensors"
        )
    check_target(name, chosen.suffix, target)
    with staged(target) as path:
        with naming_untraceable(name, subject):
            chosen.write(subject, path)
        with naming_wrong_export(name, chosen.loaded_by, target):
            run = chosen.load(subject, path / chosen.graph)
            result = f"loaded again by {chosen.loaded_by}, {subject.check(run)}"
        return f"{result}\n{change(path / chosen.graph)}" if change else result


@contextlib.contextmanager
def naming_untraceable(name: str, subject: Subject) -> Iterator[None]:
    """Turn an error of torch's exporter into a ConfigError with a way out."""
    try:
        yield
    except Exception as error:  # torch raises errors of many types, and of its own
        if isinstance(error, ConfigError | OSError) or isinstance(error.__context__, OSError):
            raise
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise ConfigError(
            f"-to {name}: torch cannot export {subject.config.MODEL.NAME} ({reason}); use -to hf or a .safetensors file"
        ) from error


@contextlib.contextmanager
def naming_wrong_export(name: str, loaded_by: str, target: Path) -> Iterator[None]:
    """Turn any error while an export is loaded and compared into a WrongExport with the format and the file."""
    try:
        yield
    except Exception as error:  # the type depends on the program that loads the export
        if isinstance(error, ConfigError):  # a mistake of the user, which another format would not change
            raise
        reason = str(error) if isinstance(error, WrongExport) else f"it fails ({type(error).__name__}: {error})"
        raise WrongExport(
            f"-to {name}: when {loaded_by} loads the export, {reason}; {target} was not written. Choose another format"
        ) from error


def check_target(name: str, suffix: str, target: Path) -> None:
    """Raise ConfigError unless a file with this suffix, or a new folder without one, can be written."""
    if suffix and (target.suffix != suffix or target.is_dir()):
        raise ConfigError(f"-output: {target} must be a file name that ends in {suffix} for -to {name}")
    is_named_as_file = target.suffix in {".safetensors", ".pth", ".onnx", ".pt2", ".pdparams"}
    is_taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    if not suffix and (is_named_as_file or is_taken):
        raise ConfigError(
            f"-output: {target} {'has the suffix of a file' if is_named_as_file else 'already exists'}; "
            f"-to {name} writes a new folder, so name another folder"
        )


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. On success all files in its folder are moved to their places, `target` last.

    The temporary path is in its own folder and keeps the file name, because the graph of a large model names its
    weights file.
    """
    target = target.absolute()
    folder = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        folder.mkdir()
        try:
            yield folder / target.name
            for path in folder.rglob("*"):
                sync_folder(path)
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
