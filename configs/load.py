"""Loads a frozen Config for a command line: defaults < BASE files < the -cfg file < flags < -opts KEY=VALUE."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs import flags
from configs.combinations import check_combinations, is_typed
from configs.derive import Merged, derive
from configs.paddlevit import replace_words, translate_paddlevit
from configs.removed import REMOVED, check_removed
from configs.schema import AUTO, MODEL, Config
from configs.values import (
    ALL_SETTINGS,
    OPEN_SECTIONS,
    SECTIONS,
    SETTINGS,
    build,
    convert,
    flatten,
    is_none,
    to_text,
)
from configs.yaml_files import Layer, add_argument, find_settings_file, read_layers
from utils.errors import ConfigError
from utils.program import when_started


@dataclass(frozen=True)
class LoadedConfig:
    """The settings of a run with their origins, and notes for the user."""

    config: Config
    origins: dict[str, str]  # 'DATA.BATCH_SIZE': 'configs/x.yaml', 'flag -batch_size', '-opts' or 'default'
    notes: list[str]
    arguments: list[str]  # the command line, without the program's name
    started: float = field(default_factory=when_started)  # when the program started, by time.monotonic()
    weights: Layer | None = None  # settings implied by the pretrained weights, below all other layers

    def with_batch_size(self, number: int, how: str) -> "LoadedConfig":
        """Return a copy with a number instead of DATA.BATCH_SIZE auto. `how`: how the number was found, in words."""
        key = "DATA.BATCH_SIZE"
        config = replace(self.config, DATA=replace(self.config.DATA, BATCH_SIZE=number))
        return replace(self, config=config, origins=self.origins | {key: f"auto ({self.origins[key]}): {how}"})

    def with_default_batch_size(self) -> "LoadedConfig":
        """Return a copy with the default batch size instead of auto, and a note. This is for programs that do not train."""
        if self.config.DATA.BATCH_SIZE != AUTO:
            return self
        default = SETTINGS["DATA.BATCH_SIZE"].default
        note = f"DATA.BATCH_SIZE auto is for training only; using the default, {default}"
        return replace(self.with_batch_size(default, "the default"), notes=[*self.notes, note])


def load(
    argv: list[str], needs_file: bool = True, beneath: Sequence[Layer] = (), weights: Layer | None = None
) -> LoadedConfig:
    """Load the settings for a command line, given without the program's name.

    `needs_file`: whether -cfg is required. `beneath`: layers to use instead of the -cfg file. `weights`: the lowest
    layer, with the settings that the pretrained weights imply.
    """
    command_line = flags.parse(argv)
    files = _files(command_line.cfg, needs_file, beneath, weights)
    layers, translated, check_model = translate_paddlevit(files, command_line.layers)
    merged, notes = merge(layers)
    merged, lines = derive(merged)
    notes = [*translated, *notes, *lines]
    config = build(merged.values)
    check_combinations(merged.values, config, merged.origins)
    notes += _without_effect(merged.values, merged.origins)
    if check_model:
        notes.insert(0, check_model(merged.values["MODEL.NAME"]))
    return LoadedConfig(config, merged.origins, notes, argv, weights=weights)


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
                values[section] = add_argument(values[section], section, key, text, layer.origin)
                origins[section] = origins[key] = layer.origin
            elif key in ALL_SETTINGS:
                value = convert(ALL_SETTINGS[key], text, layer.origin)
                if layer.origin == "-opts" and origins[key].startswith("flag ") and value != values[key]:
                    found = f"{to_text(values[key])} ({origins[key]}) and {to_text(value)} (-opts)"
                    raise ConfigError(f"{key}: both {found} are given; leave one of them out")
                values[key], origins[key] = value, layer.origin
            elif key not in SECTIONS or not is_none(text):  # a section may be empty
                from configs.typed_names import why_no_setting

                raise ConfigError(f"{layer.origin}: {why_no_setting(key, text)}")
    return Merged(values, origins, [layer.origin for layer in layers]), notes


def _files(cfg: str | None, needs_file: bool, beneath: Sequence[Layer], weights: Layer | None) -> list[Layer]:
    """Return the layers below the command line: first the weights' settings, then the files' settings."""
    files = list(beneath)
    if not beneath and (cfg or needs_file):
        files = read_layers(find_settings_file(cfg))
    return [*([weights] if weights else []), *files]


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
        found = " and ".join(f"{name} is {to_text(values[name])}" for name in only.keys)
        needed = "" if only.values == (None,) else " or ".join(map(to_text, only.values))
        wanted = f"; this setting needs {needed}" if needed else ""
        if only.keys == ["TRAIN.LR_SCHEDULER.NAME"] and is_typed(key, origins):
            raise ConfigError(f"{origins[key]}: {key} has no effect, because {found}{wanted}")
        if only.keys == ["AMP"] and is_typed(key, origins) and not is_typed("AMP", origins):
            raise ConfigError(f"{origins[key]}: {key} {to_text(values[key])} has no effect, because {found}; add -amp")
        notes.append(f"note: {key} {to_text(values[key])} has no effect, because {found}{wanted}")
    return notes
