"""ONNX: a graph with its weights for any number of images at once; loaded again by onnxruntime."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.export.subject import Subject, need_package

SUFFIX = ".onnx"
LOADED_BY = "onnxruntime"
INPUT, OUTPUT = "images", "logits"


def refuse(subject: Subject) -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise need_package("onnx", "onnx onnxscript onnxruntime", error) from error


def write(subject: Subject, path: Path) -> None:
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


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])
