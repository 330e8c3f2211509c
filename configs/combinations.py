"""Checks that the values of several settings are compatible."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from configs.removed import REMOVED
from configs.schema import AUTO
from configs.tables import LOSSES, SOURCES, names_with
from configs.values import SETTINGS, to_text
from utils.errors import ConfigError, did_you_mean
from utils.text import is_url, problem_of

# Properties of a run that -resume compares with the checkpoint, in addition to the settings.
NO_SETTINGS = ("GLOBAL_BATCH", "NUM_IMAGES", "IMAGES", "CLASS_NAMES", "SPLIT", "AUGMENTATION")
CHANGEABLE = (*SETTINGS, *REMOVED, *NO_SETTINGS)
IN_THEIR_ORDER = names_with(SOURCES, "in_order")  # values of DATA.DATASET that are read in file order
WITHOUT_FILES = names_with(SOURCES, "has_files", False)  # values of DATA.DATASET that read no files
# Settings for training without labels, and their values.
OF_FEATURES = {
    "TRAIN.OBJECTIVE": ("features",),
    "DATA.DATASET": ("images",),
    "TRAIN.BEST_METRIC": ("similarity", "knn"),
}
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
MAX_WEIGHTS = 1e11  # maximum number of weights in all blocks: about five times the largest ViT so far
Values = dict[str, Any]  # {full key: value}
Rules = Iterator[tuple[bool, str, str]]  # whether the rule is broken, the setting to name, the problem


def check_combinations(values: Values, origins: dict[str, str]) -> None:
    """Raise ConfigError if values are incompatible. `origins`: {full key: where it was set}."""

    def named(key: str) -> str:
        return f"{key}, {to_text(values[key])} ({origins[key]})"

    _check_url(values, origins)
    _check_typed(values, origins)
    if any(values[key] in of_features for key, of_features in OF_FEATURES.items()):
        from extras.unlabelled.rules import check_features

        check_features(values, origins)
    rules = [_training_rules, _image_rules, _label_rules, _vit_rules]
    if values["DATA.TOKENS"]:
        from extras.native_aspect import native_rules

        rules.append(native_rules)
    for is_wrong, key, problem in itertools.chain.from_iterable(rule(values, named) for rule in rules):
        if is_wrong:
            raise ConfigError(f"{named(key)}, {problem}")


def _check_url(values: Values, origins: dict[str, str]) -> None:
    """Refuse an unusable URL. The message does not quote the URL, because it may contain credentials."""
    key, url = "DATA.DATA_PATH", values["DATA.DATA_PATH"]
    if is_url(url) and (problem := problem_of(url)):
        raise ConfigError(f"{key} ({origins[key]}): the URL {problem}")
    if is_url(url) and values["DATA.DATASET"] != "shards":
        raise ConfigError(
            f"{key}, {url} ({origins[key]}): only -dataset shards can be read from a server, "
            f"not {values['DATA.DATASET']}"
        )


def _check_typed(values: Values, origins: dict[str, str]) -> None:
    """Refuse empty values, and values from the command line that would have no effect."""
    path, data_set = "DATA.DATA_PATH", "DATA.DATASET"
    _check_empty(values, origins)
    if origins[path].startswith(("flag ", "-opts")) and values[data_set] in WITHOUT_FILES:
        raise ConfigError(
            f"{path}, {values[path]} ({origins[path]}): {data_set} {values[data_set]} ({origins[data_set]}) reads no files; "
            "add -dataset imagefolder (docs/data.md lists all data sets)"
        )
    name, kind = "MODEL.NAME", "MODEL.TYPE"
    if values[kind] == "vit" and origins[name] == "-opts" != origins[kind]:
        raise ConfigError(
            f"{name}, {values[name]} (-opts), is only a label, because with {kind} vit ({origins[kind]}), other "
            f"settings define the model; add {kind}=timm to train timm's model {values[name]}, or {kind}=vit to keep "
            "the label"
        )


def _check_empty(values: Values, origins: dict[str, str]) -> None:
    """Refuse an empty value that probably comes from an unset shell variable, even if a script wrote it to a file."""
    reason = "perhaps because a shell variable is not set"
    is_given = {key: origins[key] != "default" for key in ("SAVE", "NAME")}
    # In a file the path may be empty, because users give it with the flag.
    is_given["DATA.DATA_PATH"] = origins["DATA.DATA_PATH"].startswith("flag ")
    for key in ("SAVE", "DATA.DATA_PATH"):
        if is_given[key] and not values[key].strip():
            raise ConfigError(f"{key} is empty ({origins[key]}), {reason}; name a folder, or leave {key} out")
    if is_given["NAME"] and not values["NAME"].strip() and values["MODEL.RESUME"] == AUTO:
        raise ConfigError(
            f"NAME is empty ({origins['NAME']}), {reason}; -resume auto would resume any run; name a run, or leave "
            "NAME out"
        )


def _training_rules(values: Values, named: Callable[[str], str]) -> Rules:
    lowest, first, highest = (f"PRECISION.{name}_LOSS_SCALING" for name in ("MIN", "INIT", "MAX"))
    low, high = values[lowest], values[highest] or math.inf
    yield not low <= values[first] <= high, first, f"must be between {named(lowest)}, and {named(highest)}"
    is_float16_in_float8 = (values["PRECISION.MODE"], values["PRECISION.DTYPE"]) == ("float8", "float16")
    yield is_float16_in_float8, "PRECISION.DTYPE", f"must be bfloat16 or not set with {named('PRECISION.MODE')}"
    for key in ("TRAIN.SIZE_SCHEDULE", "TRAIN.MIXUP_OFF_EPOCH"):
        problem = f"names an epoch, but {named('TRAIN.BUDGET')} chooses the number of epochs; leave one of them out"
        yield bool(values[key] and values["TRAIN.BUDGET"]), key, problem
    key, strategy = "TRAIN.CLIP_MODE", "DIST.STRATEGY"
    problem = (
        f"must be norm or value with {named(strategy)}: agc needs norms of whole vectors, but each process has only parts "
        "of them"
    )
    yield values[key] == "agc" and values["TRAIN.GRAD_CLIP"] and values[strategy] == "fsdp2", key, problem
    key = "TRAIN.TEACHER_MODEL"
    problem = f"must name a timm model or a checkpoint, because of {named('TRAIN.DISTILLATION_TYPE')}"
    yield values["TRAIN.DISTILLATION_TYPE"] != "none" and values[key] is None and not values["EVAL"], key, problem
    key, rank = "MODEL.FREEZE", "MODEL.LORA.RANK"
    problem = f"must be empty with {named(rank)}: only the adapters and the classifier are trained"
    yield bool(values[key]) and values[rank] > 0, key, problem
    # A CUDA graph overwrites the gradients of the previous micro-batch: https://github.com/pytorch/pytorch/issues/169545
    key, steps = "COMPILE", "TRAIN.ACCUM_ITER"
    problem = f"must be true, blocks or max-autotune-no-cudagraphs with {named(steps)}: CUDA graphs overwrite gradients"
    yield values[key] in CUDA_GRAPH_MODES and values[steps] > 1, key, problem
    key = "RESUME.ALLOW_CHANGED"
    unknown = [name for name in values[key] if name not in CHANGEABLE]
    near = did_you_mean(unknown[0], CHANGEABLE) if unknown else ""
    yield bool(unknown), key, f"must contain only names of settings, or {', '.join(NO_SETTINGS)}{near}"


def _image_rules(values: Values, named: Callable[[str], str]) -> Rules:
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        is_wrong = len(values[key]) != values["DATA.IMAGE_CHANNELS"]
        yield is_wrong, key, f"must have one number for each channel: {named('DATA.IMAGE_CHANNELS')}"
    size = values["DATA.BATCH_SIZE"]
    is_odd = size != AUTO and size % 2 and not values["EVAL"]
    for key in ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX"):
        problem = f"must be even, because {named(key)}, mixes images in pairs"
        yield is_odd and bool(values[key]), "DATA.BATCH_SIZE", problem
    key, dataset = "DATA.SAMPLER", "DATA.DATASET"
    problem = (
        f"must be shuffle with {named(dataset)}, whose images are read in the order of its files; set "
        "TRAIN.CLASS_WEIGHTS=auto (-opts) to weight the classes instead"
    )
    yield values[key] == "balanced" and values[dataset] in IN_THEIR_ORDER, key, problem


def several_labels_key(values: Values) -> str | None:
    """Return the setting that gives images several labels, or None if none does."""
    if values["DATA.LABEL_SEPARATOR"]:
        return "DATA.LABEL_SEPARATOR"
    columns = values["DATA.COLUMNS"]
    return "DATA.COLUMNS" if len(columns) > 2 or columns[1:] == ("*",) else None


def _label_rules(values: Values, named: Callable[[str], str]) -> Rules:
    separator, columns, metric = "DATA.LABEL_SEPARATOR", "DATA.COLUMNS", "TRAIN.BEST_METRIC"
    key = several_labels_key(values)
    if key is None:
        problem = f"needs images with several labels; set {separator} or {columns}"
        yield values[metric] in ("micro_f1", "map"), metric, problem
        return
    problem = f"must name two columns with {named(separator)}: one of paths and one of classes"
    yield key == separator and len(values[columns]) > 2, columns, problem
    problem = f"needs -dataset csv; with {named('DATA.DATASET')}, an image has one label"
    yield values["DATA.DATASET"] != "csv", key, problem
    losses = names_with(LOSSES, "several_labels")
    problem = (
        f"must be {' or '.join(losses)} with {named(key)}: an image with several labels needs one yes or no per class"
    )
    yield values["TRAIN.LOSS"] not in losses, "TRAIN.LOSS", problem
    problem = f"must be shuffle with {named(key)}: the classes of one image cannot be balanced separately"
    yield values["DATA.SAMPLER"] == "balanced", "DATA.SAMPLER", problem
    distillation = "TRAIN.DISTILLATION_TYPE"
    problem = f"must be none with {named(key)}: distillation supports only one class per image"
    yield values[distillation] != "none" and not values["EVAL"], distillation, problem


def _vit_rules(values: Values, named: Callable[[str], str]) -> Rules:
    if values["MODEL.TYPE"] != "vit":
        return
    width, heads = "MODEL.EMBED_DIM", "MODEL.NUM_HEADS"
    yield values[width] % values[heads] > 0, width, f"must be a multiple of {named(heads)}; change one of them"
    is_larger = values["MODEL.PATCH_SIZE"] > values["DATA.IMAGE_SIZE"]
    yield is_larger, "MODEL.PATCH_SIZE", f"must not be larger than {named('DATA.IMAGE_SIZE')}"
    # The weights of queries, keys, values, projection and the MLP's two layers. If all these weights exceed the memory,
    # each allocation may still succeed; the system then kills the program without a message.
    weights = values["MODEL.DEPTH"] * values[width] ** 2 * (4 + 2 * values["MODEL.MLP_RATIO"])
    problem = f"gives {weights:.3g} weights, more than {MAX_WEIGHTS:g}, with {named('MODEL.DEPTH')}; lower one of them"
    yield weights > MAX_WEIGHTS, width, problem
