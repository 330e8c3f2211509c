"""Converts text from a file, a flag or -opts to the type that schema.py declares for the setting."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from configs.removed import is_removed
from configs.schema import MACHINE, MAX_INT, RECORD, SIZE, START, Arguments, Config, Form, Only
from configs.tables import TORCH_OPTIMIZERS
from utils.errors import ConfigError, did_you_mean

# Values stay text as typed until they are converted here, because PyYAML would guess their types:
# it reads 3e-3 as text, 010 as 8, 12:30 as 750 and `no` as a boolean.
Text = str | list

_NONE_WORDS = ("", "none", "null", "~")
BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INT = re.compile(r"[+-]?[0-9]+")
FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*|[1-9][0-9]*x[1-9][0-9]*")  # strings that need no quotes in YAML


def is_none(text: Text) -> bool:
    """Return whether a string means "not set", in YAML or in Python."""
    return isinstance(text, str) and text.strip().lower() in _NONE_WORDS


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the schema: its full key, its type, and what `setting()` in schema.py declares."""

    key: str
    kind: type  # int, float, bool, str or Arguments; for a list, the type of its members
    optional: bool
    is_list: bool
    choices: tuple
    special: tuple  # words that are allowed besides a number
    default: Any
    help: str
    bounds: tuple[float, float] | None
    form: Form | None
    role: str
    may_change: bool  # whether a resumed run may change the setting
    alike: tuple
    only: Only | None

    def has_effect(self, values: Mapping[str, Any]) -> bool:
        """Return whether the setting has an effect. `values`: {full key: value} of all settings."""
        return self.only is None or self.only.applies(values)


def _settings(cls: type, prefix: str = "") -> Iterator[Setting]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint, declared = hints[field.name], dict(field.metadata)
        if is_dataclass(hint):
            yield from _settings(hint, f"{prefix}{field.name}.")
            continue
        role = declared.pop("role") or cls.role
        types = (hint,) if get_origin(hint) in (None, Literal) else get_args(hint)
        choices = tuple(word for kind in types if get_origin(kind) is Literal for word in get_args(kind))
        is_choice = get_origin(types[0]) is Literal  # if False, these are allowed besides a number
        declared["may_change"] |= role in (START, MACHINE, RECORD)
        yield Setting(
            key=f"{prefix}{field.name}",
            kind=type(choices[0]) if is_choice else types[0],
            optional=type(None) in types,
            is_list=get_origin(hint) is tuple,
            choices=choices if is_choice else (),
            special=() if is_choice else choices,
            default=field.default,
            role=role,
            **declared,
        )


_DECLARED = {setting.key: setting for setting in _settings(Config)}
SETTINGS = {key: setting for key, setting in _DECLARED.items() if setting.role != START}  # saved with a run
ALL_SETTINGS = SETTINGS | _DECLARED  # in this order: the settings of one start are last
SECTIONS = {key.rpartition(".")[0] for key in ALL_SETTINGS} - {""}
OPEN_SECTIONS = tuple(key for key, setting in SETTINGS.items() if setting.kind is Arguments)  # any argument is allowed


def build(values: dict[str, Any], cls: type = Config, prefix: str = "") -> Any:
    """Build the Config from {full key: value}."""
    members = {}
    for field in fields(cls):
        is_section = is_dataclass(field.default)
        key = f"{prefix}{field.name}"
        members[field.name] = build(values, type(field.default), f"{key}.") if is_section else values[key]
    return cls(**members)


def flatten(config: Config) -> dict[str, Any]:
    """Return {full key: plain value} of all saved settings, with tuples as lists and open sections as dicts."""
    return {key: plain(attrgetter(key)(config)) for key in SETTINGS}


def plain(value: Any) -> Any:
    """Return a setting's value with tuples as lists and open sections as dicts."""
    if isinstance(value, Arguments):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    """Return a value with lists as tuples and dicts as Arguments: the inverse of `plain`."""
    if isinstance(value, dict):
        return Arguments({name: _frozen(each) for name, each in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# The settings that are dropout rates. A timm model may have its own default for each.
RATES = ("MODEL.DROPOUT", "MODEL.ATTENTION_DROPOUT", "MODEL.DROPPATH")

# The defaults of torch's own optimizers. For these optimizers, a setting with this value counts as not set.
OPTIMIZER_VALUES = {
    "TRAIN.OPTIMIZER.EPS": 1e-8,
    "TRAIN.OPTIMIZER.BETAS": (0.9, 0.999),
    "TRAIN.OPTIMIZER.MOMENTUM": 0.9,
}


def today(saved: dict[str, Any]) -> dict[str, Any]:
    """Convert saved settings to their current form: one spelling for equal values, and nothing that was removed."""
    left = {key: value for key, value in saved.items() if not is_removed(key, value)}
    if left.get("TRAIN.OPTIMIZER.NAME") in TORCH_OPTIMIZERS:
        left |= {key: plain(SETTINGS[key].default) for key in usual_optimizer_values(left)}
    return left


def usual_optimizer_values(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of OPTIMIZER_VALUES whose value in `values` equals torch's default."""
    return [key for key, usual in OPTIMIZER_VALUES.items() if key in values and plain(values[key]) == plain(usual)]


def wrong_in(saved: dict[str, Any]) -> list[str]:
    """Return the names of saved settings and saved counts whose values have the wrong type or are out of bounds."""
    counts = {name: saved.get(name, 1) for name in ("GLOBAL_BATCH", "NUM_IMAGES")}
    wrong = [name for name, count in counts.items() if type(count) is not int or count < 1]
    for key, value in today(saved).items():
        members = value if isinstance(value, list) else [value]
        if key in SETTINGS and not all(_fits(SETTINGS[key], each) for each in members):
            wrong.append(key)
    return wrong


def _fits(setting: Setting, value: Any) -> bool:
    if value is None or value in (*setting.choices, *setting.special):
        return value is not None or setting.optional
    # A choice that was removed after the settings were saved is an error only for settings of the model.
    if setting.choices and setting.role == "model":
        return False
    if isinstance(value, str) and setting.form is SIZE:
        return re.fullmatch(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", value) is not None
    low, high = setting.bounds or (value, value)
    kinds = {float: (float, int), Arguments: dict}.get(setting.kind, setting.kind)
    return isinstance(value, kinds) and (value == low or low <= value <= high)


def unflatten(saved: dict[str, Any]) -> Config:
    """Build the Config from a saved result of `flatten`. Missing settings get their defaults."""
    values = {key: _frozen(value) for key, value in today(saved).items() if key in SETTINGS}
    return build({key: values.get(key, setting.default) for key, setting in ALL_SETTINGS.items()})


def of_role(*roles: str) -> tuple[str, ...]:
    """Return the full keys of the saved settings with these roles, in the schema's order."""
    return tuple(key for key, setting in SETTINGS.items() if setting.role in roles)


def convert(setting: Setting, text: Text, origin: str) -> Any:
    """Convert `text` to the setting's type. `origin`: the file or flag, for error messages."""
    try:
        if setting.form is SIZE and not (isinstance(text, str) and INT.fullmatch(text)):
            from configs.image_size import to_image_size

            value = to_image_size(text)
        elif setting.is_list:
            value = tuple(_convert_one(setting, member) for member in _split_list(text))
        else:
            value = _convert_one(setting, text)
        if setting.form and value is not None and not setting.form.fits(value):
            raise ValueError("the value does not have the required form")
        return value
    except (ValueError, KeyError):
        known = setting.special or (setting.choices if setting.kind is str else ())
        near = did_you_mean(text, known) if isinstance(text, str) else ""
        near = "; PRECISION.DTYPE sets its type" if setting.key == "AMP" else near
        raise ConfigError(
            f"{origin}: {setting.key} is {quoted(text)}; it must be {describe_allowed(setting)}{near}"
        ) from None


def _split_list(text: Text) -> list:
    """Return a YAML list unchanged; split `(0.9, 0.999)`, `[a, b]` and `a, b` at the commas."""
    if isinstance(text, list):
        return text
    if is_none(text):
        return []
    text = text.strip()
    if text[0] + text[-1] in ("()", "[]"):
        text = text[1:-1]
    members = [member.strip().strip("'\"") for member in text.split(",")]
    return members[:-1] if members[-1] == "" else members  # nothing follows the last comma of (0.9,)


def _convert_one(setting: Setting, text: Text) -> Any:
    is_open = setting.kind is Arguments
    if is_open and is_none(text):
        return Arguments()
    if not isinstance(text, str) or is_open:
        raise ValueError("this setting accepts no list, or only a section")
    if is_none(text):
        if "none" in (*setting.choices, *setting.special):
            return "none"
        is_blank = text.isspace() and setting.optional and setting.kind is str  # spaces can separate labels
        if (setting.optional or setting.kind is str) and not (setting.is_list or is_blank):
            return None if setting.optional else ""
    return _convert_word(setting, text)


def _convert_word(setting: Setting, text: str) -> Any:
    """Convert a string that does not mean "not set"."""
    word = text.strip().lower()
    if word in setting.special:
        return word
    if setting.choices:
        return {str(choice).lower(): choice for choice in setting.choices}[word]
    if setting.kind is bool:
        return BOOLS[word]
    if setting.kind is str:
        if "\0" in text:
            raise ValueError("paths and names must not contain a null character")
        return str(text)  # a plain str, not a subclass such as Quoted
    if not (INT if setting.kind is int else FLOAT).fullmatch(word):
        raise ValueError("not a number")
    value = setting.kind(word)
    low, high = setting.bounds
    if not low <= value <= high:
        raise ValueError("out of bounds")
    return value


def to_text(value: Any) -> str:
    """Return a value as YAML that `convert` and open sections read back. Other YAML readers give it the same type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_text(member) for member in value)}]"
    if isinstance(value, float):
        digits = repr(value)
        return digits if "." in digits else digits.replace("e", ".0e")  # PyYAML reads 1e-06 as text
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and not FLOAT.fullmatch(value) and value.lower() not in (*BOOLS, *_NONE_WORDS, "y", "n"):
        return value
    return yaml.dump(value, default_style='"', allow_unicode=True, width=math.inf).removesuffix("\n")


def describe_allowed(setting: Setting) -> str:
    """Return a description of the allowed values: the end of a sentence that starts with `it must be`."""
    if setting.form:
        of_each = ", each" if setting.is_list and setting.bounds else ""
        return f"{setting.form.requirement}{of_each}{describe_bounds(setting)}"
    empty = ["None"] if setting.optional else []
    if setting.choices:
        choices = [*map(str, setting.choices), *empty]
        return ", ".join(choices[:-1]) + " or " + choices[-1]
    one, several = {
        int: ("a whole number", "a list of whole numbers"),
        float: ("a number", "a list of numbers"),
        bool: ("true or false", ""),
        str: ("text", "a list of texts"),
        Arguments: (f"a section of arguments, as in {setting.key}.NAME=VALUE, or null for none", ""),
    }[setting.kind]
    others = "".join(f", or {word}" for word in (*setting.special, *empty))
    return (several if setting.is_list else one) + describe_bounds(setting) + others


def describe_bounds(setting: Setting) -> str:
    """Return text such as ' from 0 to 1', or '' if there are no bounds."""
    if setting.bounds is None:
        return ""
    low, high = setting.bounds
    return f" from {low:,.10g} to {'2**63 - 1' if high == MAX_INT else f'{high:,.10g}'}"


def quoted(text: Text) -> str:
    """Return a string, or a list of strings, in quotes for an error message."""
    return repr(text) if isinstance(text, str) else f"[{', '.join(quoted(member).strip(chr(39)) for member in text)}]"
