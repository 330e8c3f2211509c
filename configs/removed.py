"""Settings, values of settings, and flags that a release removed, each with a remedy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.errors import ConfigError


class Removed(NamedTuple):
    """A setting that a release removed."""

    # Its default, as `plain_word` returns it: every run now behaves that way. None: any value loads.
    default: str | None
    remedy: str = ""  # what to do if the setting has any other value, as the end of a sentence
    version: str = "3.0.0"  # the release that removed it
    of_model: bool = False  # whether a model that was trained with another value would now see other images


WITHOUT_LABELS = "start from weights that LightlyTrain or timm wrote (-pretrained)"
# {full key: the removed setting}
REMOVED: dict[str, Removed] = {
    "PRECISION.EXPLAIN": Removed("false", "see the types of each module with halfstep doctor", "2.0.0"),
    "DATA.CHANNEL_FILES": Removed("none", "write the channels of each image into one file, TIFF or .npy"),
    "DATA.LABELLED_PATH": Removed("none", WITHOUT_LABELS),
    "DATA.TOKENS": Removed("none", "set DATA.IMAGE_SIZE, because all images are resized to one size", of_model=True),
    "DATA.TRAIN_TOKENS": Removed("[]", "set TRAIN.SIZE_SCHEDULE to train with images of several sizes"),
    "TRAIN.FEATURES": Removed("both", WITHOUT_LABELS),
    "TRAIN.FEATURE_LOSS": Removed("cosine", WITHOUT_LABELS),
    "STRANGERS": Removed(None),  # every run with CALIBRATE now has statistics for -unknown
}
# {full key: {value that 3.0.0 took out: what to do instead, as the end of a sentence}}
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "TRAIN.OBJECTIVE": {"features": WITHOUT_LABELS},
    "TRAIN.BEST_METRIC": {
        "knn": "leave the setting out, or choose another metric",
        "similarity": "leave the setting out, or choose another metric",
    },
    "DATA.DATASET": {
        "images": f"use imagefolder for images with classes, or, without labels, {WITHOUT_LABELS}",
        "fractals": "fine-tune weights from ImageNet instead, such as -pretrained tf_efficientnet_lite0, which comes "
        "with halfstep",
    },
}
REMOVED_FLAGS: dict[str, str] = {  # {flag: what to do instead}
    "-explain_precision": "see the types of each module with halfstep doctor",
    "-part_size": "halfstep embed writes one file, which -output names",
    "-undo": "-apply moves no file any more, so there is nothing to undo; for corrections that release 1.1.0 applied, "
    "use that release",
    "-yes": "-apply changes no file of the data, so it does not ask; leave the flag out",
}


def check_removed(texts: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError for removed values, and for removed settings that differ from their defaults.

    `texts`: {full key: text}.
    """
    for key in REMOVED.keys() & texts.keys():
        if REMOVED[key].default not in (None, plain_word(texts[key])):
            raise ConfigError(
                f"{origin}: {key} is {texts[key]!r}, but halfstep {REMOVED[key].version} took this setting out; "
                f"{REMOVED[key].remedy}, and remove this setting"
            )
    for key in REMOVED_VALUES.keys() & texts.keys():
        if remedy := REMOVED_VALUES[key].get(plain_word(texts[key])):
            raise ConfigError(f"{origin}: {key} is {texts[key]}, but halfstep 3.0.0 took this value out; {remedy}")


def refuse_other_images(saved: Mapping[str, Any], path: Any) -> None:
    """Raise ConfigError if a saved model was trained on images that are no longer prepared as they were."""
    for key, removed in REMOVED.items():
        if removed.of_model and plain_word(saved.get(key)) != removed.default:
            raise ConfigError(
                f"{path}: the model was trained with {key}, which halfstep {removed.version} took out; use it with "
                "halfstep 2.3.0, or start a run on squares from its weights (-pretrained)"
            )


def is_removed(key: str, value: Any) -> bool:
    """Return whether a release removed this setting, or this value of it."""
    return key in REMOVED or plain_word(value) in REMOVED_VALUES.get(key, {})


def plain_word(value: Any) -> str:
    """Return none, true or false for all their spellings in YAML and Python; return other values in lower case."""
    word = "" if value is None else str(value).strip().lower()
    plain_words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return plain_words.get(word, word)
