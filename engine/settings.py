"""Loads the settings of a command line. Settings not given there follow from the weights or from the resumed run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.flags import CommandLine, parse
from configs.load import LoadedConfig, load, name_runs
from configs.translate.paddlevit import our_name
from configs.values import Text, is_none
from configs.yaml_files import Layer, find_settings_file, read_layers
from utils.files import or_shipped, short_name


def load_settings(arguments: list[str]) -> LoadedConfig:
    """Load the settings for a command line from these layers. Each overrides the previous ones:

    1. settings that follow from the weights that the command line names
    2. the file of -cfg, or else the settings of the weights' run, or else configs/finetune.yaml, or for models with
       BatchNorm finetune_batchnorm.yaml; for numbers finetune_numbers*.yaml (not with -eval)
    3. flags and -opts
    """
    command_line = parse(arguments)
    loaded = _load(command_line)
    cfg = Path(find_settings_file(command_line.cfg)) if command_line.cfg else Path()
    if (file := or_shipped(cfg)) != cfg:
        loaded = replace(loaded, notes=[f"-cfg: {cfg} comes with halfstep ({file})", *loaded.notes])
    return loaded


def _load(command_line: CommandLine) -> LoadedConfig:
    files = read_layers(find_settings_file(command_line.cfg)) if command_line.cfg else []
    given = _given([*files, *command_line.layers])
    if not {"MODEL.RESUME", "MODEL.PRETRAINED"} & given.keys():
        return load(command_line, beneath=files)
    # Imported here: reading weights needs torch, whose import takes seconds.
    from engine.settings_of_weights import checkpoint_of, fine_tuning_file, is_on, layer_of_weights, layers_of_run

    checkpoint = checkpoint_of(given)
    if command_line.cfg:
        return load(command_line, beneath=files, weights=layer_of_weights(given, checkpoint))
    path, of_run = layers_of_run(given, checkpoint)
    if of_run:
        loaded = load(command_line, beneath=of_run, weights=layer_of_weights(given, checkpoint))
        note = f"settings: from the run of {short_name(path)}, with the overrides of the command line; use -cfg for other settings"
        return replace(loaded, notes=[note, *loaded.notes])
    if is_on(given, "EVAL"):
        return load(command_line, needs_file=False, weights=layer_of_weights(given, checkpoint))
    loaded = _load(command_line._replace(cfg=find_settings_file("finetune")))
    file = find_settings_file(fine_tuning_file(loaded.config))
    loaded = _load(command_line._replace(cfg=file))
    note = f"settings: {file} (fine-tuning, DATA.DATASET {loaded.config.DATA.DATASET}); use -cfg for other settings"
    return replace(loaded, notes=[note, *loaded.notes])


def _given(layers: Sequence[Layer]) -> dict[str, Text]:
    """Return {current name: text} of all settings that are given in files and flags."""
    last = {our_name(key): text for layer in layers for key, text in layer.texts.items()}
    given = {key: text for key, text in last.items() if not is_none(text)}
    return given | name_runs(given)
