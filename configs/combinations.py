"""Which settings go together: the checks that need more than one setting's type and bounds."""

import math
from collections.abc import Callable
from typing import Any

from configs.duration import to_seconds
from configs.schema import AUTO
from configs.values import SETTINGS, to_text
from utils.errors import ConfigError

MAX_SECONDS = 1e9  # of RUN.MAX_TIME: 30 years
MAX_TAG_BYTES = 200  # a folder's name has at most 255, and also contains a date
MAX_WEIGHTS = 1e11  # of all blocks; the largest Vision Transformer so far has a fifth of that


def check_combinations(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Refuse values ({full key: value}) that do not fit together; `origins`: where each was set."""

    def named(key: str) -> str:
        return f"{key}, {to_text(values[key])} ({origins[key]})"

    _check_images(values, named)
    key = "TRAIN.OPTIMIZER.BETAS"
    if len(values[key]) != 2:
        raise ConfigError(f"{named(key)}, must be two numbers, such as {to_text(SETTINGS[key].default)}")
    low, high = values["PRECISION.MIN_LOSS_SCALING"], values["PRECISION.MAX_LOSS_SCALING"]
    if low > (high or math.inf):
        raise ConfigError(
            f"{named('PRECISION.MIN_LOSS_SCALING')}, must not be larger than {named('PRECISION.MAX_LOSS_SCALING')}"
        )
    if not low <= values["PRECISION.INIT_LOSS_SCALING"] <= (high or math.inf):
        raise ConfigError(
            f"{named('PRECISION.INIT_LOSS_SCALING')}, must lie between {named('PRECISION.MIN_LOSS_SCALING')}, and "
            f"{named('PRECISION.MAX_LOSS_SCALING')}"
        )
    if (values["PRECISION.MODE"], values["PRECISION.DTYPE"]) == ("float8", "float16"):
        raise ConfigError(f"{named('PRECISION.DTYPE')}, must be bfloat16 or not set with {named('PRECISION.MODE')}")
    key = "RUN.MAX_TIME"
    if values[key] is not None and not 0 < (to_seconds(values[key]) or 0) <= MAX_SECONDS:
        raise ConfigError(
            f"{named(key)}, must be a duration above 0, such as 3h30m, 90m or 5400 (seconds), of at most {MAX_SECONDS:g} s"
        )
    tag = values["TAG"]
    if "/" in tag or len(tag.encode(errors="surrogateescape")) > MAX_TAG_BYTES:
        raise ConfigError(
            f"{named('TAG')}, becomes part of a folder's name: it must have at most {MAX_TAG_BYTES} bytes and no /; "
            "SAVE (-output) sets where runs are written"
        )
    if values["MODEL.TYPE"] == "vit":
        _check_vit(values, named)


def _check_images(values: dict[str, Any], named: Callable[[str], str]) -> None:
    channels = values["DATA.IMAGE_CHANNELS"]
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        if len(values[key]) != channels:
            raise ConfigError(f"{named(key)}, must have one number for each channel: {named('DATA.IMAGE_CHANNELS')}")
    for key in ("DATA.CROP_SCALE", "DATA.CROP_RATIO", "TRAIN.CUTMIX_MINMAX"):
        is_off = key == "TRAIN.CUTMIX_MINMAX" and not values[key]
        if not is_off and (len(values[key]) != 2 or values[key][0] > values[key][1]):
            example = to_text(SETTINGS["DATA.CROP_SCALE"].default)
            raise ConfigError(f"{named(key)}, must be two numbers, min and max, such as {example}")
    mixing = [key for key in ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX") if values[key]]
    batch_size = values["DATA.BATCH_SIZE"]
    is_odd = batch_size != AUTO and batch_size % 2
    if mixing and is_odd and not values["EVAL"]:
        raise ConfigError(
            f"{named('DATA.BATCH_SIZE')}, must be even, because images are mixed in pairs: {named(mixing[0])}"
        )


def _check_vit(values: dict[str, Any], named: Callable[[str], str]) -> None:
    if values["MODEL.ATTN_HEAD_SIZE"] is None and values["MODEL.EMBED_DIM"] % values["MODEL.NUM_HEADS"]:
        raise ConfigError(
            f"{named('MODEL.EMBED_DIM')}, must be a multiple of {named('MODEL.NUM_HEADS')}; change one of them or set "
            "MODEL.ATTN_HEAD_SIZE"
        )
    if values["MODEL.PATCH_SIZE"] > values["DATA.IMAGE_SIZE"]:
        raise ConfigError(f"{named('MODEL.PATCH_SIZE')}, must not be larger than {named('DATA.IMAGE_SIZE')}")
    # Of queries, keys, values and projection, and of the MLP's two layers. Each allocation may succeed although all
    # together exceed the memory, and then the system kills the program without a message.
    weights = values["MODEL.DEPTH"] * values["MODEL.EMBED_DIM"] ** 2 * (4 + 2 * values["MODEL.MLP_RATIO"])
    if weights > MAX_WEIGHTS:
        raise ConfigError(
            f"{named('MODEL.EMBED_DIM')}, with {named('MODEL.DEPTH')}, and {named('MODEL.MLP_RATIO')}, gives {weights:.3g} "
            f"weights, more than {MAX_WEIGHTS:g}; lower one of them"
        )
