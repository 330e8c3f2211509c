"""torch.export's .pt2: a graph with its weights that torch loads without timm and without halfstep."""

import io
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from models.export.subject import Subject

SUFFIX = ".pt2"
LOADED_BY = "torch.export.load"


def refuse(subject: Subject) -> None:
    pass


def write(subject: Subject, path: Path) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(subject.model, (subject.images(2, seed=0),), dynamic_shapes=({0: batch},))
    written = io.BytesIO()  # torch ends the process where a file cannot take what it writes at its end
    torch.export.save(program, written, extra_files={f"{key}.json": value for key, value in subject.facts.items()})
    path.write_bytes(written.getbuffer())


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    with open(path, "rb") as file:
        return torch.export.load(file).module()
