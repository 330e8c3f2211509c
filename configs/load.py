"""From the command line to a frozen Config: defaults < BASE files < the -cfg file < flags < -opts KEY=VALUE."""

import difflib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from configs import flags
from configs.duration import to_seconds
from configs.paddlevit import OLD_SECTION, RENAMED, translate
from configs.removed import REMOVED, check_removed
from configs.schema import AUTO, IGNORED, Config
from configs.unused_settings import idle_settings
from configs.values import SECTIONS, SETTINGS, Text, build, convert, describe, flatten, is_none, shown, to_text
from configs.yaml_files import find, read_layers
from utils.errors import ConfigError, did_you_mean

__all__ = ["Loaded", "flatten", "load", "to_yaml"]

MOST_SECONDS = 1e9  # of RUN.MAX_TIME: some 30 years
MOST_TAG = 200  # bytes: a folder's name has 255 at most, and there is a date in it
MOST_WEIGHTS = 1e11  # of all blocks; the largest Vision Transformer so far has a fifth of that


@dataclass(frozen=True)
class Loaded:
    """The settings of a run, where each came from, and what to tell the user about them."""

    config: Config
    origins: dict[str, str]  # 'DATA.BATCH_SIZE': 'configs/x.yaml', 'flag -batch_size', '-opts' or 'default'
    notes: list[str]
    arguments: list[str]  # the command line
    started: float = field(default_factory=time.monotonic)  # reading them is the first that a program does

    def with_batch_size(self, number: int, how: str) -> "Loaded":
        """With the number that DATA.BATCH_SIZE auto comes to; `how` it was found."""
        key = "DATA.BATCH_SIZE"
        config = replace(self.config, DATA=replace(self.config.DATA, BATCH_SIZE=number))
        return replace(self, config=config, origins=self.origins | {key: f"auto ({self.origins[key]}): {how}"})

    def plain(self) -> "Loaded":
        """With the default where DATA.BATCH_SIZE is auto, and a note of it: for what trains nothing."""
        if self.config.DATA.BATCH_SIZE != AUTO:
            return self
        default = SETTINGS["DATA.BATCH_SIZE"].default
        note = f"DATA.BATCH_SIZE auto is for training; here it is {default}, the default"
        return replace(self.with_batch_size(default, "the default"), notes=[*self.notes, note])


def load(argv: list[str]) -> Loaded:
    """The settings that a command line (without the program's name) asks for."""
    command_line = flags.parse(argv)
    values = {key: setting.default for key, setting in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, "default")
    notes: list[str] = []
    for layer in [*read_layers(find(command_line.cfg)), *command_line.layers]:
        texts, lines = translate(layer.texts, layer.origin)
        notes += lines
        for key, text in texts.items():
            if key in SETTINGS:
                values[key] = convert(SETTINGS[key], text, layer.origin)
                origins[key] = layer.origin
            elif key in REMOVED:
                check_removed(key, text, layer.origin)
            elif key in IGNORED:
                notes.append(f"{layer.origin}: {key} is ignored: {IGNORED[key]}")
            elif key not in (*SECTIONS, OLD_SECTION) or not is_none(text):  # a section may be empty
                raise ConfigError(f"{layer.origin}: {_why_no_setting(key, text)}")
    _fit_channels(values)
    _check(values, origins)
    config = build(values)
    return Loaded(config, origins, [*notes, *idle_settings(config)], argv)


def to_yaml(config: Config, origins: dict[str, str]) -> str:
    """YAML that gives this very config when it is the -cfg file; each line says where its value came from."""
    lines: list[str] = []
    section: list[str] = []
    # Members of a section that stand after its subsections would fall into them: the schema keeps subsections last.
    for key, value in flatten(config).items():
        *path, name = key.split(".")
        for depth, part in enumerate(path):
            if path[: depth + 1] != section[: depth + 1]:
                lines.append(f"{'    ' * depth}{part}:")
        section = path
        line = f"{'    ' * len(path)}{name}: {to_text(value)}"
        lines.append(f"{line:<44}  # {origins.get(key, 'default')}")
    return "\n".join(lines) + "\n"


def _why_no_setting(key: str, text: Text) -> str:
    if key == "BASE":
        return "BASE is read from files only; name another file with -cfg"
    if key in (*SECTIONS, OLD_SECTION):
        inside = next(each for each in (*SETTINGS, *RENAMED) if each.startswith(key + "."))
        return f"{key} is {shown(text)}, but it is a section: it has no value, only settings in it, such as {inside}"
    parent = key.rpartition(".")[0]
    if parent in SETTINGS:
        return f"{parent} is a section here, with {key} in it; it must be {describe(SETTINGS[parent])}"
    known = [*SETTINGS, *IGNORED, *RENAMED, "BASE"]
    # The right name in the wrong section comes first, then what is spelled alike.
    elsewhere = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2].upper()]
    near = difflib.get_close_matches(key.upper(), elsewhere or known, n=1, cutoff=0.0 if elsewhere else 0.6)
    return f"unknown key {key}{did_you_mean(near[0], near) if near else '; docs/settings.md lists them'}"


def _fit_channels(values: dict[str, Any]) -> None:
    """Grey images keep the default mean and deviation, which are written for three channels."""
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
        if values["DATA.IMAGE_CHANNELS"] == 1 and values[key] == SETTINGS[key].default:
            values[key] = values[key][:1]


def _check(values: dict[str, Any], origins: dict[str, str]) -> None:
    """What no setting can be asked alone."""

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
    if values[key] is not None and not 0 < (to_seconds(values[key]) or 0) <= MOST_SECONDS:
        raise ConfigError(
            f"{named(key)}, must be a time above 0, such as 3h30m, 90m or 5400 (seconds), and at most {MOST_SECONDS:g} s"
        )
    tag = values["TAG"]
    if "/" in tag or len(tag.encode(errors="surrogateescape")) > MOST_TAG:
        raise ConfigError(
            f"{named('TAG')}, becomes part of a folder's name: it must have no / in it and at most {MOST_TAG} bytes; where "
            "runs go is said by SAVE (-output)"
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
            raise ConfigError(f"{named(key)}, must be two numbers, least and most, such as {example}")
    mixing = [key for key in ("TRAIN.MIXUP_ALPHA", "TRAIN.CUTMIX_ALPHA", "TRAIN.CUTMIX_MINMAX") if values[key]]
    batch_size = values["DATA.BATCH_SIZE"]
    is_odd = batch_size != AUTO and batch_size % 2
    if mixing and is_odd and not values["EVAL"]:
        raise ConfigError(f"{named('DATA.BATCH_SIZE')}, must be even, as images are mixed in pairs: {named(mixing[0])}")


def _check_vit(values: dict[str, Any], named: Callable[[str], str]) -> None:
    if values["MODEL.ATTN_HEAD_SIZE"] is None and values["MODEL.EMBED_DIM"] % values["MODEL.NUM_HEADS"]:
        raise ConfigError(
            f"{named('MODEL.EMBED_DIM')}, must be a multiple of {named('MODEL.NUM_HEADS')}; change one of them or set "
            "MODEL.ATTN_HEAD_SIZE"
        )
    if values["MODEL.PATCH_SIZE"] > values["DATA.IMAGE_SIZE"]:
        raise ConfigError(f"{named('MODEL.PATCH_SIZE')}, must not be larger than {named('DATA.IMAGE_SIZE')}")
    # Of queries, keys, values and projection, and of the MLP's two layers. Block by block they may find room in a memory
    # that all together overrun, and then the system kills the program without a word.
    weights = values["MODEL.DEPTH"] * values["MODEL.EMBED_DIM"] ** 2 * (4 + 2 * values["MODEL.MLP_RATIO"])
    if weights > MOST_WEIGHTS:
        raise ConfigError(
            f"{named('MODEL.EMBED_DIM')}, with {named('MODEL.DEPTH')}, and {named('MODEL.MLP_RATIO')}, makes {weights:.3g} "
            f"weights, more than {MOST_WEIGHTS:g}; lower one of them"
        )
