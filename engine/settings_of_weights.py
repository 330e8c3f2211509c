"""Finds the settings that follow from the weights on the command line: from their run, model and preprocessing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.checks import WITHOUT_FILES
from configs.flags import parse
from configs.load import LoadedConfig, resolve
from configs.removed import is_removed, refuse_other_images
from configs.schema import MACHINE, SCALE, VIT_FIELDS, Config
from configs.values import ALL_SETTINGS, SETTINGS, Text, convert, flatten, of_role, to_text, today
from configs.yaml_files import Layer, Quoted
from utils.errors import ConfigError

# Settings that are not taken over from a run. An evaluation, or a new run from its weights, has its own machine, cache
# and folder. A new run also has its own classes and its own way to adapt the weights.
OWN = {*of_role(MACHINE), "SAVE", "MODEL.PRETRAINED", "DATA.CACHE"}
ADAPTED = {
    "MODEL.NUM_CLASSES",
    *SCALE,
    "MODEL.FREEZE",
    *(key for key in SETTINGS if key.startswith("MODEL.LORA.")),
}
# If a setting of OF_TASK changes, the model learns something new, so those of ONLY_OF_TASK are not taken over.
OF_TASK, ONLY_OF_TASK = {"TRAIN.OBJECTIVE", "DATA.LABEL_SEPARATOR"}, {"TRAIN.LOSS", "TRAIN.BEST_METRIC"}
OF_TARGETS = ("DATA.SAMPLER", "DATA.LABEL_SEPARATOR", "DATA.COLUMNS", *SCALE)
NOT_TAKEN = {"-resume": set(), "-eval": OWN, "-pretrained": OWN | ADAPTED}
# {value of DATA.DATASET: the pattern of its files}. A folder without them has other data.
FILES_OF = {"csv": "*.csv", "parquet": "**/*.parquet"}
# If one of these settings is given, the command line defines the model. Otherwise the weights define it.
MODEL_SETTINGS = ("MODEL.TYPE", *(f"MODEL.{name}" for name in VIT_FIELDS))


def is_on(typed: dict[str, Text], key: str) -> bool:
    return key in typed and convert(ALL_SETTINGS[key], typed[key], key)


def checkpoint_of(typed: dict[str, Text]) -> Path | None:
    """Return the file that -resume names. Its tensors are verified later, by the run."""
    if "MODEL.RESUME" not in typed:
        return None
    from engine.checkpoint.find import checkpoint_at

    where = (typed.get(key, ALL_SETTINGS[key].default) for key in ("SAVE", "NAME"))
    is_evaluated = is_on(typed, "EVAL")
    # Warnings are dropped here: the run logs them later.
    return checkpoint_at(typed["MODEL.RESUME"], *where, is_evaluated, lambda line: None, verify=False)


def begins(typed: dict[str, Text], checkpoint: Path | None) -> bool:
    """Return whether -resume auto begins a new run, because there is none to continue. `checkpoint`: its file."""
    return checkpoint is None and typed.get("MODEL.RESUME") == "auto" and not is_on(typed, "EVAL")


def choice_of_resumed(typed: dict[str, Text], checkpoint: Path | None, candidate_names: list[str]) -> dict[str, str]:
    """Return the settings that the images have chosen for the run to continue, or {} for a new run.

    `candidate_names`: [] for the usual ones. Raise ConfigError for an evaluation or a prediction.
    """
    from engine.catalogue import USUAL
    from models.weights.files import read_record

    if is_on(typed, "EVAL"):
        raise ConfigError("choose: images are evaluated or predicted by weights that have a name; give a file or a run")
    if checkpoint is None:
        return {}
    config = read_record(checkpoint).get("config", {})
    size = str(config.get("DATA.IMAGE_SIZE"))
    # Without @PIXELS, the size is that of the weights or of the command line.
    is_chosen = any(name.endswith(f"@{size}") for name in candidate_names or USUAL)
    sized = {"DATA.IMAGE_SIZE": size} if is_chosen else {}
    return {"MODEL.PRETRAINED": config.get("MODEL.PRETRAINED") or "none"} | sized


def layers_of_run(typed: dict[str, Text], checkpoint: Path | None) -> tuple[Path | None, list[Layer]]:
    """Return the weights file and the settings layers of its run, or [] if another program wrote the file.

    Raise ConfigError if there is no run to resume or evaluate, or if the file to resume has no settings.
    """
    from engine.checkpoint.find import newer_named_run, no_checkpoint_at
    from models.weights.files import find_file, read_record

    if begins(typed, checkpoint) and "MODEL.PRETRAINED" in typed:
        typed = {key: text for key, text in typed.items() if key != "MODEL.RESUME"}
    resumes = "MODEL.RESUME" in typed
    try:
        path = checkpoint if resumes else find_file(typed["MODEL.PRETRAINED"])
        recorded = read_record(path).get("config", {}) if path else {}
    except ConfigError as error:
        raise ConfigError(f"{'-resume' if resumes else 'MODEL.PRETRAINED'}: {error}") from None
    if "MODEL.TYPE" in recorded:
        return path, _settings_of_run(recorded, typed, f"checkpoint {path}")
    if resumes and path is None and typed["MODEL.RESUME"] == "auto":
        save, name = (typed.get(key, ALL_SETTINGS[key].default) for key in ("SAVE", "NAME"))
        named = "" if name else newer_named_run(save, None)
        remedy = "name another folder with -output, or a settings file with -cfg to start a run"
        raise ConfigError(f"-resume auto: there is no run to continue in {Path(save, name)}; {named or remedy}")
    if resumes and path is None:
        raise no_checkpoint_at(typed["MODEL.RESUME"])
    if resumes and not is_on(typed, "EVAL"):
        raise ConfigError(f"-cfg is missing, and {path} has no settings of a run; name a settings file with -cfg")
    return path, []


def _settings_of_run(recorded: dict[str, Any], typed: dict[str, Text], origin: str) -> list[Layer]:
    """Return the settings of a run to take over: all to resume it, fewer to evaluate it or to start from its weights.

    If -data_path names data of another kind than those of the run, such as class folders after a CSV file, tars after
    class folders, or photos after the digits, DATA.DATASET follows it.
    """
    saved = recorded
    if is_on(typed, "EVAL"):
        use = "-eval"
        refuse_other_images(recorded, origin)
        saved = today(recorded)
    else:
        use = "-resume" if "MODEL.RESUME" in typed else "-pretrained"
    known = {key: value for key, value in saved.items() if key in SETTINGS and not is_removed(key, value)}
    taken = {key: value for key, value in known.items() if key not in NOT_TAKEN[use]}
    if use == "-pretrained":
        taken = _for_channels(taken, typed)
        if any(typed[key] != taken.get(key) for key in OF_TASK & typed.keys()):
            taken = {key: value for key, value in taken.items() if key not in ONLY_OF_TASK}
    names_path = "DATA.DATA_PATH" in typed and "DATA.DATASET" not in typed
    dataset = _other_dataset(str(typed["DATA.DATA_PATH"]), taken) if names_path and use != "-resume" else None
    if dataset is None:
        return [layer_from(origin, taken)]
    of_source = {key for key, each in SETTINGS.items() if each.only and each.only.keys == ["DATA.DATASET"]}
    taken = {key: value for key, value in taken.items() if key not in of_source}
    return [layer_from(origin, taken), layer_from("for -data_path", {"DATA.DATASET": dataset})]


def _other_dataset(path: str, taken: dict[str, Any]) -> str | None:
    """Return the kind of data at this path of the command line, or None if it is probably that of these settings."""
    from datasets.sources.recognised import recognise_data

    dataset, folder = taken.get("DATA.DATASET"), Path(path).expanduser()
    if dataset is None or dataset in WITHOUT_FILES:  # None: a release removed the data set
        return recognise_data(path)
    has_names = not taken.get("DATA.LABEL_SEPARATOR") and len(taken.get("DATA.COLUMNS") or ()) <= 2
    if not has_names or taken.get("TRAIN.OBJECTIVE") != "classes" or not folder.is_dir():
        return None
    if dataset in FILES_OF:
        return recognise_data(path) if next(folder.glob(FILES_OF[dataset]), None) is None else None
    is_packed = dataset == "imagefolder" and recognise_data(path) in ("shards", "parquet")
    return recognise_data(path) if is_packed else None


def has_batchnorm(config: Config) -> bool:
    """Return whether the model of these settings has BatchNorm, or another norm with running statistics."""
    from models import build_model
    from models.parts import statistics_of
    from utils.without_values import build_without_values

    try:
        return bool(statistics_of(build_without_values(lambda: build_model(config, 1))))
    except ConfigError:  # the run, or a row of -check, reports it
        return False


def fine_tuning_file(config: Config, has_statistics: bool | None = None) -> str:
    """Return the name of the file that fine-tunes this model.

    `has_statistics`: of BatchNorm; None: look at the model.
    """
    has_statistics = has_batchnorm(config) if has_statistics is None else has_statistics
    return f"{config.task.recipe}_batchnorm" if has_statistics else config.task.recipe


def layer_of_weights(typed: dict[str, Text], checkpoint: Path | None) -> Layer | None:
    """Return the image and model settings that follow from the weights. A resumed run keeps its first settings."""
    from models.weights.files import read_record
    from models.weights.metadata import ARCHITECTURE, PREPROCESSING, metadata_of

    names_model = any(key in typed for key in MODEL_SETTINGS)
    try:
        if checkpoint and not is_on(typed, "EVAL"):
            began = read_record(checkpoint).get("config", {})
            if "MODEL.TYPE" in began:
                keys: tuple[str, ...] = ()
                if began.get("MODEL.PRETRAINED"):
                    keys = PREPROCESSING if names_model else (*PREPROCESSING, *ARCHITECTURE)
                return layer_from(f"checkpoint {checkpoint}", {key: began[key] for key in keys if key in began})
        source = checkpoint or typed.get("MODEL.PRETRAINED")
        metadata = metadata_of(str(source)) if source else None
    except ConfigError as error:
        if checkpoint or (names_model and is_on(typed, "CHECK")):
            return None  # the run, or a row of -check, reports why the file cannot be read
        raise ConfigError(f"MODEL.PRETRAINED: {error}") from None
    if metadata is None:
        return None
    origin, images, model = _by_weights(metadata, typed, names_model)
    if not (names_model or model):
        origin, images, model = _recognised(str(source), origin)
    if not (names_model or model):
        raise ConfigError(
            f"MODEL.NAME: {metadata.by} does not name its model; name a timm model (any of timm.list_models()), as in "
            "-opts MODEL.NAME=vit_base_patch16_224, or a settings file with -cfg"
        )
    return layer_from(origin, _for_channels(images, typed) | model)


def _by_weights(metadata: Any, typed: dict[str, Text], names_model: bool) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the origin, the image settings and the model settings.

    If a timm model has no image settings, use timm's defaults.
    """
    from models.weights.metadata import usual_images

    origin, images = f"weights {metadata.by}", metadata.images
    model = metadata.model or ({"MODEL.TYPE": "timm"} if "MODEL.NAME" in typed else {})
    kind, name = (str((typed if names_model else model | typed).get(f"MODEL.{each}", "")) for each in ("TYPE", "NAME"))
    if kind.lower() == "timm" and not images and (images := usual_images(name)):
        origin += f" (timm's {name})"
    if names_model:  # for the same timm model, the MODEL.KWARGS of the weights still apply
        name_in_weights = model.get("MODEL.NAME", "").partition(".")[0]
        is_same = kind.lower() == "timm" and name.partition(".")[0] == name_in_weights
        model = {key: model[key] for key in ("MODEL.KWARGS",) if key in model and is_same}
    return origin, images, model


def _recognised(source: str, origin: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the origin, and the settings of images and model if the file's name or shapes say which model it is."""
    from models.weights.files import find_file
    from models.weights.recognised import recognise

    path = find_file(source)
    recognised = recognise(path) if path else None
    if recognised is None:
        return origin, {}, {}
    return f"{origin} (timm's {recognised.name}, {recognised.how})", recognised.images, recognised.model


def _for_channels(images: dict[str, Any], typed: dict[str, Text]) -> dict[str, Any]:
    """Return the settings, with mean and deviation averaged if DATA.IMAGE_CHANNELS differs from the weights'."""
    key = "DATA.IMAGE_CHANNELS"
    if key not in typed:
        return images
    number = convert(SETTINGS[key], typed[key], key)
    if number == images.get(key):
        return images
    of_channels = {"DATA.RANGE", "DATA.RGB"}  # they belong to the weights' channels
    images = {name: value for name, value in images.items() if name not in of_channels}
    for name in {"DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"} & images.keys():
        images = images | {name: [round(sum(images[name]) / len(images[name]), 6)] * number}
    return images


def layer_from(origin: str, settings: dict[str, Any]) -> Layer:
    """Return a layer of these settings, as if they were read from a settings file."""
    values: dict[str, Any] = {}
    for key, value in settings.items():  # a section of arguments, such as MODEL.KWARGS, is a dict
        values |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    try:
        return Layer(origin, {key: _to_text(value) for key, value in values.items()})
    except TypeError:
        raise ConfigError(
            f"{origin}: a value is neither text, nor a number, nor a list of these; the file is damaged"
        ) from None


def _to_text(value: Any) -> Text:
    """Return a value as it would be read from a settings file."""
    if isinstance(value, list | tuple):
        return [_to_text(each) for each in value]
    return Quoted(value) if isinstance(value, str) else to_text(value)


def override(config: Config, arguments: Sequence[str], for_features: bool = False) -> Config:
    """Return the settings of some weights with the overrides of a command line.

    `for_features`: if the command line names another TRAIN.OBJECTIVE, leave out the settings of the weights' training.
    """
    if not arguments:
        return config
    from configs.auto import without_auto

    command_line, saved = parse(list(arguments)), flatten(config)
    objectives = [layer.texts.get("TRAIN.OBJECTIVE", config.TRAIN.OBJECTIVE) for layer in command_line.layers]
    if for_features and {*objectives} != {config.TRAIN.OBJECTIVE}:
        saved = {key: value for key, value in saved.items() if not key.startswith("TRAIN.") and key not in OF_TARGETS}
    weights = layer_from("the weights", saved)
    loaded = without_auto(resolve(command_line, [weights]))
    refuse_other_pixels(loaded, weights)
    return loaded.config


def refuse_other_pixels(loaded: LoadedConfig, weights: Layer | None) -> None:
    """Refuse another type of pixels with the limits of the weights, which belong to the type of their images."""
    data = loaded.config.DATA
    if not (weights and data.RANGE and loaded.origins["DATA.RANGE"] == weights.origin):
        return
    from datasets.pixels.native.pixels import refuse_limits_of

    refuse_limits_of(weights.texts, data)
