"""Opens the weights of a run: what their file says about the model, and the model with exactly these weights."""

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from configs.removed import refuse_other_images
from configs.schema import Config, Shape
from configs.values import unflatten, wrong_in
from datasets.split import DRAWN
from models import build_model
from models.parts import classifier_names
from models.sized import sized
from models.weights.files import chosen_weights, find_and_read
from models.weights.load import fit_image_size, load_exactly
from models.weights.metadata import calibration_of, image_settings_of
from models.weights.record import CALIBRATION, LEARNED, VERSION_KEY
from utils.errors import ConfigError, naming_damage
from utils.text import first_of, warning

NEEDED = frozenset(("config", "class_names", "data"))  # metadata that every halfstep checkpoint has
FACTS = ("arch", "class_names", "data", "config", "split", "validation", "step", "metric", VERSION_KEY, LEARNED)


@dataclass(frozen=True)
class SavedModel:
    """The weights of a run, with adapters merged."""

    path: Path
    facts: dict[str, Any]  # the metadata of the file; epochs count from 1 here, from 0 in a checkpoint
    key: str  # the name of these weights in a checkpoint, such as state_dict_ema
    weights: dict[str, Tensor]

    @cached_property
    def config(self) -> Config:
        return config_of(self.facts, self.path)

    @property
    def classes(self) -> list[str]:
        return list(self.facts["class_names"])

    @property
    def record(self) -> dict[str, Any]:
        """Return the metadata of a file that has only these weights."""
        return self.facts | {"weights": self.key}

    def build(self, config: Config, needs_classes: bool = True) -> nn.Module:
        """Return the model. Without `needs_classes`, the weights may lack a classifier layer."""
        model = build_model(config, config.MODEL.NUM_CLASSES or len(self.classes))
        if not (needs_classes or outputs_in(self.weights, model)):
            model.reset_classifier(0)
        shape = self.config.DATA.shape if "data" in self.facts else None
        fitted = fit_image_size(model, self.weights, [], shape, sized(config, model.num_classes))
        load_exactly(model, fitted, self.path)
        return model


def open_model(source: str | Path, key: str | None = None, needed: Set[str] = NEEDED) -> SavedModel:
    """Open a checkpoint of a run, or an export of it. `key`: its weights; None: the better of raw and EMA weights."""
    path, content = find_and_read(source, needed)
    chosen, weights = chosen_weights(content, path, key)
    facts = {name: content[name] for name in FACTS if name in content}
    facts |= {"epoch": content["epoch"] + 1} if "epoch" in content else {}
    if chosen != chosen_weights(content, path, None)[0]:
        facts.pop("metric", None)  # it is the metric of the better weights
    if calibration := calibration_of(content, chosen, path):
        facts[CALIBRATION] = calibration
    return SavedModel(path, facts, chosen, weights)


def outputs_in(weights: dict[str, Tensor], model: nn.Module) -> int:
    """Return the number of outputs of the classifier in the weights of such a model, or 0 if they have none."""
    heads = [weights.get(f"{name}.weight") for name in classifier_names(model)]
    return next((len(head) for head in heads if head is not None), 0)


def config_of(state: dict[str, Any], path: str | Path = "the checkpoint") -> Config:
    """Return the settings in a run's checkpoint, with the preprocessing from its `data` entry."""
    with naming_damage(path):
        refuse_other_images(state["config"], path)
        data = state["data"]
        channels, *sides = data["input_size"]
        images = image_settings_of(data) | {"DATA.IMAGE_SIZE": Shape(*sides).size}
        if wrong_in(images) or not channels == len(data["mean"]) == len(data["std"]):
            raise ValueError(f"invalid preprocessing: {data}"[:200])
        return without_float8(unflatten(state["config"] | images))


def without_float8(config: Config) -> Config:
    """Return the settings with bfloat16 in place of float8, because many machines for inference lack float8."""
    if config.PRECISION.MODE != "float8":
        return config
    return config.changed("PRECISION", MODE="autocast", DTYPE="bfloat16")


def describe_learned(record: Mapping[str, Any]) -> list[str]:
    """Return a warning if the weights are the mean of runs that held out different images."""
    if LEARNED not in record:
        return []
    return [
        warning(
            "the weights are the mean of runs that held out different images; no image of "
            f"{first_of(record[LEARNED])} counts as held out, because one of the runs may have learned it; score the "
            "mean on other images"
        )
    ]


def warn_of_learned(record: Mapping[str, Any], split: Mapping[str, Any], source: str) -> list[str]:
    """Return a warning if a mean of runs is evaluated on images that they have learned. `split`: of these images.

    Raise ConfigError if they belong to published data, of which a part always counts as held out.
    """
    places = {os.path.realpath(place) for place in record.get(LEARNED, ())}
    if os.path.realpath(split["validation"]) not in places:
        return []
    if split["rule"] in DRAWN:
        raise ConfigError(
            f"MODEL.PRETRAINED: {source} is the mean of runs that held out different images of {split['validation']}, "
            "so no image counts as held out; evaluate one of the runs, or name other images"
        )
    return describe_learned(record)
