"""A trained float32 model to export, with its classes and preprocessing, and checks of the exported model."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from configs.schema import Config
from datasets.pixels import Pixels
from datasets.pixels.kinds import pixels_of
from engine.export.files import WrongExport
from engine.open_model import SavedModel
from models.units import InUnits, Scale
from models.weights.record import CALIBRATION, KNOWN, VERSION_KEY, preprocessing_of
from utils.errors import ConfigError

KEPT = ("arch", "epoch", VERSION_KEY, "exif", CALIBRATION)  # parts of the record that a graph file keeps
NO_FEATURES = {"reason": "only a graph of halfstep export -photo has them"}
BOUND = 1e-4  # the largest difference allowed, times max(1, largest logit); reordered float32 sums differ by less
BATCHES = (1, 8)


@dataclass(frozen=True)
class Subject:
    """A trained model to export, whose graph takes normalized images."""

    saved: SavedModel
    is_calibrated: bool  # whether the graph divides the logits by the temperature
    names = ("images", "logits")  # of the input and the output of a graph
    dimensions = {0: Dim("batch", min=1)}  # the sizes of the input that vary

    def __post_init__(self):
        if self.is_calibrated and not self.temperature:
            raise ConfigError(
                f"-calibrated: {self.saved.path} has no calibration for {self.saved.key}; leave -calibrated out, or "
                "use the best.pth of a run with CALIBRATE: true"
            )

    @property
    def config(self) -> Config:
        return self.saved.config

    @cached_property
    def pixels(self) -> Pixels:
        return pixels_of(self.config.DATA)

    @cached_property
    def model(self) -> nn.Module:
        """Return the model in evaluation mode, in float32 regardless of its training type."""
        return self.saved.build(self.config).float().eval()

    @cached_property
    def record(self) -> dict[str, Any]:
        """Return the checkpoint's metadata, and how image files are read."""
        return self.saved.record | {"exif": self.pixels.exif, "background": self.pixels.background}

    @property
    def calibration(self) -> dict[str, Any]:
        return self.saved.facts.get(CALIBRATION, {})

    @property
    def temperature(self) -> float | list[float] | None:
        return self.calibration.get("temperature")

    @cached_property
    def graph(self) -> nn.Module:
        """Return the model whose logits are exported: the model, or with `is_calibrated` the model with temperature."""
        if self.is_calibrated:
            return Calibrated(self.model, self.temperature).eval()
        return self.in_units(self.model)

    def in_units(self, model: nn.Module) -> nn.Module:
        """Return a model that returns numbers in the units of the data; for classes, the model itself."""
        scale = Scale.of(self.config)
        return InUnits(model, scale).eval() if scale else model

    @property
    def example(self) -> Tensor:
        """Return an input of the graph."""
        return self.images(2, seed=0)

    def check(self, run: Callable[[Tensor], Tensor]) -> str:
        """Compare the logits of a loaded export with the original's. Raise WrongExport if they differ."""
        largest, bound = 0.0, BOUND
        for images in self.batches():
            expected, outputs = self.graph(images), run(images)
            if outputs.shape != expected.shape:
                raise WrongExport(f"it returns logits of shape {list(outputs.shape)}, not {list(expected.shape)}")
            if isinstance(self.graph, InUnits):
                expected, outputs = (self.graph.standardized(each) for each in (expected, outputs))
            difference = (outputs.double() - expected.double()).abs().max().item()
            bound = max(bound, BOUND * expected.abs().max().item())
            if not difference <= bound:  # true for NaN too
                raise WrongExport(
                    f"its logits for {len(images)} images differ by up to {difference:.1e} (at most {bound:.1e} is "
                    "allowed)"
                )
            largest = max(largest, difference)
        return f"largest difference of logits {largest:.1e} (at most {bound:.1e})"

    @property
    def labels(self) -> list[str]:
        """Return a name for each logit."""
        classes = self.saved.classes
        return [*classes, *(f"class {number}" for number in range(len(classes), self.model.num_classes))]

    @property
    def data(self) -> dict[str, Any]:
        return preprocessing_of(self.config.DATA)

    @property
    def facts(self) -> dict[str, str]:
        """Return the metadata of a graph file as JSON strings: class names, preprocessing, meaning of the logits ..."""
        facts = {key: self.record[key] for key in KEPT if key in self.record}
        if "statistics" in self.calibration.get(KNOWN, {}):
            # They are part of a graph that returns the score, and useless for a graph that returns no features.
            facts[CALIBRATION] = self.calibration | {KNOWN: {} if "known" in self.names else NO_FEATURES}
        facts |= {"temperature": self.temperature, "calibrated": self.is_calibrated} if self.temperature else {}
        facts |= {"class_names": self.labels, "data": self.data, "probabilities": self.config.task.activation}
        if (objective := self.config.TRAIN.OBJECTIVE) != Config().TRAIN.OBJECTIVE:
            facts["objective"] = objective
        return {key: json.dumps(value) for key, value in facts.items()}

    def images(self, count: int, seed: int) -> Tensor:
        """Return random images [count, C, H, W], normalized."""
        generator = torch.Generator().manual_seed(seed)
        return self.normalized(torch.rand(count, *self.data["input_size"], generator=generator))

    def normalized(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(self.data[key], dtype=torch.float32)[:, None, None] for key in ("mean", "std"))
        return (images - mean) / std

    def batches(self) -> Iterator[Tensor]:
        """Yield batches of normalized images: random, black, white, and striped."""
        size = self.data["input_size"]
        stripes = (torch.arange(size[-1]) % 2).float().expand(size)
        extreme = self.normalized(torch.stack([torch.zeros(size), torch.ones(size), stripes]))
        for number, count in enumerate(BATCHES):
            random = self.images(count, seed=number)
            yield random
            yield torch.cat([extreme, random])[:count]


class Calibrated(nn.Module):
    """A model whose logits are divided by its temperature."""

    def __init__(self, model: nn.Module, temperature: float | list[float]):
        super().__init__()
        self.model = model
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images) / self.temperature
