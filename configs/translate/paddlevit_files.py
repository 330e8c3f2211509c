"""Translates PaddleViT's settings and its DeiT models. models/weights/paddle.py reads its weights."""

import math
from dataclasses import dataclass, replace
from typing import Any

from configs.removed import plain_word
from configs.translate.other_programs import SECTION, Translated, Words, replace_words
from configs.typed_names import suggest_key
from configs.values import ALL_SETTINGS, BOOLS, SETTINGS, Text, convert, is_none, quoted
from configs.yaml_files import Layer
from utils.commands import page
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import import_timm
from utils.without_values import build_without_values

# --- PaddleViT's names and values become ours ---

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
            f"{origin}: MODEL.ATTN_HEAD_SIZE is {size}, but the size of a head is always MODEL.EMBED_DIM / "
            "MODEL.NUM_HEADS in timm's VisionTransformer; change one of these two settings, and remove this line"
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
    name_in_timm = timm_name(name)
    near = "" if name_in_timm else did_you_mean(_word(name).replace("-", "_"), import_timm().list_models())
    raise ConfigError(
        f"{origin}: MODEL.TYPE is {kind!r}; it must be vit or timm. For other models set MODEL.TYPE: timm and "
        f"MODEL.NAME: {name_in_timm or 'one of timm.list_models()'}, and remove MODEL's keys that describe layers "
        f"({page('docs/from-paddlevit.md')} has the training settings of PaddleViT's families){near}"
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


# --- DeiT ---


DISTILLATION = "TRAIN.DISTILLATION_TYPE"

# Defaults from PaddleViT's config.py for DeiT. PaddleViT's settings files leave these values out.
DEFAULTS = {
    "TRAIN.NUM_EPOCHS": "300",
    "TRAIN.WARMUP_EPOCHS": "5",
    "TRAIN.WEIGHT_DECAY": "0.05",
    "TRAIN.BASE_LR": "5e-4",
    "TRAIN.WARMUP_START_LR": "1e-6",
    "TRAIN.END_LR": "0.0",
    "TRAIN.LINEAR_SCALED_LR": "512",
    "TRAIN.MODEL_EMA": "true",
    "TRAIN.MODEL_EMA_DECAY": "0.99996",
    "TRAIN.SMOOTHING": "0.1",
    "TRAIN.COLOR_JITTER": "0.4",
    "TRAIN.RAND_AUGMENT": "true",
    "TRAIN.MIXUP_ALPHA": "0.8",
    "TRAIN.CUTMIX_ALPHA": "1.0",
    "TRAIN.RANDOM_ERASE_PROB": "0.25",
    "DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]",
    "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]",
}

FIELDS = ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS")


def value_in(model: Any, field: str) -> float:
    """Return the value of a field of FIELDS in timm's model."""
    match field:
        case "PATCH_SIZE":
            return model.patch_embed.patch_size[0]
        case "EMBED_DIM":
            return model.embed_dim
        case "DEPTH":
            return len(model.blocks)
        case "NUM_HEADS":
            return model.blocks[0].attn.num_heads
        case "MLP_RATIO":
            return model.blocks[0].mlp.fc1.out_features / model.embed_dim
    return model.blocks[0].attn.qkv.bias is not None  # QKV_BIAS


@dataclass(frozen=True)
class Deit:
    """A DeiT as described by a PaddleViT file."""

    origin: str  # the file that sets MODEL.TYPE
    fields: dict[str, tuple[str, Text]]  # {field: (its key in the file, its value)}

    def agree(self, name: str) -> str:
        """Compare timm's model of this name with the file. Return a log line, or raise ConfigError if they differ."""
        import timm  # local: importing timm takes seconds

        name = name.partition(".")[0]  # without the tag of the weights
        if not timm.is_model(name):
            raise ConfigError(
                f"MODEL.NAME is {name!r}, but timm has no model of this name; leave out MODEL.NAME to use "
                f"{self.origin}'s model"
            )
        model = build_without_values(lambda: timm.create_model(name))
        for field, (key, text) in self.fields.items():
            if not _is_same(text, value := value_in(model, field)):
                raise ConfigError(
                    f"{self.origin}: {key} is {quoted(text)}, but timm's {name} has {value}; correct MODEL.NAME, or "
                    f"remove {key} to train timm's model"
                )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return (
            f"{self.origin}: MODEL.TYPE deit is built as timm's {name}, {parameters:,} parameters with 1000 classes; "
            f"compared with the file: {', '.join(self.fields) or 'nothing, because it has no fields'}"
        )


def take_deit(files: list[Layer], command_line: list[Layer]) -> tuple[list[Layer], Deit | None]:
    """Replace PaddleViT's DeiT with timm's model in the config layers, and put PaddleViT's defaults below them.

    Return the layers and the DeiT, or the unchanged layers and None if the files do not describe a DeiT that timm has.
    """
    typed = next((layer for layer in reversed(files) if "MODEL.TYPE" in layer.texts), None)
    if not typed or _word(typed.texts["MODEL.TYPE"]) != "deit" or not (name := timm_name(_last(files, "MODEL.NAME"))):
        return files, None
    if (kind := _word(_last(command_line, "MODEL.TYPE"))) not in ("", "timm"):
        raise ConfigError(
            f"MODEL.TYPE is {kind} on the command line, but deit in {typed.origin}; leave MODEL.TYPE out of the "
            "command line"
        )
    if not is_none(_last([*files, *command_line], DISTILLATION)):
        name = timm_name(name.replace("_patch", "_distilled_patch")) or name
    fields: dict[str, tuple[str, Text]] = {}
    layers = [Layer("PaddleViT's defaults for deit", DEFAULTS)]
    for layer in files:
        texts = dict(layer.texts)
        for key in layer.texts:
            if key in ("MODEL.TYPE", "MODEL.NAME"):
                del texts[key]
            elif field := _field(key):
                fields[field] = (key, texts.pop(key))
        if layer is typed:
            texts |= {"MODEL.TYPE": "timm", "MODEL.NAME": name}
        layers.append(replace(layer, texts=texts))
    return layers, Deit(typed.origin, fields)


def timm_name(text: Text | None) -> str:
    """Return timm's name of a model that PaddleViT writes with capitals and hyphens, or '' if timm does not have it."""
    name = _word(text).replace("-", "_")
    return name if import_timm().is_model(name) else ""


def _field(key: str) -> str | None:
    """Return the name in FIELDS for this key of a file, or None."""
    section, _, name = RENAMED.get(key, key).rpartition(".")
    return name if section == "MODEL" and name in FIELDS and key != _MLP_DIM else None


def _last(layers: list[Layer], key: str) -> Text:
    """Return the key's text in the last layer that has it, or an empty string."""
    return next((layer.texts[key] for layer in reversed(layers) if key in layer.texts), "")


def _word(text: Text | None) -> str:
    return text.strip().lower() if isinstance(text, str) else ""


def _is_same(text: Text, value: float) -> bool:
    """Return whether a file's text equals the value in timm's model."""
    word = _word(text)
    if isinstance(value, bool):
        return BOOLS.get(word) is value
    try:
        return float(word) == value
    except ValueError:
        return False
