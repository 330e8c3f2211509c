"""Which settings go together: the checks that need more than one setting's type and bounds."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from configs.duration import to_seconds
from configs.removed import REMOVED
from configs.schema import AUTO
from configs.values import BOOLS, SETTINGS, to_text
from utils.errors import ConfigError, did_you_mean
from utils.text import is_url, problem_of

MAX_SECONDS = 1e9  # of RUN.MAX_TIME: 30 years
MAX_NAME_BYTES = 200  # a folder's name has at most 255, and also contains a date
# What a resumed run compares besides its settings.
NO_SETTINGS = ("GLOBAL_BATCH", "NUM_IMAGES", "CLASS_NAMES", "SPLIT", "AUGMENTATION")
CHANGEABLE = (*SETTINGS, *REMOVED, *NO_SETTINGS)
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
MAX_WEIGHTS = 1e11  # of all blocks; the largest Vision Transformer so far has a fifth of that


def check_combinations(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Refuse values ({full key: value}) that do not fit together; `origins`: where each was set."""

    def named(key: str) -> str:
        return f"{key}, {to_text(values[key])} ({origins[key]})"

    _check_url(values, origins)
    for is_wrong, key, problem in itertools.chain(
        _rules(values, named), _image_rules(values, named), _label_rules(values, named)
    ):
        if is_wrong:
            raise ConfigError(f"{named(key)}, {problem}")


def _check_url(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Refuse a URL of data that is written to files as it stands and holds credentials; the message does not quote it."""
    key, url = "DATA.DATA_PATH", values["DATA.DATA_PATH"]
    if is_url(url) and (problem := problem_of(url)):
        raise ConfigError(f"{key} ({origins[key]}): the URL {problem}")
    if is_url(url) and values["DATA.DATASET"] != "shards":
        raise ConfigError(
            f"{key}, {url} ({origins[key]}): only -dataset shards is read from a server, not {values['DATA.DATASET']}"
        )


Rules = Iterator[tuple[bool, str, str]]  # whether it is broken, the setting to name, what is wrong with it


def _rules(values: dict[str, Any], named: Callable[[str], str]) -> Rules:
    key = "TRAIN.OPTIMIZER.BETAS"
    yield len(values[key]) != 2, key, f"must be two numbers, such as {to_text(SETTINGS[key].default)}"
    key = "DATA.COLUMNS"
    is_wrong = len(values[key]) == 1 or len({*values[key]}) != len(values[key])
    yield is_wrong, key, "must be the names of two columns, of paths (or images) and of classes, or of more: each once"
    lowest, first, highest = (f"PRECISION.{name}_LOSS_SCALING" for name in ("MIN", "INIT", "MAX"))
    low, high = values[lowest], values[highest] or math.inf
    yield low > high, lowest, f"must not be larger than {named(highest)}"
    yield not low <= values[first] <= high, first, f"must lie between {named(lowest)}, and {named(highest)}"
    is_float16_in_float8 = (values["PRECISION.MODE"], values["PRECISION.DTYPE"]) == ("float8", "float16")
    yield is_float16_in_float8, "PRECISION.DTYPE", f"must be bfloat16 or not set with {named('PRECISION.MODE')}"
    key, strategy = "SAVE_WEIGHTS_ONLY", "DIST.STRATEGY"
    problem = f"must be false with {named(strategy)}: the parts of a checkpoint hold weights and optimizer together"
    yield values[key] and values[strategy] == "fsdp2", key, problem
    key = "TRAIN.CLIP_MODE"
    problem = f"must be norm or value with {named(strategy)}: a process does not have the whole of a vector, whose norm agc needs"
    yield values[key] == "agc" and values["TRAIN.GRAD_CLIP"] and values[strategy] == "fsdp2", key, problem
    key = "TRAIN.SIZE_SCHEDULE"
    problem = "must have entries such as 0:128, 60:160, the first with 0 epochs, each later one with more"
    yield not _is_size_schedule(values[key]), key, problem
    key = "TRAIN.TEACHER_MODEL"
    problem = f"must name a timm model or a checkpoint with {named('TRAIN.DISTILLATION_TYPE')}"
    yield values["TRAIN.DISTILLATION_TYPE"] != "none" and values[key] is None and not values["EVAL"], key, problem
    key, rank = "MODEL.FREEZE", "MODEL.LORA.RANK"
    problem = f"must be empty with {named(rank)}: only the adapters and the classifier are trained"
    yield bool(values[key]) and values[rank] > 0, key, problem
    key = "RUN.MAX_TIME"
    is_duration = values[key] is None or 0 < (to_seconds(values[key]) or 0) <= MAX_SECONDS
    allowed = f"must be a duration above 0, such as 3h30m, 90m or 5400 (seconds), of at most {MAX_SECONDS:g} s"
    yield not is_duration, key, allowed
    name = values["NAME"]
    allowed = (
        f"is the name of a folder in SAVE (-output): it must have at most {MAX_NAME_BYTES} bytes, no /, no control character "
        "and no . at its start"
    )
    yield _is_long(name) or re.search(r"^\.|[/\x00-\x1f\x7f]", name) is not None, "NAME", allowed
    key, dataset = "DATA.SAMPLER", "DATA.DATASET"
    problem = (
        f"must be shuffle with {named(dataset)}, whose images are read in the order of its files; TRAIN.CLASS_WEIGHTS=auto "
        "(-opts) weights the classes instead"
    )
    yield values[key] == "balanced" and values[dataset] in ("shards", "parquet"), key, problem
    key = "DATA.FOLD"
    problem = "must be a number from 0 and that of all folds, from 2 to 1000, such as 0/5"
    yield values[key] is not None and not _is_fold(values[key]), key, problem
    accumulated = "TRAIN.ACCUM_ITER"
    # A CUDA graph overwrites the gradients of the micro-batch before: https://github.com/pytorch/pytorch/issues/169545
    is_overwritten = values["COMPILE"] in CUDA_GRAPH_MODES and values[accumulated] > 1
    problem = f"must be true, blocks or max-autotune-no-cudagraphs with {named(accumulated)}: CUDA graphs do not add gradients"
    yield is_overwritten, "COMPILE", problem
    key = "RESUME.ALLOW_CHANGED"
    unknown = [name for name in values[key] if name not in CHANGEABLE and name.lower() not in BOOLS]
    near = did_you_mean(unknown[0], CHANGEABLE) if unknown else ""
    yield bool(unknown), key, f"must be names of settings, {', '.join(NO_SETTINGS)}{near}"
    if values["MODEL.TYPE"] == "vit":
        yield from _vit_rules(values, named)


def _is_long(name: str) -> bool:
    return len(name.encode(errors="surrogateescape")) > MAX_NAME_BYTES


def _is_fold(text: str) -> bool:
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    return match is not None and 2 <= int(match[2]) <= 1000 and int(match[1]) < int(match[2])


def _is_size_schedule(entries: tuple[str, ...]) -> bool:
    if not all(re.fullmatch(r"\s*[0-9]{1,9}:[0-9]{1,9}\s*", each) for each in entries):
        return False
    starts, sides = ([int(each.split(":")[part]) for each in entries] for part in (0, 1))
    low, high = SETTINGS["DATA.IMAGE_SIZE"].bounds
    return not entries or (starts == sorted({0, *starts}) and all(low <= side <= high for side in sides))


def _image_rules(values: dict[str, Any], named: Callable[[str], str]) -> Rules:
    channels = "DATA.IMAGE_CHANNELS"
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        is_wrong = len(values[key]) != values[channels]
        yield is_wrong, key, f"must have one number for each channel: {named(channels)}"
    for key in ("DATA.CROP_SCALE", "DATA.CROP_RATIO", "TRAIN.CUTMIX_MINMAX"):
        is_off = key == "TRAIN.CUTMIX_MINMAX" and not values[key]
        is_wrong = not is_off and (len(values[key]) != 2 or values[key][0] > values[key][1])
        yield is_wrong, key, f"must be two numbers, min and max, such as {to_text(SETTINGS['DATA.CROP_SCALE'].default)}"
    key = "TRAIN.MIXUP_GROUP"
    yield (values[key] or 0) % 2, key, "must be even, because images are mixed in pairs"
    size = values["DATA.BATCH_SIZE"]
    is_odd = size != AUTO and size % 2 and not values["EVAL"]
    for key in ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX"):
        problem = f"must be even, because images are mixed in pairs: {named(key)}"
        yield is_odd and bool(values[key]), "DATA.BATCH_SIZE", problem


def several_labels_key(values: dict[str, Any]) -> str | None:
    """The setting by which an image can have several labels; None if it has one."""
    if values["DATA.LABEL_SEPARATOR"]:
        return "DATA.LABEL_SEPARATOR"
    columns = values["DATA.COLUMNS"]
    return "DATA.COLUMNS" if len(columns) > 2 or columns[1:] == ("*",) else None


def _label_rules(values: dict[str, Any], named: Callable[[str], str]) -> Rules:
    separator, columns = "DATA.LABEL_SEPARATOR", "DATA.COLUMNS"
    key = several_labels_key(values)
    metric, metrics = "TRAIN.BEST_METRIC", ("micro_f1", "map")
    problem = f"needs images with several labels, by {separator} or {columns}"
    yield key is None and values[metric] in metrics, metric, problem
    if key is None:
        return
    problem = f"must name two columns with {named(separator)}: of paths, of classes"
    yield key == separator and len(values[columns]) > 2, columns, problem
    yield (
        values["DATA.DATASET"] != "csv",
        key,
        f"is for -dataset csv; with {named('DATA.DATASET')}, an image has one label",
    )
    problem = f"must be bce with {named(key)}: an image with several labels has a yes or no for each class"
    yield values["TRAIN.LOSS"] != "bce", "TRAIN.LOSS", problem
    problem = f"must be shuffle with {named(key)}: the classes of an image cannot be balanced one by one"
    yield values["DATA.SAMPLER"] == "balanced", "DATA.SAMPLER", problem
    problem = f"must be none with {named(key)}: a teacher is followed in one class an image"
    distillation = "TRAIN.DISTILLATION_TYPE"
    yield values[distillation] != "none" and not values["EVAL"], distillation, problem


def _vit_rules(values: dict[str, Any], named: Callable[[str], str]) -> Rules:
    width, heads = "MODEL.EMBED_DIM", "MODEL.NUM_HEADS"
    yield values[width] % values[heads] > 0, width, f"must be a multiple of {named(heads)}; change one of them"
    is_larger = values["MODEL.PATCH_SIZE"] > values["DATA.IMAGE_SIZE"]
    yield is_larger, "MODEL.PATCH_SIZE", f"must not be larger than {named('DATA.IMAGE_SIZE')}"
    # Weights of queries, keys, values and projection, and of the MLP's two layers. Each allocation may succeed although
    # all together exceed the memory, and then the system kills the program without a message.
    weights = values["MODEL.DEPTH"] * values[width] ** 2 * (4 + 2 * values["MODEL.MLP_RATIO"])
    problem = (
        f"with {named('MODEL.DEPTH')}, and {named('MODEL.MLP_RATIO')}, gives {weights:.3g} weights, more than "
        f"{MAX_WEIGHTS:g}; lower one of them"
    )
    yield weights > MAX_WEIGHTS, width, problem
