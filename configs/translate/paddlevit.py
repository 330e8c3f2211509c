"""Recognises the settings and values of PaddleViT. paddlevit_files.py translates those that occur only in its files."""

from configs.translate.other_programs import SECTION, Translated
from configs.values import SETTINGS, Text
from configs.yaml_files import Layer

KEYS = {
    "LOCAL_RANK",
    "MODEL.ATTN_HEAD_SIZE",
    "MODEL.PATCH_GRID",
    "TAG",
    "TRAIN.MODEL_EMA_FORCE_CPU",
    "TRAIN.RANDOM_ERASE_SPLIT",
    "TRAIN.RAND_AUGMENT",
    "TRAIN.RAND_AUGMENT_LAYERS",
    "TRAIN.RAND_AUGMENT_MAGNITUDE",
}
VALUES = {
    "TRAIN.AUTO_AUGMENT": {"true", "yes", "on", "false", "no", "off"},
    "TRAIN.LR_SCHEDULER.NAME": {"warmupcosine"},
    "TRAIN.OPTIMIZER.NAME": {"adamwdl"},
    "TRAIN.TEACHER_MODEL": {"./regnety_160.pdparams"},
}


def translate_paddlevit(files: list[Layer], command_line: list[Layer]) -> Translated:
    """Translate PaddleViT's settings in these layers, if there are any."""
    layers = [*files, *command_line]
    if not any(is_paddlevits(key, text) for layer in layers for key, text in layer.texts.items()):
        return Translated(layers, [])
    from configs.translate.paddlevit_files import translate_layers

    return translate_layers(files, command_line)


def our_name(key: str) -> str:
    """Return our name for a key under MODEL.TRANS in PaddleViT's files of 2021; return other keys unchanged."""
    if not key.startswith(f"{SECTION}."):
        return key
    from configs.translate.paddlevit_files import RENAMED

    return RENAMED.get(key, key)


def is_paddlevits(key: str, text: Text) -> bool:
    """Return whether this key, or this value of the key, occurs only in PaddleViT's files."""
    if key in KEYS or f"{key}.".startswith(f"{SECTION}."):
        return True
    if not isinstance(text, str):
        return False
    word = text.strip().lower()
    is_another_model = key == "MODEL.TYPE" and word not in SETTINGS[key].choices
    return is_another_model or word in VALUES.get(key, ())
