"""Loads the settings of a command line. Settings not given there follow from the weights or from the resumed run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.flags import CommandLine, parse
from configs.load import LoadedConfig, name_runs, resolve
from configs.tables import OF_USERS
from configs.translate.paddlevit import our_name
from configs.values import Text, is_none
from configs.yaml_files import Layer, find_settings_file, read_layers
from utils.errors import ConfigError
from utils.files import or_shipped, short_name

CHOOSE = "choose"  # the value of MODEL.PRETRAINED that lets the images choose the weights; see engine/choice/
CHOSEN = "chosen"  # the origin of settings that the images have decided


def chooses(pretrained: str | None) -> bool:
    """Return whether this value of MODEL.PRETRAINED is choose, or choose:WORD,WORD."""
    return (pretrained or "").partition(":")[0] == CHOOSE


def candidate_names_in(pretrained: str | None) -> list[str] | None:
    """Return the names in choose:WORD,WORD ([]: the usual ones; ,, is a comma in a name), or None for other values."""
    if not chooses(pretrained):
        return None
    _, colon, names = pretrained.partition(":")
    # No value of a setting has a null character.
    candidates = [name.strip().replace("\0", ",") for name in names.replace(",,", "\0").split(",")] if colon else []
    if colon and not all(candidates):
        raise ConfigError(
            f"MODEL.PRETRAINED: in {pretrained!r} a candidate is missing; write {CHOOSE}:WORD,WORD, and two commas "
            "for a comma in a name"
        )
    return candidates


def load_settings(arguments: list[str], chosen: Mapping[str, str] | None = None) -> LoadedConfig:
    """Load the settings for a command line from these layers. Each overrides the previous ones:

    1. settings that follow from the weights that the command line names
    2. the file of -cfg, or else the settings of the weights' run (not of chosen weights), or else, to train, the file
       in configs/ that fine-tunes their model: finetune.yaml, finetune_batchnorm.yaml or finetune_numbers*.yaml
    3. for photos without -cfg and -pretrained, the weights, size and epochs of engine/own_photos.py
    4. flags and -opts
    5. `chosen`: the texts of settings that the images have decided
    """
    command_line, notes = _with(parse(arguments), chosen), []
    files: list[Layer] = []
    if command_line.cfg:
        cfg = find_settings_file(command_line.cfg)
        files = read_layers(cfg)
        if (file := or_shipped(Path(cfg))) != Path(cfg):
            notes = [f"-cfg: {cfg} comes with halfstep ({file})"]
    texts = _given([*files, *command_line.layers])
    names_settings = command_line.cfg or "MODEL.PRETRAINED" in texts
    are_own = "DATA.DATA_PATH" in texts and texts.get("DATA.DATASET", OF_USERS[0]) in OF_USERS and not names_settings
    checkpoint = None
    if "MODEL.RESUME" in texts:
        # Imported here: reading weights needs torch, whose import takes seconds.
        import engine.settings_of_weights as of_weights

        checkpoint = of_weights.checkpoint_of(texts)
        are_own = are_own and of_weights.begins(texts, checkpoint)
    if are_own:
        from engine.own_photos import choose_for

        own = choose_for(texts, command_line.layers)
        command_line, notes = command_line._replace(layers=[own.layer, *command_line.layers]), own.notes
        texts = _given(command_line.layers)
    if {"MODEL.RESUME", "MODEL.PRETRAINED"} & texts.keys():
        loaded = _load_for_weights(command_line, files, texts, checkpoint)
    else:
        loaded = resolve(command_line, files or read_layers(find_settings_file(None)))
    return replace(loaded, notes=[*notes, *loaded.notes])


def fine_tuning_batch() -> Layer:
    """Return the batch size of a fine-tuning, for other weights: no command then needs more memory than training."""
    file = find_settings_file("finetune")
    return Layer(file, {"DATA.BATCH_SIZE": read_layers(file)[-1].texts["DATA.BATCH_SIZE"]})


def _load_for_weights(
    command_line: CommandLine, files: list[Layer], texts: dict[str, Text], checkpoint: Path | None
) -> LoadedConfig:
    """Load the settings for a command line with weights. `texts`: its settings; `checkpoint`: of the run to resume."""
    import engine.settings_of_weights as of_weights

    candidate_names = candidate_names_in(texts.get("MODEL.PRETRAINED"))
    if candidate_names is not None:
        chosen = of_weights.choice_of_resumed(texts, checkpoint, candidate_names)
        if not chosen:
            # MODEL.NAME names timm's model of the candidates, as it does for other weights that name none.
            named = Layer("weights", {"MODEL.TYPE": "timm"}) if "MODEL.NAME" in texts else None
            return resolve(command_line, files or read_layers(find_settings_file("finetune")), named)
        command_line = _with(command_line, chosen)
        texts = _given([*files, *command_line.layers])
    if files:
        return resolve(command_line, files, of_weights.layer_of_weights(texts, checkpoint))
    path, of_run = of_weights.layers_of_run(texts, checkpoint)
    weights = of_weights.layer_of_weights(texts, checkpoint)
    is_chosen = any(layer.origin == CHOSEN for layer in command_line.layers)
    if of_run and (checkpoint or not is_chosen):  # all candidates are trained alike
        loaded = resolve(command_line, of_run, weights)
        note = (
            f"settings: from the run of {short_name(path)}, with the overrides of the command line; use -cfg for other "
            "settings"
        )
        return replace(loaded, notes=[note, *loaded.notes])
    if of_weights.is_on(texts, "EVAL"):
        return resolve(command_line, [fine_tuning_batch()], weights)
    return _load_to_fine_tune(command_line, weights)


def _load_to_fine_tune(command_line: CommandLine, weights: Layer | None) -> LoadedConfig:
    """Load the file that fine-tunes the model of the weights. To know model and task, load the usual one first."""
    from engine.settings_of_weights import fine_tuning_file

    usual = find_settings_file("finetune")
    loaded = resolve(command_line, read_layers(usual), weights)
    file = find_settings_file(fine_tuning_file(loaded.config))
    if file != usual:
        loaded = resolve(command_line, read_layers(file), weights)
    note = f"settings: {file} (fine-tuning, DATA.DATASET {loaded.config.DATA.DATASET}); use -cfg for other settings"
    return replace(loaded, notes=[note, *loaded.notes])


def _with(command_line: CommandLine, chosen: Mapping[str, str] | None) -> CommandLine:
    layers = [Layer(CHOSEN, {**chosen})] if chosen else []
    return command_line._replace(layers=[*command_line.layers, *layers])


def _given(layers: Sequence[Layer]) -> dict[str, Text]:
    """Return {current name: text} of all settings that are given in files and flags."""
    last = {our_name(key): text for layer in layers for key, text in layer.texts.items()}
    texts = {key: text for key, text in last.items() if not is_none(text)}
    return texts | name_runs(texts)
