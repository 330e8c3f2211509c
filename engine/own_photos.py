"""Chooses weights, image size and epochs for own photos, if the command line names neither -cfg nor -pretrained.

The log says what was chosen, and which flags change it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.flags import FLAGS
from configs.values import ALL_SETTINGS, Text, convert
from configs.yaml_files import Layer
from datasets.pixels.decode import KNOWN_ENDINGS
from datasets.sources.layout import ARCHIVES
from datasets.sources.recognised import recognise_data
from engine.settings_of_weights import MODEL_SETTINGS, is_on
from models.weights.metadata import SHIPPED_FILE
from utils.commands import command, page
from utils.errors import ConfigError, DataError
from utils.host import find_devices
from utils.text import is_url

# 160 pixels take 1.5 times as long, 20 epochs twice as long, and neither is better on other photos by more than noise
# (BENCHMARKS.md, "Size and epochs of own photos").
ON_A_CPU = {"DATA.IMAGE_SIZE": "128", "TRAIN.NUM_EPOCHS": "10"}
# On a GPU, size and epochs are those of the weights and of configs/finetune_batchnorm.yaml. A larger model fits there.
LARGER, LARGER_SIZE = "vit_small_patch16_224", "22 million instead of 4.7 million weights, a download of 88 MB"
TABLES = (".csv", ".parquet")
LAYOUT = "name a folder that has a folder for each class, such as photos/cat and photos/dog: halfstep train photos"


class OwnPhotos(NamedTuple):
    """What is chosen for own photos: a layer of settings, and lines for the log."""

    layer: Layer
    notes: list[str]


def choose_for(typed: Mapping[str, Text], layers: Sequence[Layer]) -> OwnPhotos:
    """Choose the settings for own photos that the command line does not set.

    Raise an error for an evaluation, and for a wrong path or model. `typed`: {key: text} of `layers`, the command line,
    without texts that mean "not set".
    """
    if is_on(dict(typed), "EVAL"):
        raise ConfigError(
            "-eval: no weights are named; name a run or a file of weights, as in halfstep evaluate latest photos"
        )
    if any("MODEL.PRETRAINED" in layer.texts for layer in layers):
        raise ConfigError(
            "MODEL.PRETRAINED: none is given, but no model that starts from random weights; name a settings file with "
            f"-cfg, or leave -pretrained out to start from {SHIPPED_FILE.stem}"
        )
    refuse_other_model(typed)
    path = str(typed["DATA.DATA_PATH"])
    refuse_other_files(path)
    weights = SHIPPED_FILE.stem
    device = find_devices(convert(ALL_SETTINGS["DEVICE"], typed.get("DEVICE", "auto"), "DEVICE"))[0]
    chosen = {"MODEL.PRETRAINED": weights, "DATA.DATASET": recognise_data(path)}
    if device == "cpu":
        chosen |= ON_A_CPU
    chosen = {key: text for key, text in chosen.items() if key not in typed}
    flags = {key: flag for group in FLAGS.values() for flag, (key, _) in group.items()}
    texts = ", ".join(f"{flags[key]} {text}" for key, text in chosen.items())
    title = "a CPU" if device == "cpu" else f"a GPU ({device})"
    notes = [f"own photos on {title}: {texts}; append one of these flags with another value to change it"]
    if device != "cpu":
        notes.append(
            f"a larger model for a GPU: -pretrained {LARGER} ({LARGER_SIZE}); "
            f"{command('models', LARGER, '-data_path', Path(path))} estimates its time and accuracy on these photos"
        )
    return OwnPhotos(Layer("for own photos", chosen), notes)


def refuse_other_model(typed: Mapping[str, Text]) -> None:
    """Raise ConfigError if the command line names a model, which the weights that come with halfstep do not fit."""
    for key in ("MODEL.NAME", *MODEL_SETTINGS):
        if key in typed:
            raise ConfigError(
                f"{key}: {typed[key]} is set, but no weights; -pretrained NAME fine-tunes timm's model of that name, "
                "and -cfg FILE trains the model of a settings file; without both, own photos start from "
                f"{SHIPPED_FILE.stem}, and no model is named"
            )


def refuse_other_files(path: str) -> None:
    """Raise DataError if there is nothing at the path, or a file that is neither a table nor an archive."""
    if is_url(path):
        return
    place = Path(path).expanduser()
    ending = place.suffix.lower()
    if not place.exists():
        raise DataError(f"DATA.DATA_PATH: {path} does not exist in {Path.cwd()}; {LAYOUT}; quote a name with spaces")
    if not place.is_file() or ending in TABLES or place.name.lower().endswith(ARCHIVES):
        return
    if ending in KNOWN_ENDINGS:
        predict = command("predict", "latest", place)
        raise DataError(f"DATA.DATA_PATH: {path} is a single photo; {LAYOUT}; to classify this photo: {predict}")
    raise DataError(
        f"DATA.DATA_PATH: {path} is a file, but no table of photos ({' or '.join(TABLES)}); {LAYOUT} (other layouts: "
        f"{page('docs/data.md')})"
    )
