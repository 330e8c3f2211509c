"""A trained classifier loaded from a run, a checkpoint or other weights, with its settings, classes and description."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from configs.schema import Config
from datasets.class_numbers import read_classes
from datasets.pixels.kinds import pixels_of
from engine.open_model import NEEDED, open_model, outputs_in, without_float8
from engine.settings import load_settings
from engine.settings_of_weights import override, refuse_other_pixels
from models import build_model
from models.sized import sized
from models.weights.files import find_file, read_record, read_state_dict
from models.weights.load import load_pretrained
from models.weights.metadata import classes_of_weights, pretrained_cfg
from models.weights.record import CALIBRATION, preprocessing_of
from utils.commands import page
from utils.errors import ConfigError
from utils.text import counted

USUAL_CLASSES = 1000


@dataclass
class Classifier:
    """A model with its weights, in evaluation mode on the CPU, before any model transform."""

    config: Config  # with the preprocessing of its evaluation, in float32 unless flags say otherwise
    model: nn.Module
    classes: list[str]  # one name for each output
    source: str  # the file or name of the weights
    weights: str  # the key of the weights in a checkpoint, such as state_dict_ema
    epoch: int | None  # the epoch after which the weights were saved, if known
    calibration: dict[str, Any] = field(default_factory=dict)  # of these weights, from their run; {}: none
    runtime: str = ""  # the program that computes an exported graph
    takes_photo: bool = False  # whether such a graph prepares the photo itself

    @property
    def temperature(self) -> float | list[float] | None:
        """Return the number, or one for each class, by which logits are divided, or None if not calibrated."""
        return self.calibration.get("temperature")

    def describe(self) -> str:
        kind = f" ({self.weights})" if self.weights else ""
        epoch = f" after epoch {self.epoch}" if self.epoch else ""
        calibrated = ", calibrated" if self.temperature else ""
        outputs = counted(len(self.classes), self.config.task.noun)
        return f"{self.source}{kind}: {self.config.MODEL.NAME}{epoch}, {outputs}{calibrated}"

    def facts(self) -> dict[str, Any]:
        """Return facts about the model and its preprocessing as plain values, for a JSON file."""
        return {
            "model": {
                "weights": self.source,
                "key": self.weights or None,
                "architecture": self.config.MODEL.NAME,
                "epoch": self.epoch,
                "classes": self.classes,
                "temperature": self.temperature,
            },
            "preprocessing": preprocessing_of(self.config.DATA) | {"exif": pixels_of(self.config.DATA).exif},
        }


def load_classifier(
    source: str | Path,
    flags: Sequence[str] = (),
    raw: bool = False,
    names: Path | None = None,
    needs_classes: bool = True,
    load_graph: Callable[[Path, Sequence[str], bool], Classifier] | None = None,
) -> Classifier:
    """Load a classifier from a run, a checkpoint or other weights.

    `source` is the folder of a run, a checkpoint, an exported .onnx graph, or anything that -pretrained accepts.
    `flags` are command-line flags as for -eval. `raw` selects the raw weights of a checkpoint even if the EMA scored
    better. `names` is a file with one class per line. Without `needs_classes`, weights without a classifier layer are
    loaded too. `load_graph` loads an exported graph; without it, graphs are refused.
    """
    source = str(source)
    path = find_file(source)
    options = (flags, raw, needs_classes)
    ending = path.suffix if path is not None else ""
    if ending == ".pt2" or ending == ".onnx" and not load_graph:
        raise ConfigError(
            f"{path}: this exported graph cannot be used here; use the run, a .safetensors file, or with "
            "halfstep predict .onnx"
        )
    if ending == ".onnx":
        classifier = load_graph(path, flags, raw)
    elif path is not None and NEEDED <= read_record(path).keys():
        classifier = _load_ours(path, *options)
    else:
        classifier = _load_other(source, path, *options)
    num_classes = classifier.model.eval().num_classes
    if names:
        classifier.classes, noun = read_classes(str(names), "-classes"), classifier.config.task.noun
        if len(classifier.classes) != num_classes:
            raise ConfigError(
                f"-classes: {names} has {counted(len(classifier.classes), 'line')}, but the model has "
                f"{counted(num_classes, noun)}; name one {noun} per line"
            )
    if classifier.config.task.has_classes:
        classifier.classes += [f"class {number}" for number in range(len(classifier.classes), num_classes)]
    return classifier


def _load_ours(path: Path, flags: Sequence[str], raw: bool, needs_classes: bool) -> Classifier:
    saved = open_model(path, "state_dict" if raw else None)
    # Half precision, also of another type on each device, would give other answers than an exported graph.
    config = override(replace(saved.config, AMP=False), flags, for_features=not needs_classes)
    model, epoch = saved.build(config, needs_classes), saved.facts.get("epoch")
    return Classifier(config, model, saved.classes, str(saved.path), saved.key, epoch, saved.facts.get(CALIBRATION, {}))


def _load_other(source: str, path: Path | None, flags: Sequence[str], raw: bool, needs_classes: bool) -> Classifier:
    """Load a classifier from weights of timm, PaddleViT, torchvision or another program."""
    if raw:
        raise ConfigError(
            f"-raw: {source} is not a checkpoint of a run, and only checkpoints have raw and EMA weights; leave -raw "
            "out"
        )
    from configs.auto import without_auto

    try:  # the settings with which -eval would evaluate these weights
        loaded = without_auto(load_settings(["-eval", "-pretrained", source, *flags]))
        refuse_other_pixels(loaded, loaded.weights)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("MODEL.PRETRAINED: ")) from None
    # Users' own photos need their EXIF orientation applied, as in data sets that consist of photos.
    config = without_float8(loaded.config.changed("DATA", EXIF=loaded.config.DATA.EXIF or "apply"))
    if path:
        model, state = build_model(config, config.MODEL.NUM_CLASSES or USUAL_CLASSES), read_state_dict(path)
        number = outputs_in(state, model)
    else:
        model, number = None, pretrained_cfg(source).get("num_classes")
    if not number and needs_classes:
        raise ConfigError(
            f"{source}: these weights have no classifier layer; fine-tune them on images with classes first "
            f"({page('docs/fine-tuning.md')})"
        )
    if model is None or number != model.num_classes:
        model = build_model(config, number)
    load_pretrained(model, source, "weights", needs_head=bool(number), sized=sized(config, model.num_classes))
    return Classifier(config, model, _class_names(source, number), str(path or source), "", None)


def _class_names(source: str, number: int) -> list[str]:
    """Return the class names stored with the weights, else ImageNet's names if their number matches, else []."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    names, subset = classes_of_weights(source), infer_imagenet_subset({"num_classes": number})
    info = ImageNetInfo(subset) if subset else None
    if info and names in ([], info.label_names()):
        return info.label_descriptions()
    return names if len(names) == number else []
