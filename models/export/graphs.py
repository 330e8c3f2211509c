"""Graphs with their weights for any number of images: ONNX, and torch.export's .pt2 that torch loads without timm."""

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.export.subject import Format, Subject
from utils.errors import ConfigError

INPUT, OUTPUT = "images", "logits"


def _need_onnx(subject: Subject) -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        packages = "onnx onnxscript onnxruntime"
        raise ConfigError(
            f"-to onnx: needs {packages}, which is not installed: pip install {packages} ({error})"
        ) from error


def _write_onnx(subject: Subject, path: Path) -> None:
    program = torch.onnx.export(
        subject.model,
        (subject.images(2, seed=0),),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        input_names=[INPUT],
        output_names=[OUTPUT],
        verbose=False,
    )
    program.model.metadata_props.update(subject.facts)
    program.save(path)  # with a second file for the weights only where they are more than the 2 GB of a protobuf


def _load_onnx(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def _write_program(subject: Subject, path: Path) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(subject.model, (subject.images(2, seed=0),), dynamic_shapes=({0: batch},))
    written = io.BytesIO()  # torch ends the process where a file cannot take what it writes at its end
    torch.export.save(program, written, extra_files={f"{key}.json": value for key, value in subject.facts.items()})
    path.write_bytes(written.getbuffer())


def _load_program(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    with open(path, "rb") as file:
        return torch.export.load(file).module()


ONNX = Format(".onnx", "onnxruntime", _write_onnx, _load_onnx, _need_onnx)
TORCH = Format(".pt2", "torch.export.load", _write_program, _load_program)
