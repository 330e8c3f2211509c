"""Translates PaddleViT's setting names and values into ours when a file is read."""

import math
from dataclasses import replace

from configs.paddlevit import SECTION, Translated, Words, replace_words
from configs.removed import plain_word
from configs.typed_names import suggest_key
from configs.values import ALL_SETTINGS, SETTINGS, Text, convert, is_none, quoted
from configs.yaml_files import Layer
from extras.paddlevit.weights import take_deit, timm_name
from utils.errors import ConfigError, did_you_mean

# PaddleViT's two formats of 2021 nest the model's fields one level deeper. In the older format, three fields have other
# names.
_HYBRID, _MLP_DIM = f"{SECTION}.HYBRID", f"{SECTION}.MLP_DIM"
_SAME_NAMES = "PATCH_GRID PATCH_SIZE EMBED_DIM MLP_RATIO DEPTH NUM_HEADS ATTN_HEAD_SIZE QKV_BIAS".split()
RENAMED = {f"{SECTION}.{name}": f"MODEL.{name}" for name in _SAME_NAMES} | {
    f"{SECTION}.HIDDEN_SIZE": "MODEL.EMBED_DIM",
    f"{SECTION}.NUM_LAYERS": "MODEL.DEPTH",
    _MLP_DIM: "MODEL.MLP_RATIO",
}

WORDS: Words = {
    "TRAIN.LR_SCHEDULER.NAME": {
        "warmupcosine": ("cosine", "the same schedule, updated every step; for updates once per epoch, set paddlevit")
    },
    "TRAIN.AUTO_AUGMENT": {
        **dict.fromkeys(("true", "yes", "on"), ("original", "AutoAugment's policy for ImageNet")),
        **dict.fromkeys(("false", "no", "off"), ("None", "no policy")),
    },
    "TRAIN.OPTIMIZER.NAME": {"adamwdl": ("AdamW", "its layer decay is TRAIN.LAYER_DECAY")},
    "TRAIN.TEACHER_MODEL": {
        "./regnety_160.pdparams": ("regnety_160.deit_in1k", "timm's weights of the same model"),
    },
}


# PaddleViT's other keys are accepted, so that its files work unmodified. Each is reported in one log line.
IGNORED = {
    "LOCAL_RANK": "the launcher says which process this is",
    "MODEL.PATCH_GRID": "the number of patches follows from IMAGE_SIZE and PATCH_SIZE",
    "TRAIN.MODEL_EMA_FORCE_CPU": "the EMA weights are kept on the model's device",
    "TRAIN.RANDOM_ERASE_SPLIT": "random erasing handles each image separately, so there is nothing to split",
}


# Other keys are translated by _replaced: from these settings to one of ours.
RAND_AUGMENT = ("TRAIN.RAND_AUGMENT", "TRAIN.RAND_AUGMENT_MAGNITUDE", "TRAIN.RAND_AUGMENT_LAYERS")
REPLACED = ("MODEL.ATTN_HEAD_SIZE", "TAG", *RAND_AUGMENT)


def _replaced(texts: dict[str, Text], context: dict[str, Text], origin: str) -> dict[str, str]:
    """Return our settings for the keys of REPLACED in `texts`. Raise ConfigError for values without an equivalent.

    `context`: `texts` and the texts of earlier layers, because keys that belong together may be in different layers.
    """
    if plain_word(texts.get("TAG")) not in ("none", "default"):
        raise ConfigError(
            f"{origin}: TAG is {texts['TAG']!r}; set the whole name of the run's folder with -name (NAME)"
        )
    names = ("ATTN_HEAD_SIZE", "EMBED_DIM", "NUM_HEADS")
    size, width, heads = (plain_word(context.get(f"MODEL.{name}")) for name in names)
    are_whole = all(each.isdigit() for each in (size, width, heads))
    is_usual = size == "none" or (are_whole and int(heads) * int(size) == int(width))
    if "MODEL.ATTN_HEAD_SIZE" in texts and not is_usual:
        raise ConfigError(
            f"{origin}: MODEL.ATTN_HEAD_SIZE is {size}, but the size of a head is always MODEL.EMBED_DIM / MODEL.NUM_HEADS "
            "in timm's VisionTransformer; change one of these two settings, and remove this line"
        )
    return _rand_augment(context) if not texts.keys().isdisjoint(RAND_AUGMENT) else {}


def _rand_augment(context: dict[str, Text]) -> dict[str, str]:
    """Return TRAIN.AUTO_AUGMENT with the magnitude and number of operations of PaddleViT's RandAugment."""
    switch, policy = RAND_AUGMENT[0], "TRAIN.AUTO_AUGMENT"
    if switch not in context:
        return {}
    if plain_word(context[switch]) != "true":
        return {policy: context.get(policy, "none")}
    magnitude, number = (context.get(key, default) for key, default in zip(RAND_AUGMENT[1:], (9, 2), strict=True))
    try:
        return {policy: f"rand-m{float(magnitude):g}-n{int(number)}-mstd0.5-inc1"}
    except (ValueError, TypeError):
        raise ConfigError(
            f"{switch}_MAGNITUDE is {magnitude!r}, and {switch}_LAYERS is {number!r}; set them to a number and an "
            "integer"
        ) from None


def translate_layers(files: list[Layer], command_line: list[Layer]) -> Translated:
    """Return the layers with our settings, and a note for each translated value."""
    files, deit = take_deit(files, command_line)
    layers, notes = [], []
    context: dict[str, Text] = {}
    for layer in [*files, *command_line]:
        _check_type(layer.texts, layer.origin)
        texts, lines = replace_words(rename(layer.texts, layer.origin), layer.origin, WORDS)
        context |= texts  # settings that are replaced together may be in different layers
        replacements = _replaced(texts, context, layer.origin)
        lines += [f"{layer.origin}: {key} is ignored: {IGNORED[key]}" for key in texts if key in IGNORED]
        texts = {key: text for key, text in texts.items() if key not in (*REPLACED, *IGNORED)} | replacements
        layers.append(replace(layer, texts=texts))
        notes += lines
    return Translated(layers, notes, deit.agree if deit else None)


def rename(texts: dict[str, Text], origin: str) -> dict[str, Text]:
    """Return a layer's texts under our setting names."""
    renamed: dict[str, Text] = {}
    written_as: dict[str, str] = {}
    for key, text in texts.items():
        if key in (SECTION, _HYBRID) and _is_off(key, text, origin):
            continue
        if key == _MLP_DIM:
            text = _mlp_ratio(texts, origin)
        name = RENAMED.get(key, key)
        if name.startswith(f"{SECTION}."):
            raise ConfigError(f"{origin}: unknown key {key}{suggest_key(key, [*ALL_SETTINGS, *RENAMED, 'BASE'])}")
        if name in renamed:
            raise ConfigError(
                f"{origin}: {written_as[name]} and {key} are names of the same setting; remove one of them"
            )
        renamed[name] = text
        written_as[name] = key
    return renamed


def _is_off(key: str, text: Text, origin: str) -> bool:
    """Return whether MODEL.TRANS is empty or its HYBRID is off. Raise ConfigError for other values."""
    if is_none(text) or (key == _HYBRID and str(text).strip().lower() in ("false", "no", "off")):
        return True
    if key == SECTION:
        raise ConfigError(
            f"{origin}: {key} is {quoted(text)}, but it is a section; set one of its settings, such as "
            f"{next(iter(RENAMED))}"
        )
    raise ConfigError(
        f"{origin}: {_HYBRID} is {text!r}; for a convolutional stem under the transformer set MODEL.TYPE: timm and "
        "MODEL.NAME to one of timm's hybrids, for example vit_base_r50_s16_224"
    )


def _check_type(texts: dict[str, Text], origin: str) -> None:
    """Raise ConfigError if MODEL.TYPE is not vit or timm. Otherwise the model's keys would be reported as unknown."""
    kind = texts.get("MODEL.TYPE", "vit")
    if not isinstance(kind, str) or kind.strip().lower() in SETTINGS["MODEL.TYPE"].choices:
        return
    name = texts.get("MODEL.NAME", kind)
    if found := timm_name(name):
        raise ConfigError(
            f"{origin}: MODEL.TYPE is {kind!r}; it must be vit or timm. timm has this model: set MODEL.TYPE: timm and "
            f"MODEL.NAME: {found}, and remove MODEL's keys that describe layers (docs/from-paddlevit.md has the "
            "training settings of PaddleViT's families)"
        )
    import timm  # local: importing timm takes seconds, and only this error needs it

    near = did_you_mean(name.replace("-", "_"), timm.list_models()) if isinstance(name, str) else ""
    raise ConfigError(
        f"{origin}: MODEL.TYPE is {kind!r}; it must be vit or timm. For other models set MODEL.TYPE: timm and "
        f"MODEL.NAME to one of timm.list_models(), and remove MODEL's keys that describe layers{near}"
    )


def _mlp_ratio(texts: dict[str, Text], origin: str) -> str:
    width_key = next((key for key in texts if RENAMED.get(key, key) == "MODEL.EMBED_DIM"), None)
    if width_key is None:
        raise ConfigError(f"{origin}: {_MLP_DIM} has no effect without {SECTION}.HIDDEN_SIZE; set both, or MLP_RATIO")
    keys = (_MLP_DIM, width_key)  # both have the bounds of MODEL.EMBED_DIM
    hidden, width = (convert(replace(SETTINGS["MODEL.EMBED_DIM"], key=key), texts[key], origin) for key in keys)
    # A ViT's MLP has int(width * ratio) units, which is one too few if the ratio was rounded down.
    ratio = hidden / width
    return repr(ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf))
