"""What each setting may be: text from a file, a flag or -opts becomes the value that schema.py asks for."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from configs.schema import Config
from utils.errors import ConfigError, did_you_mean

# Values travel as the text that was typed until they are converted here, so that no guess of YAML's comes between:
# to PyYAML 3e-3 is text, 010 is 8, 12:30 is 750 and `no` is a boolean.
Text = str | list

_NONE_WORDS = ("", "none", "null", "~")
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def is_none(text: Text) -> bool:
    """Whether a text stands for "not set", in YAML's words or Python's."""
    return isinstance(text, str) and text.strip().lower() in _NONE_WORDS


@dataclass(frozen=True)
class Setting:
    """One setting of the schema, under its full name."""

    key: str
    kind: type  # int, float, bool or str: of the value, or of each member of a list
    optional: bool
    many: bool
    default: Any
    sentence: str
    choices: tuple
    low: float | None
    high: float | None
    words: tuple  # what it may be besides a number


def _settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    kinds = get_type_hints(cls)
    for each in fields(cls):
        annotation, key = kinds[each.name], prefix + each.name
        if is_dataclass(annotation):
            yield from _settings(annotation, key + ".")
            continue
        optional = type(None) in get_args(annotation)
        many = get_origin(annotation) is tuple
        kind = (get_args(annotation) or (annotation,))[0]
        yield Setting(key, kind, optional, many, each.default, **each.metadata)


SETTINGS: dict[str, Setting] = {setting.key: setting for setting in _settings(Config)}
SECTIONS = {key.rpartition(".")[0] for key in SETTINGS} - {""}


def build(values: dict[str, Any], cls: type = Config, prefix: str = "") -> Any:
    """The Config of {full key: value}."""
    members = {
        name: build(values, kind, f"{prefix}{name}.") if is_dataclass(kind) else values[prefix + name]
        for name, kind in get_type_hints(cls).items()
    }
    return cls(**members)


def flatten(config: Config) -> dict[str, Any]:
    """{full key: plain value} in the schema's order; tuples as lists."""
    values = {}
    for key in SETTINGS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        values[key] = list(value) if isinstance(value, tuple) else value
    return values


def unflatten(saved: dict[str, Any]) -> Config:
    """The Config of what `flatten` gave, which a checkpoint holds; a setting that was not there yet has its default."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    return build({key: values.get(key, setting.default) for key, setting in SETTINGS.items()})


def convert(setting: Setting, text: Text, origin: str) -> Any:
    """The value that `text` stands for; `origin` is the file or flag that an error names."""
    try:
        if not setting.many:
            return _one(setting, text)
        return tuple(_one(setting, member) for member in _members(text))
    except _TooLarge:
        raise ConfigError(f"{origin}: {setting.key} is {shown(text)}; it must be below 2**63") from None
    except ValueError:
        known = setting.words or (setting.choices if setting.kind is str else ())
        near = did_you_mean(text, known) if isinstance(text, str) else ""
        raise ConfigError(f"{origin}: {setting.key} is {shown(text)}; it must be {describe(setting)}{near}") from None


def _members(text: Text) -> list:
    """A YAML list as it is; `(0.9, 0.999)`, `[a, b]` and `a, b` cut at the commas."""
    if isinstance(text, list):
        return text
    if is_none(text):
        return []
    text = text.strip()
    if text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1]
    members = [member.strip().strip("'\"") for member in text.split(",")]
    return members[:-1] if members[-1] == "" else members  # (0.9,) and ()


def _one(setting: Setting, text: Text) -> Any:
    if not isinstance(text, str):
        raise ValueError("a list where one value belongs")
    if is_none(text) and "none" in setting.choices:
        return "none"
    if is_none(text) and (setting.optional or setting.kind is str) and not setting.many:
        return None if setting.optional else ""
    word = text.strip().lower()
    if setting.choices:
        by_word = {str(choice).lower(): choice for choice in setting.choices}
        if word not in by_word:
            raise ValueError("none of the choices")
        return by_word[word]
    if setting.kind is str:
        if "\0" in text:
            raise ValueError("no path or name may hold it")
        return text
    if setting.kind is bool:
        if word not in _BOOLS:
            raise ValueError("no boolean")
        return _BOOLS[word]
    if word in setting.words:
        return word
    pattern = _INT if setting.kind is int else _FLOAT
    if not pattern.fullmatch(word):
        raise ValueError("no number")
    value = setting.kind(word)
    if setting.kind is int and abs(value) > _LARGEST:
        raise _TooLarge
    low = -math.inf if setting.low is None else setting.low
    high = math.inf if setting.high is None else setting.high
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError("out of bounds")
    return value


_LARGEST = 2**63 - 1  # of torch's and numpy's whole numbers


class _TooLarge(ValueError):
    """A whole number that nothing can hold."""


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")


def to_text(value: Any) -> str:
    """A value as YAML that converts back to it, and that other YAML readers take for the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_text(member) for member in value)}]"
    if isinstance(value, float):
        digits = repr(value)
        return digits if "." in digits else digits.replace("e", ".0e")  # to PyYAML 1e-06 is text
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and value.lower() not in (*_BOOLS, *_NONE_WORDS, "y", "n"):
        return value
    return yaml.dump(value, default_style='"', allow_unicode=True, width=math.inf).removesuffix("\n")


def describe(setting: Setting) -> str:
    """What a setting may be, as the end of `it must be ...`."""
    if setting.choices:
        words = [str(choice) for choice in setting.choices] + ["None"] * setting.optional
        return ", ".join(words[:-1]) + " or " + words[-1]
    one, several = {
        int: ("a whole number", "a list of whole numbers"),
        float: ("a number", "a list of numbers"),
        bool: ("true or false", ""),
        str: ("text", "a list of texts"),
    }[setting.kind]
    others = "".join(f", or {word}" for word in (*setting.words, *["None"] * setting.optional))
    return (several if setting.many else one) + bounds(setting) + others


def bounds(setting: Setting) -> str:
    """' of at least 1', ' from 0 to 1' or nothing."""
    if setting.low is None:
        return ""
    if setting.high is None:
        return f" of at least {setting.low:g}"
    return f" from {setting.low:,.10g} to {setting.high:,.10g}"


def shown(text: Text) -> str:
    """A text as an error quotes it."""
    return repr(text) if isinstance(text, str) else f"[{', '.join(shown(member).strip(chr(39)) for member in text)}]"
