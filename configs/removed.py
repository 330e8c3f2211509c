"""Settings and flags that a release removed, each with a remedy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.errors import ConfigError

ROLES = ("data", "model", "recipe", "machine", "record")  # see schema.py
DECISIVE_ROLES = ROLES[:3]  # roles of settings that affect the result of a run


class Removed(NamedTuple):
    """A setting that a release removed."""

    default: str  # its default, as YAML text: every run now behaves that way
    remedy: str  # what to do if the setting has any other value, as the end of a sentence
    role: str = "recipe"


REMOVED: dict[str, Removed] = {  # {full key: the removed setting}
    "PRECISION.EXPLAIN": Removed("false", "see the types of each module with scripts/doctor.py", "record"),
}
REMOVED_FLAGS: dict[str, str] = {  # {flag: what to do instead}
    "-explain_precision": "see the types of each module with scripts/doctor.py",
    "-part_size": "embed.py writes one file, which -output names",
    "-undo": "-apply moves no file any more, so there is nothing to undo; for corrections that release 1.1.0 applied, use "
    "that release",
    "-yes": "-apply changes no file of the data, so it does not ask; leave the flag out",
}


def check_removed(texts: Mapping[str, Any], origin: str, roles: tuple[str, ...] = ROLES) -> None:
    """Raise ConfigError for removed settings of these roles, unless they have their defaults.

    `texts`: {full key: text of a settings file, or a value that a run saved}.
    """
    for key in REMOVED.keys() & texts.keys():
        if REMOVED[key].role in roles and not _has_default(key, texts[key]):
            raise ConfigError(
                f"{origin}: {key} is {texts[key]!r}, but halfstep has no such setting; {REMOVED[key].remedy}, and "
                "remove this setting"
            )


def decisive_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return {key: value} of a run's removed settings that affected its result."""
    return {
        key: saved[key]
        for key in sorted(REMOVED.keys() & saved.keys())
        if REMOVED[key].role in DECISIVE_ROLES and not _has_default(key, saved[key])
    }


def _has_default(key: str, value: Any) -> bool:
    """Return whether a text or saved value means the default: 1 the same as 1.0, None as null."""
    one, other = plain_word(value), plain_word(REMOVED[key].default)
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def plain_word(value: Any) -> str:
    """Return none, true or false for all their spellings in YAML and Python; return other values in lower case."""
    word = "" if value is None else str(value).strip().lower()
    words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return words.get(word, word)
