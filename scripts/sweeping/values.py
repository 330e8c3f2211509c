"""What -over says: the values of a setting in a grid, or the range from which optuna proposes them."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from configs.schema import Arguments
from configs.typed_names import suggest_key
from configs.values import OPEN_SECTIONS, SETTINGS, START_SETTINGS, convert
from utils.errors import ConfigError

RANGE = re.compile(r"(?P<low>[^.]+(?:\.[0-9]+[^.]*)?)\.\.(?P<high>[^:]+)(?::(?P<how>.+))?")
OPEN, CLOSED = "[(", "])"
# What the sweep itself decides: {setting: the flag for it}.
OF_THE_SWEEP = {
    "SEED": "-seeds",
    "DATA.FOLD": "-folds",
    "SAVE": "-output",
    "NAME": "-output",
    "TAG": "-output",
}


class Range(NamedTuple):
    """Numbers from which optuna chooses; `step`: between them, where there is one."""

    low: float
    high: float
    is_whole: bool
    is_log: bool
    step: float | None


def read_over(words: Sequence[str]) -> dict[str, str]:
    """{setting: the text of its values} of KEY=VALUES words."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text.strip():
            raise ConfigError(f"-over: {word!r} has no values; write KEY=VALUE,VALUE as in TRAIN.BASE_LR=1e-3,3e-3")
        if key in found:
            raise ConfigError(f"-over: {key} is given twice; write all its values behind one =")
        _check_key(key)
        found[key] = text
    return found


def _check_key(key: str) -> None:
    if key in OF_THE_SWEEP:
        raise ConfigError(f"-over: {key} is set by {OF_THE_SWEEP[key]}; leave it out here")
    if key in START_SETTINGS:
        raise ConfigError(f"-over: {key} does not change what is trained; leave it out here, or give it to all trials")
    is_argument = any(key.startswith(f"{section}.") for section in OPEN_SECTIONS)
    if not is_argument and (key not in SETTINGS or SETTINGS[key].kind is Arguments):
        raise ConfigError(f"-over: unknown setting {key}{suggest_key(key, SETTINGS)}")


def choices_of(key: str, text: str) -> list[str]:
    """The values of a setting as -opts takes them: commas divide them outside of brackets and quotes."""
    values = _split(text)
    setting = SETTINGS.get(key)
    if "" in values:
        raise ConfigError(f"-over: {key}={text} has an empty value; none stands for a setting that is not set")
    if setting and setting.is_list and any(value[0] not in OPEN and value.lower() != "none" for value in values):
        raise ConfigError(f"-over: {key} is a list; write each of its values in brackets, as in {key}=[a,b],[c,d]")
    known: list = []
    for value in values:
        if not setting and ".." in value or setting and RANGE.fullmatch(value) and setting.kind in (int, float):
            raise ConfigError(f"-over: {key}={text} is a range, from which only -optuna N chooses; list its values")
        converted = convert(setting, value, "-over") if setting else value
        if converted in known:
            raise ConfigError(f"-over: {key}={text} has the value {value} twice; leave one out")
        known.append(converted)
    return values


def range_or_choices(key: str, text: str) -> Range | list[str]:
    """For optuna: LOW..HIGH, with :log or :STEP behind it, or a list of values."""
    setting, found = SETTINGS.get(key), RANGE.fullmatch(text)
    if not (found and setting and setting.kind in (int, float) and not setting.is_list):
        return choices_of(key, text)
    low, high = (convert(setting, found[name], "-over") for name in ("low", "high"))
    how = found["how"]
    is_log = how == "log"
    try:
        step = setting.kind(how) if how and not is_log else None
    except ValueError:
        raise ConfigError(
            f"-over: {key}={text} ends in {how!r}; write LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP"
        ) from None
    if (
        None in (low, high)
        or not low < high
        or (is_log and low <= 0)
        or (step is not None and not 0 < step < float("inf"))
    ):
        raise ConfigError(
            f"-over: {key}={text}: the first number must be the smaller one, above 0 for log, and the step above 0"
        )
    return Range(low, high, setting.kind is int, is_log, step)


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in OPEN) - (character in CLOSED) if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    if depth or quote:
        raise ConfigError(f"-over: {text!r} has a bracket or quote that is not closed")
    return [_unquoted(part.strip()) for part in parts]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def describe(settings: Mapping[str, str]) -> str:
    """The settings of a trial in one line; sections are left out where the names alone tell them apart."""
    names = [key.rpartition(".")[2] for key in settings]
    short = len(set(names)) == len(names)
    return " ".join(f"{name if short else key}={settings[key]}" for key, name in zip(settings, names, strict=True))
