"""Loads a frozen Config for a command line: defaults < BASE files < the -cfg file < flags < -opts KEY=VALUE.

Some settings are then derived from others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from configs.checks import check_settings, is_typed
from configs.flags import CommandLine, parse
from configs.removed import REMOVED, check_removed
from configs.schema import MODEL, VIT_FIELDS, Config
from configs.tables import TORCH_OPTIMIZERS
from configs.translate.other_programs import replace_words
from configs.translate.paddlevit import translate_paddlevit
from configs.values import (
    ALL_SETTINGS,
    OPEN_SECTIONS,
    OPTIMIZER_VALUES,
    RATES,
    SECTIONS,
    SETTINGS,
    build,
    convert,
    flatten,
    is_none,
    to_text,
    usual_optimizer_values,
)
from configs.yaml_files import Layer, find_settings_file, read_layers
from utils.errors import ConfigError
from utils.program import when_started
from utils.runs import LATEST, without_latest

NAME_RUNS = ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL")  # settings whose value may name a run


@dataclass(frozen=True)
class LoadedConfig:
    """The settings of a run with their origins, and notes for the user."""

    config: Config
    origins: dict[str, str]  # 'DATA.BATCH_SIZE': 'configs/x.yaml', 'flag -batch_size', '-opts' or 'default'
    notes: list[str]
    arguments: list[str]  # the command line, without the program's name
    started: float = field(default_factory=when_started)  # when the program started, by time.monotonic()
    weights: Layer | None = None  # settings implied by the pretrained weights, below all other layers
    choice: dict | None = None  # the record of MODEL.PRETRAINED choose, see engine/choice/choose.py


class Merged(NamedTuple):
    """The value of each setting, and where it came from."""

    values: dict[str, Any]
    origins: dict[str, str]
    order: list[str]  # the origins of all layers, the lowest one first


def load(arguments: list[str], needs_file: bool = True) -> LoadedConfig:
    """Load the settings for a command line, given without the program's name. Weights that it names are not read.

    `needs_file`: whether -cfg is required.
    """
    command_line = parse(arguments)
    reads_file = command_line.cfg or needs_file
    return resolve(command_line, read_layers(find_settings_file(command_line.cfg)) if reads_file else [])


def resolve(command_line: CommandLine, files: Sequence[Layer], weights: Layer | None = None) -> LoadedConfig:
    """Return the settings of these layers, of which each overrides the previous ones: weights, files, command line.

    `weights`: the settings that the pretrained weights imply.
    """
    beneath = [*([weights] if weights else []), *files]
    layers, translated, check_model = translate_paddlevit(beneath, command_line.layers)
    merged, notes = merge(layers)
    merged, lines = derive(merged)
    notes = [*translated, *notes, *lines]
    config = build(merged.values)
    check_settings(merged.values, config, merged.origins)
    notes += _without_effect(merged.values, merged.origins)
    if check_model:
        notes.insert(0, check_model(merged.values["MODEL.NAME"]))
    return LoadedConfig(config, merged.origins, notes, command_line.arguments, weights=weights)


def merge(layers: Sequence[Layer]) -> tuple[Merged, list[str]]:
    """Merge the layers over the defaults; for each setting, the last layer wins. Also return notes for the user."""
    values = {key: setting.default for key, setting in ALL_SETTINGS.items()}
    origins, notes = dict.fromkeys(ALL_SETTINGS, "default"), []
    for layer in layers:
        texts, lines = replace_words(layer.texts, layer.origin)
        notes += lines
        check_removed(texts, layer.origin)
        for key, text in texts.items():
            if key in REMOVED:
                continue
            if section := next((each for each in OPEN_SECTIONS if key.startswith(f"{each}.")), None):
                from configs.arguments import add_argument

                values[section] = add_argument(values[section], section, key, text, layer.origin)
                origins[section] = origins[key] = layer.origin
            elif key in ALL_SETTINGS:
                value = convert(ALL_SETTINGS[key], text, layer.origin)
                if layer.origin == "-opts" and origins[key].startswith("flag ") and value != values[key]:
                    both = f"{to_text(values[key])} ({origins[key]}) and {to_text(value)} (-opts)"
                    raise ConfigError(f"{key}: both {both} are given; leave one of them out")
                values[key], origins[key] = value, layer.origin
            elif key not in SECTIONS or not is_none(text):  # a section may be empty
                from configs.typed_names import why_no_setting

                raise ConfigError(f"{layer.origin}: {why_no_setting(key, text)}")
    return Merged(values, origins, [layer.origin for layer in layers]), notes


def _without_effect(values: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Return a note for each setting without effect, except settings of models and images that come from weights.

    Raise ConfigError if the command line has a setting for a schedule other than NAME, or one that needs -amp,
    without -amp. Files may contain settings without effect: PaddleViT's files list the settings of all schedules.
    """
    notes = []
    for key, setting in SETTINGS.items():
        is_of_model = setting.role == MODEL and origins[key].startswith(("weights ", "checkpoint "))
        if setting.has_effect(values) or values[key] == setting.default or is_of_model:
            continue
        only = setting.only
        reason = " and ".join(f"{name} is {to_text(values[name])}" for name in only.keys)
        needed = "" if only.values == (None,) else " or ".join(map(to_text, only.values))
        remedy = f"; this setting needs {needed}" if needed else ""
        if only.keys == ["TRAIN.LR_SCHEDULER.NAME"] and is_typed(key, origins):
            raise ConfigError(f"{origins[key]}: {key} has no effect, because {reason}{remedy}")
        if only.keys == ["AMP"] and is_typed(key, origins) and not is_typed("AMP", origins):
            raise ConfigError(f"{origins[key]}: {key} {to_text(values[key])} has no effect, because {reason}; add -amp")
        notes.append(f"note: {key} {to_text(values[key])} has no effect, because {reason}{remedy}")
    return notes


# --- settings that follow from others ---


def derive(merged: Merged) -> tuple[Merged, list[str]]:
    """Return the settings with the values that follow from others, and notes for the user."""
    derived = Merged(dict(merged.values), dict(merged.origins), merged.order)
    derived.values.update(name_runs(derived.values))
    _derive_data(derived.values, derived.origins)
    _derive_optimizer(derived.values, derived.origins)
    notes = _derive_model(*derived)
    return derived, notes


def name_runs(values: dict[str, Any]) -> dict[str, str]:
    """Return {key: folder of the newest run in SAVE} for the settings whose value is `latest`."""
    save = values.get("SAVE", SETTINGS["SAVE"].default)
    return {key: without_latest(values[key], save) for key in NAME_RUNS if values.get(key) == LATEST}


def _derive_data(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Choose the kind of data by the ending of a typed path, unless it is typed too.

    Fit mean and deviation to the number of channels, and the ratio of crops to the shape of the images. Choose loss and
    metric by the task, unless they are set.
    """
    of_file = dataset_of_file(values["DATA.DATA_PATH"])
    if of_file and is_typed("DATA.DATA_PATH", origins) and not is_typed("DATA.DATASET", origins):
        values["DATA.DATASET"], origins["DATA.DATASET"] = of_file, "by the ending of DATA.DATA_PATH"
    is_native = values["DATA.PIXELS"] != SETTINGS["DATA.PIXELS"].default
    channels = values["DATA.IMAGE_CHANNELS"]
    for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):  # a run with native pixels measures them
        is_free = values[key] == SETTINGS[key].default or (is_native and not is_typed(key, origins))
        if is_free and len(values[key]) != channels:
            values[key] = values[key][:1] * channels
    config = build(values)
    if config.DATA.shape.height != config.DATA.shape.width and origins["DATA.CROP_RATIO"] == "default":
        from configs.image_size import crop_ratio_of

        values["DATA.CROP_RATIO"], origins["DATA.CROP_RATIO"] = crop_ratio_of(config), "because of DATA.IMAGE_SIZE"
    task = config.task
    for key, value in (("TRAIN.LOSS", task.losses[0]), ("TRAIN.BEST_METRIC", task.metrics[0])):
        if origins[key] == "default" and values[key] != value:
            values[key], origins[key] = value, f"because of {task.reason}"


def dataset_of_file(path: str) -> str | None:
    """Return the kind of data that a file with this ending has, or None for other files and for folders."""
    ending = path.rpartition(".")[2].lower()
    return ending if ending in ("csv", "parquet") else None


def _derive_optimizer(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Choose one spelling for each optimizer: torch's own for AdamW, Adam and SGD, lower case for the others.

    For other optimizers, torch's default values count as not set if one layer sets EPS, BETAS and MOMENTUM together,
    because PaddleViT's files always contain all three. The schedule `step` starts at epoch 0, unless AFTER_WARMUP is
    set.
    """
    spelling = {name.lower(): name for name in TORCH_OPTIMIZERS}
    typed = values["TRAIN.OPTIMIZER.NAME"].lower()
    values["TRAIN.OPTIMIZER.NAME"] = name = spelling.get(typed, typed)
    are_together = len({origins[each] for each in OPTIMIZER_VALUES}) == 1
    are_all_set = all(values[each] not in (None, ()) for each in OPTIMIZER_VALUES)
    if name not in TORCH_OPTIMIZERS and are_together and are_all_set:
        values.update({key: SETTINGS[key].default for key in usual_optimizer_values(values)})
    key = "TRAIN.LR_SCHEDULER.AFTER_WARMUP"
    if values["TRAIN.LR_SCHEDULER.NAME"] == "step" and origins[key] == "default":
        values[key] = False


def _derive_model(values: dict[str, Any], origins: dict[str, str], order: list[str]) -> list[str]:
    """Reset settings that do not apply to the type of model, and return notes about them.

    If one layer sets MODEL.TYPE timm, this resets the ViT settings from all lower layers. In the same layer or a higher
    one, ViT settings are errors. With MODEL.TYPE vit, a dropout rate of 0 becomes None, which means the same.
    """
    if values["MODEL.TYPE"] == "vit":
        values.update({key: None for key in RATES if values[key] == 0})
        return []
    earlier = order[: order.index(origins["MODEL.TYPE"])]
    dropped = [key for name in VIT_FIELDS if origins[key := f"MODEL.{name}"] in earlier]
    if not dropped:
        return []
    fields = ", ".join(f"{key} {to_text(values[key])}" for key in dropped)
    files = ", ".join(dict.fromkeys(origins[key] for key in dropped))
    note = f"note: these have no effect with MODEL.TYPE timm ({origins['MODEL.TYPE']}): {fields} ({files})"
    values.update({key: SETTINGS[key].default for key in dropped})
    origins.update(dict.fromkeys(dropped, "default"))
    return [note]


# --- the file of a run ---


def to_yaml(config: Config, origins: dict[str, str], only: Collection[str] = SETTINGS) -> str:
    """Return YAML that reproduces this config as a -cfg file. Each line names the origin of its value.

    `only`: the settings to write.
    """
    lines: list[str] = []
    section: list[str] = []
    # The schema keeps subsections last: a setting written after a subsection would become part of it.
    for key, value in ((key, value) for key, value in flatten(config).items() if key in only):
        *path, name = key.split(".")
        for depth, part in enumerate(path):
            if path[: depth + 1] != section[: depth + 1]:
                lines.append(f"{'    ' * depth}{part}:")
        section, indent = path, "    " * len(path)
        if key in OPEN_SECTIONS and value:
            lines.append(f"{indent}{name}:")
            line = {f"{key}.{each}": f"{indent}    {each}: {to_text(value[each])}" for each in value}
        else:
            line = {key: f"{indent}{name}: {'{}' if key in OPEN_SECTIONS else to_text(value)}"}
        lines += [f"{text:<44}  # {origins.get(each, 'default')}" for each, text in line.items()]
    return "\n".join(lines) + "\n"
