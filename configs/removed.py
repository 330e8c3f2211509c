"""Settings, values and flags that a release removed, each with a remedy.

PaddleViT's settings without a counterpart (extras/paddlevit/settings.py) use the same type of row.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from utils.errors import ConfigError

Texts = Mapping[str, Any]  # {full key: text of a settings file, or a value that a run saved}
ROLES = ("data", "model", "recipe", "machine", "record")  # see schema.py
DECISIVE_ROLES = ROLES[:3]  # roles of settings that affect the result of a run


class Removed(NamedTuple):
    """A setting that halfstep no longer has, or never had."""

    accepted: tuple[str, ...]  # values, as YAML text, that are still accepted because every run now behaves that way
    remedy: str  # what to do if the setting has any other value, as the end of a sentence
    role: str = "recipe"
    # Takes all settings of the file. Returns the equivalent current settings, or None if there are none.
    replace: Callable[[Texts], dict[str, Any] | None] | None = None


REMOVED: dict[str, Removed] = {  # {full key: the removed setting}
    "PRECISION.EXPLAIN": Removed(("false",), "see the types of each module with scripts/doctor.py", "record"),
}
REMOVED_VALUES: dict[tuple[str, str], str] = {}  # {(full key, value): what to set instead}
REMOVED_FLAGS: dict[str, str] = {  # {flag: what to do instead}
    "-explain_precision": "see the types of each module with scripts/doctor.py",
    "-part_size": "embed.py writes one file, which -output names",
}


def translate_removed(
    texts: Texts, context: Texts, origin: str, roles: tuple[str, ...] = ROLES, removed: Mapping[str, Removed] = REMOVED
) -> dict[str, Any]:
    """Return replacements for the removed settings in `texts`. Raise ConfigError for a setting without a replacement.

    `context`: `texts` and the texts of earlier layers, because one setting may replace several settings.
    `roles`: without a replacement, settings of these roles are refused, and settings of other roles are dropped.
    """
    translated: dict[str, Any] = {}
    for key in filter(texts.__contains__, removed):  # in the order of `removed`, whatever the order of the file
        replacement = _replacement(removed[key], key, context)
        if replacement is None and removed[key].role in roles:
            end = "leave it out" if origin.startswith(("-opts", "flag ")) else "remove this line"
            raise ConfigError(
                f"{origin}: {key} is {context[key]!r}, but halfstep has no such setting; {removed[key].remedy}, and {end}"
            )
        translated |= replacement or {}
    return translated


def not_translated(saved: Texts) -> dict[str, Any]:
    """Return {key: value} of a run's removed settings that affected its result and have no replacement."""
    return {
        key: saved[key]
        for key in sorted(REMOVED.keys() & saved.keys())
        if REMOVED[key].role in DECISIVE_ROLES and _replacement(REMOVED[key], key, saved) is None
    }


def _replacement(removed: Removed, key: str, context: Texts) -> dict[str, Any] | None:
    """Return the replacement for a removed setting: {} if none is needed, None if there is none."""
    if any(_is_same(context[key], each) for each in removed.accepted):
        return {}
    return removed.replace(context) if removed.replace else None


def _is_same(value: Any, accepted: str) -> bool:
    """Return whether a text or saved value means the same as the accepted text: 1 the same as 1.0, None as null."""
    one, other = plain_word(value), plain_word(accepted)
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def plain_word(value: Any) -> str:
    """Return none, true or false for all their spellings in YAML and Python; return other values in lower case."""
    word = "" if value is None else str(value).strip().lower()
    words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return words.get(word, word)
