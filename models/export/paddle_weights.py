"""PaddleViT: a .pdparams of plain numpy arrays, as paddle.save writes a state dict, with a JSON beside it."""

import pickle
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from models.export.plain_vit import EPS, plain_vit
from models.export.subject import Subject
from models.weights.paddle import to_paddle
from utils.errors import ConfigError

SUFFIX = ".pdparams"
LOADED_BY = "halfstep's reader of .pdparams"
PROTOCOL = 4  # paddle.save's own


def refuse(subject: Subject) -> None:
    vit = plain_vit(subject, "paddle")
    if vit.eps != EPS:
        raise ConfigError(
            f"-to paddle: LayerNorm of {subject.name} has eps {vit.eps:g}, in PaddleViT {EPS:g}; use -to onnx"
        )


def write(subject: Subject, path: Path) -> None:
    with open(path, "wb") as file:
        pickle.dump(to_paddle(subject.state), file, protocol=PROTOCOL)
    subject.write_beside(path, {"format": "PaddleViT, names of 2022"})


def load(subject: Subject, path: Path) -> Callable[[Tensor], Tensor]:
    return subject.read_back(path).model
