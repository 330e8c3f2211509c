"""What is exported: a trained model in float32, its classes, how its images are prepared; and the comparison of its logits."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Config
from models import build_model
from models.weights.load import load_exactly
from models.weights.state import preprocessing_of
from utils.errors import UserError


@dataclass(frozen=True)
class Subject:
    """`record`: what the checkpoint says beside its weights; all of it is written into the formats that can hold it."""

    weights: dict[str, Tensor]
    config: Config
    classes: list[str]
    record: dict[str, Any]
    source: Path

    @cached_property
    def model(self) -> nn.Module:
        """The model in evaluation, in float32 in whichever type it was trained."""
        model = build_model(self.config, self.config.MODEL.NUM_CLASSES or len(self.classes))
        load_exactly(model, self.weights, self.source)
        return model.float().eval()

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    @property
    def name(self) -> str:
        return self.config.MODEL.NAME

    @property
    def labels(self) -> list[str]:
        """A name for each logit."""
        return [*self.classes, *(f"class {number}" for number in range(len(self.classes), self.model.num_classes))]

    @property
    def activation(self) -> str:
        """Which function makes probabilities of the logits."""
        return "sigmoid" if self.config.DATA.has_several_labels else "softmax"

    @property
    def data(self) -> dict[str, Any]:
        return preprocessing_of(self.config.DATA)

    @property
    def facts(self) -> dict[str, str]:
        """What someone needs who has the graph alone: class names, preparation of images, meaning of the logits; as JSON."""
        facts = {key: self.record[key] for key in ("arch", "epoch", "halfstep_version") if key in self.record}
        facts |= {"class_names": self.labels, "data": self.data, "probabilities": self.activation}
        return {key: json.dumps(value) for key, value in facts.items()}

    def images(self, count: int, seed: int) -> Tensor:
        """[count, C, H, W]: random images, normalized."""
        generator = torch.Generator().manual_seed(seed)
        return self.normalized(torch.rand(count, *self.data["input_size"], generator=generator))

    def normalized(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(self.data[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
        return (images - mean) / std


BOUND = 1e-4  # of the largest logit, or of 1 where that is smaller; float32 in another order differs by less
BATCHES = (1, 8)


class WrongExport(UserError):
    """An export computes something else than its model. No mistake of the user, who can only choose another format."""

    code = 1


def check_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise WrongExport unless the weights that were read again equal the model's, to the last bit."""
    if found.keys() != expected.keys() or not all(_equals(found[name], expected[name]) for name in expected):
        raise WrongExport("its weights are not those of the model")


def _equals(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def batches(subject: Subject) -> Iterator[Tensor]:
    """Normalized images: random, black, white, and stripes of the two."""
    size = subject.data["input_size"]
    stripes = (torch.arange(size[-1]) % 2).float().expand(size)
    extreme = subject.normalized(torch.stack([torch.zeros(size), torch.ones(size), stripes]))
    for number, count in enumerate(BATCHES):
        random = subject.images(count, seed=number)
        yield random
        yield torch.cat([extreme, random])[:count]


@torch.no_grad()
def largest_difference(subject: Subject, run: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """The largest difference between the logits of the export and the model's, and the bound; WrongExport beyond it."""
    largest, bound = 0.0, BOUND
    for images in batches(subject):
        expected, found = subject.model(images), run(images)
        if found.shape != expected.shape:
            raise WrongExport(f"it gives logits of shape {list(found.shape)}, not {list(expected.shape)}")
        difference = (found.double() - expected.double()).abs().max().item()
        bound = max(bound, BOUND * expected.abs().max().item())
        if not difference <= bound:  # also for NaN
            raise WrongExport(
                f"its logits for {len(images)} images differ by up to {difference:.1e}, above {bound:.1e}"
            )
        largest = max(largest, difference)
    return largest, bound
