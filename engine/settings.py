"""The settings of a command line: what files and flags leave open follows the weights, or the run that is continued."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.combinations import WITHOUT_FILES
from configs.flags import parse
from configs.load import LoadedConfig, load, name_runs
from configs.paddlevit import our_name
from configs.removed import DECISIVE_ROLES, REMOVED
from configs.schema import MACHINE, VIT_FIELDS, Config
from configs.values import ALL_SETTINGS, IMPLIED, SETTINGS, Text, convert, flatten, is_none, of_role, to_text, today
from configs.yaml_files import Layer, Quoted, find_settings_file, read_layers
from utils.errors import ConfigError

# What is not taken over from a run: an evaluation, or a new run from its weights, has its own machine and folder, and a
# new run its own classes and its own way to adapt the weights. A cache is the machine's too, whatever size its images have.
OWN = {*of_role(MACHINE), "SAVE", "MODEL.PRETRAINED", "DATA.CACHE"}
ADAPTED = {"MODEL.NUM_CLASSES", "MODEL.FREEZE", *(key for key in SETTINGS if key.startswith("MODEL.LORA."))}
NOT_TAKEN = {"-resume": set(), "-eval": OWN, "-pretrained": OWN | ADAPTED}
# Whoever sets one of these says which model it is.
MODEL_SETTINGS = ("MODEL.TYPE", *(f"MODEL.{name}" for name in VIT_FIELDS))


def load_settings(arguments: list[str]) -> LoadedConfig:
    """Load the settings. Importing torch takes seconds, and only a command that names weights needs it here."""
    command_line = parse(arguments)
    files = read_layers(find_settings_file(command_line.cfg)) if command_line.cfg else []
    given = _given([*files, *command_line.layers])
    if not {"MODEL.RESUME", "MODEL.PRETRAINED"} & given.keys():
        return load(arguments)
    checkpoint = _checkpoint(given)
    if command_line.cfg:
        return load(arguments, beneath=files, weights=_weights(given, checkpoint))
    return _load_without_file(arguments, given, checkpoint)


def _given(layers: Sequence[Layer]) -> dict[str, Text]:
    """The texts of what files and flags set, by today's names."""
    last = {our_name(key): text for layer in layers for key, text in layer.texts.items()}
    given = {key: text for key, text in last.items() if not is_none(text)}
    return given | name_runs(given)


def _is_on(given: dict[str, Text], key: str) -> bool:
    return key in given and convert(ALL_SETTINGS[key], given[key], key)


def _checkpoint(given: dict[str, Text]) -> Path | None:
    """The file that -resume names. Whether its tensors are whole, the run finds out."""
    if "MODEL.RESUME" not in given:
        return None
    from engine.checkpoint.resume import checkpoint_at
    from models.weights.torch_files import read_index

    where = (given.get(key, ALL_SETTINGS[key].default) for key in ("SAVE", "NAME"))
    is_evaluated = _is_on(given, "EVAL")
    return checkpoint_at(given["MODEL.RESUME"], *where, is_evaluated, lambda line: None, read_index)  # the run warns


def _weights(given: dict[str, Text], checkpoint: Path | None) -> Layer | None:
    """Settings that follow from the weights that the run starts from or evaluates; a run that is continued keeps what it had."""
    from models.weights.files import read_record
    from models.weights.metadata import ARCHITECTURE, PREPROCESSING, metadata_of

    names_model = any(key in given for key in MODEL_SETTINGS)
    try:
        if checkpoint and not _is_on(given, "EVAL"):
            began = read_record(checkpoint).get("config", {})
            if "MODEL.TYPE" in began:
                keys = (*PREPROCESSING, *(() if names_model else ARCHITECTURE)) if began.get("MODEL.PRETRAINED") else ()
                return _layer(f"checkpoint {checkpoint}", {key: began[key] for key in keys if key in began})
        source = checkpoint or given.get("MODEL.PRETRAINED")
        metadata = metadata_of(str(source)) if source else None
    except ConfigError as error:
        if checkpoint or (names_model and _is_on(given, "CHECK")):
            return None  # the run, or a row of -check, says why they cannot be read
        raise ConfigError(f"MODEL.PRETRAINED: {error}") from None
    if metadata is None:
        return None
    origin, images, model = _by_weights(metadata, given, names_model)
    if not (names_model or model):
        raise ConfigError(
            f"MODEL.NAME: {metadata.by} does not say which model it is of; name timm's (any of timm.list_models()), as in "
            "-opts MODEL.NAME=vit_base_patch16_224"
        )
    if images and not {"DATA.IMAGE_SIZE"} & {*images, *given}:
        raise ConfigError(f"DATA.IMAGE_SIZE: {metadata.by} was trained on images that are not square; set one side")
    return _layer(origin, _for_channels(images, given) | model)


def _by_weights(metadata: Any, given: dict[str, Text], names_model: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The origin of what follows from weights, for their images and model: of what they do not say, timm knows the usual."""
    from models.weights.timm_tags import usual_images

    origin, images = f"weights {metadata.by}", metadata.images
    model = metadata.model or ({"MODEL.TYPE": "timm"} if "MODEL.NAME" in given else {})
    kind, name = (str((given if names_model else model | given).get(f"MODEL.{each}", "")) for each in ("TYPE", "NAME"))
    if kind.lower() == "timm" and not images and (images := usual_images(name)):
        origin += f" (timm's {name})"
    if names_model:  # of the same model of timm's the arguments are still theirs
        theirs = model.get("MODEL.NAME", "").partition(".")[0]
        is_same = kind.lower() == "timm" and name.partition(".")[0] == theirs
        model = {key: model[key] for key in ("MODEL.KWARGS",) if key in model and is_same}
    return origin, images, model


def _for_channels(images: dict[str, Any], given: dict[str, Text]) -> dict[str, Any]:
    """Mean and deviation for grey images in place of colour ones, or the other way round, where that is set."""
    key, theirs = "DATA.IMAGE_CHANNELS", images.get("DATA.IMAGE_CHANNELS")
    number = convert(SETTINGS[key], given[key], key) if key in given else theirs
    if number == theirs:
        return images
    for name in {"DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"} & images.keys():
        images = images | {name: [round(sum(images[name]) / len(images[name]), 6)] * number}
    return images


def _load_without_file(arguments: list[str], given: dict[str, Text], checkpoint: Path | None) -> LoadedConfig:
    """Load the settings of the checkpoint's run in place of those of a file; an evaluation needs only the model's."""
    from models.weights.files import find_file, read_record

    resumes, is_evaluated = "MODEL.RESUME" in given, _is_on(given, "EVAL")
    source = given["MODEL.RESUME" if resumes else "MODEL.PRETRAINED"]
    try:
        path = checkpoint if resumes else find_file(source)
        recorded = read_record(path).get("config", {}) if path else {}
    except ConfigError as error:
        raise ConfigError(f"{'-resume' if resumes else 'MODEL.PRETRAINED'}: {error}") from None
    if "MODEL.TYPE" in recorded:
        use = "-eval" if is_evaluated else "-resume" if resumes else "-pretrained"
        beneath = _settings_of_run(recorded, use, given, f"checkpoint {path}")
        loaded = load(arguments, beneath=beneath, weights=_weights(given, checkpoint))
        note = f"settings: those of the run of {path}, except for what the command line says; -cfg would name others"
        return replace(loaded, notes=[note, *loaded.notes])
    if path is None and source == "auto":
        where = Path(*(given.get(key, ALL_SETTINGS[key].default) for key in ("SAVE", "NAME")))
        raise ConfigError(
            f"-resume auto: there is no run to continue in {where}; "
            "name another folder with -output, or a settings file with -cfg to start a run"
        )
    if resumes and path is None:
        from engine.checkpoint.resume import no_checkpoint_at

        raise no_checkpoint_at(source)
    if resumes and not is_evaluated:
        raise ConfigError(f"-cfg is missing, and {path} does not hold the settings of a run; name a settings file")
    if not is_evaluated:
        file = find_settings_file("finetune")
        loaded = load_settings(["-cfg", file, *arguments])
        note = f"settings: {file} (fine-tuning, DATA.DATASET {loaded.config.DATA.DATASET}); -cfg would name others"
        return replace(loaded, notes=[note, *loaded.notes], arguments=arguments)
    try:
        weights = _weights(given, checkpoint)
    except ConfigError as error:
        raise ConfigError(f"{error}; or name a settings file with -cfg") from None
    return load(arguments, needs_file=False, weights=weights)


def _settings_of_run(recorded: dict[str, Any], use: str, given: dict[str, Text], origin: str) -> list[Layer]:
    """Return what a checkpoint's settings give to this use of it.

    A folder of images beside weights of a computed data set, such as those that come with halfstep, is an imagefolder.
    """
    is_evaluated = use == "-eval"
    saved = IMPLIED | (today(recorded, ("model",)) if is_evaluated else recorded)
    removed = [key for key, each in REMOVED.items() if each.role in DECISIVE_ROLES]
    kept = SETTINGS if is_evaluated else {*SETTINGS, *removed}
    taken = {key: saved[key] for key in saved if key in kept and key not in NOT_TAKEN[use]}
    names_folder = "DATA.DATA_PATH" in given and "DATA.DATASET" not in given
    if use == "-resume" or not names_folder or taken.get("DATA.DATASET") not in WITHOUT_FILES:
        return [_layer(origin, taken)]
    taken.pop("DATA.SYNTHETIC_SIZE", None)
    by_folder = _layer("for -data_path", {"DATA.DATASET": "imagefolder"})
    return [_layer(origin, taken), by_folder]


def override(config: Config, arguments: Sequence[str]) -> Config:
    """The settings with those of a command line in place of theirs."""
    return load(list(arguments), beneath=[_layer("the weights", flatten(config))]).config if arguments else config


def _layer(origin: str, settings: dict[str, Any]) -> Layer:
    try:
        return Layer(origin, {name: text for key, value in settings.items() for name, text in _texts(key, value)})
    except TypeError:
        raise ConfigError(
            f"{origin}: a value in it is neither text nor a number nor a list of them; it is damaged"
        ) from None


def _texts(key: str, value: Any) -> Iterator[tuple[str, Text]]:
    """Names and texts of a value as in a settings file; of an open section, one for each of its arguments."""
    if not isinstance(value, dict):
        yield key, _to_text(value)
        return
    for name, each in value.items():
        yield f"{key}.{name}", _to_text(each)


def _to_text(value: Any) -> Text:
    """A value as it is read from a settings file."""
    if isinstance(value, list | tuple):
        return [_to_text(each) for each in value]
    return Quoted(value) if isinstance(value, str) else to_text(value)
