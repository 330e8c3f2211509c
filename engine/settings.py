"""The settings of a command line, or without -cfg those of the run whose checkpoint it names."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.arguments import Quoted
from configs.flags import parse
from configs.load import LoadedConfig, load
from configs.values import IMPLIED, SETTINGS, Text, convert, is_none, to_text
from configs.yaml_files import Layer
from utils.errors import ConfigError

# Settings of a single start of the program.
OF_A_START = r"EVAL|CHECK|CHECK_IMAGES|PROFILE|TRAIN\.LAST_EPOCH|MODEL\.RESUME|PRECISION\.EXPLAIN|(RESUME|RUN)\..*|DIST\.(URL|WORLD_SIZE|RANK)"
# Settings of the run and its machine, which an evaluation or a new run from its weights has of its own.
OF_THE_RUN = r"SAVE|TAG|DEVICE|NGPUS|MODEL\.PRETRAINED|DATA\.CACHE.*|DIST\..*"
NOT_TAKEN = {
    "-resume": OF_A_START,
    "-eval": f"{OF_A_START}|{OF_THE_RUN}|COMPILE.*",
    "-pretrained": rf"{OF_A_START}|{OF_THE_RUN}|MODEL\.(NUM_CLASSES|FREEZE)",
}


def load_settings(arguments: list[str]) -> LoadedConfig:
    """Load the settings. Importing torch takes seconds, and only a command without -cfg needs it here."""
    command_line = parse(arguments)
    given = {key: text for layer in command_line.layers for key, text in layer.texts.items() if not is_none(text)}
    if command_line.cfg or not {"MODEL.RESUME", "MODEL.PRETRAINED"} & given.keys():
        return load(arguments)
    path = _find(given)
    if path is None:
        source = given.get("MODEL.RESUME", given.get("MODEL.PRETRAINED"))
        if source == "auto":
            folder, tag = given.get("SAVE", SETTINGS["SAVE"].default), given.get("TAG")
            raise ConfigError(
                f"-resume auto: there is no run to continue under {folder} {f'with -tag {tag}' if tag else 'without a tag'}; "
                "name another folder with -output, or a settings file with -cfg to start a run"
            )
        raise ConfigError(f"-cfg is missing, and there is no checkpoint {source} with settings; name a settings file")
    from models.formats.files import what_is_recorded

    recorded = what_is_recorded(path).get("config", {})
    if "MODEL.TYPE" not in recorded:  # other programs have settings, too
        raise ConfigError(f"-cfg is missing, and {path} does not hold the settings of its run; name a settings file")
    is_evaluated = "EVAL" in given and convert(SETTINGS["EVAL"], given["EVAL"], "-eval")
    use = "-eval" if is_evaluated else "-resume" if "MODEL.RESUME" in given else "-pretrained"
    saved = IMPLIED | recorded
    taken = {key: saved[key] for key in saved if key in SETTINGS and not re.fullmatch(NOT_TAKEN[use], key)}
    texts = {name: text for key, value in taken.items() for name, text in _texts(key, value)}
    loaded = load(arguments, beneath=Layer(f"checkpoint {path}", texts))
    note = f"settings: those of the run of {path}, except for what the command line says; -cfg would name others"
    return replace(loaded, notes=[note, *loaded.notes])


def _find(given: dict[str, Text]) -> Path | None:
    """The file that -resume or -pretrained names."""
    from engine.checkpoint.resume import checkpoint_at
    from models.formats.files import find_file

    if "MODEL.RESUME" not in given:
        return find_file(given["MODEL.PRETRAINED"])
    save = given.get("SAVE", SETTINGS["SAVE"].default)
    return checkpoint_at(given["MODEL.RESUME"], save, given.get("TAG", ""), warn=lambda line: None)  # the run warns


def _texts(key: str, value: Any) -> Iterator[tuple[str, Text]]:
    """What a settings file would have for a value; for an open section for each of its arguments."""
    if not isinstance(value, dict):
        yield key, _to_text(value)
        return
    for name, each in value.items():
        yield f"{key}.{name}", _to_text(each)


def _to_text(value: Any) -> Text:
    """As read from a settings file."""
    if isinstance(value, list | tuple):
        return [_to_text(each) for each in value]
    return Quoted(value) if isinstance(value, str) else to_text(value)
