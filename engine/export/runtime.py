"""Classifies images with a graph that halfstep export wrote (.onnx), computed by onnxruntime."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets.image_set import ImageSet
from datasets.order import Piece
from datasets.passes import read_each
from datasets.pixels.rules import ImageReadError
from datasets.types import Batch
from engine.open_model import config_of
from engine.predict.classifier import Classifier
from engine.predict.predictor import Predictor
from engine.settings import fine_tuning_batch
from engine.settings_of_weights import override
from utils.distributed import Process
from utils.errors import ConfigError, cause_of, naming_damage, needing
from utils.torch_internals import import_timm

ENDING = ".onnx"
NEEDED = ("class_names", "data", "probabilities")  # metadata that halfstep export writes
FIXED = ("-cfg", "-opts", "-image_size", "-amp")  # flags that would change the graph
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
READ_AHEAD = 2  # photos


class Graph(nn.Module):
    """A graph with the interface of a model: images to logits, or a photo to its probabilities."""

    def __init__(self, path: Path):
        super().__init__()
        with needing("onnxruntime", str(path)):
            import onnxruntime
        providers = [each for each in PROVIDERS if each in onnxruntime.get_available_providers()]
        try:
            options = onnxruntime.SessionOptions()
            # Idle threads do not spin, so that the cores can decode the next photos.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self.session = onnxruntime.InferenceSession(path, options, providers=providers)
        except Exception as error:  # onnxruntime has a class of errors for each cause
            raise ConfigError(
                f"{path}: onnxruntime cannot read this file ({cause_of(error)}); export it again"
            ) from error
        texts = self.session.get_modelmeta().custom_metadata_map
        if missing := [key for key in NEEDED if key not in texts]:
            raise ConfigError(
                f"{path}: its metadata lacks {', '.join(missing)}; only files of halfstep export say what their inputs "
                "and outputs mean"
            )
        with naming_damage(path):
            self.facts = {key: json.loads(text) for key, text in texts.items()}
        self.input = self.session.get_inputs()[0].name
        self.takes_photo = self.input == "photo"
        self.known: list[
            np.ndarray
        ] = []  # the second output for the newest photo: how well it fits the validation images
        self.num_classes = len(self.facts["class_names"])
        self.runtime = f"onnxruntime {onnxruntime.__version__} ({self.session.get_providers()[0]})"

    def forward(self, images: Tensor) -> Tensor:
        if not self.takes_photo:
            return torch.from_numpy(self.session.run(None, {self.input: images.cpu().numpy()})[0]).to(images.device)
        photo = images[0].permute(1, 2, 0).contiguous().cpu().numpy()
        outputs, *self.known = self.session.run(None, {self.input: photo})
        return torch.from_numpy(outputs)[None]


def load_exported(path: Path, flags: Sequence[str], raw: bool) -> Classifier:
    """Load a graph as a classifier. Raise ConfigError for flags that a finished graph cannot obey."""
    fixed = [flag for flag in FIXED if flag in flags] + (["-raw"] if raw else [])
    if fixed:
        raise ConfigError(f"{', '.join(fixed)}: the graph in {path} is finished; leave the flag out")
    import_timm()  # quickly; the predictor's transforms import it in any case
    graph = Graph(path)
    facts, data = graph.facts, graph.facts["data"]
    if graph.takes_photo and "pixels" not in data:  # a graph of a grey model converts colours itself
        repeat = 3 // data["input_size"][0]
        data |= {"input_size": [3, *data["input_size"][1:]], "mean": data["mean"] * repeat, "std": data["std"] * repeat}
    settings = {"DATA.EXIF": facts.get("exif", "apply"), "MODEL.NAME": facts.get("arch", path.stem), "AMP": False}
    settings |= {"DATA.BATCH_SIZE": int(fine_tuning_batch().texts["DATA.BATCH_SIZE"])}
    settings |= {"TRAIN.OBJECTIVE": facts["objective"]} if "objective" in facts else {}
    if facts["probabilities"] == "sigmoid":
        settings["DATA.LABEL_SEPARATOR"] = "|"
    config = override(config_of({"config": settings, "data": data}, path), flags)
    calibration = facts.get("calibration", {})
    if calibration.get("temperature") and (graph.takes_photo or facts.get("calibrated")):
        calibration |= {"temperature": 1.0}  # the graph divides by it
    classes, epoch = list(facts["class_names"]), facts.get("epoch")
    return Classifier(
        config, graph.eval(), classes, str(path), "", epoch, calibration, graph.runtime, graph.takes_photo
    )


class PhotoPredictor(Predictor):
    """A predictor that hands whole photos to the graph, one at a time."""

    def __init__(self, classifier: Classifier, process: Process, flip: bool, say: Callable[[str], None]):
        if flip:
            raise ConfigError(f"-flip: the graph in {classifier.source} prepares the photo itself; leave -flip out")
        super().__init__(classifier, process, flip, say)

    def pictures(self, images: Tensor) -> Sequence[np.ndarray]:
        return [self.pixels.shown(photo) for photo in images.permute(0, 2, 3, 1).cpu().numpy()]

    def _probabilities(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        outputs = self.inference.outputs(self.model, pixels, self.classifier.source)
        known = self.model.known
        return outputs, torch.from_numpy(np.atleast_1d(known[0])) if known else None

    def batches(self, config: Config, images: ImageSet) -> Iterator[Batch]:
        own, nothing = range(self.process.rank, len(images), self.process.world_size), torch.zeros(0)
        for index, pixels in read_each(own, images.read, "", READ_AHEAD, ahead=1):
            if isinstance(pixels, ImageReadError):
                yield Batch(nothing, nothing, 0, [index])
            else:
                piece = Piece(0, np.array([index]), 1)
                yield Batch(torch.from_numpy(pixels).permute(2, 0, 1)[None], nothing, 1, [], piece)
        if len(own) < len(range(0, len(images), self.process.world_size)):  # the first process has one more
            yield Batch(nothing, nothing, 0, [])
