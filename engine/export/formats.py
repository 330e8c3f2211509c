"""Export formats by name. An export is written to a temporary folder, loaded again, compared, and then renamed."""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.export import hugging_face, web
from engine.export.files import naming_wrong_export, staged
from engine.export.subject import Subject
from utils.errors import ConfigError, needing

if TYPE_CHECKING:
    from engine.export.photo_subject import PhotoSubject


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
            torch.from_numpy(np.asarray(output)) for output in session.run(None, {subject.names[0]: images.numpy()})
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


@torch.no_grad()
def export(subject: Subject, name: str, target: Path, change: Callable[[Path], str] | None = None) -> str:
    """Write the model in this format, load it again, and compare its results with the original's. Return the result.

    `change`: changes the checked file, and returns how.
    """
    chosen = FORMATS[name]
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
