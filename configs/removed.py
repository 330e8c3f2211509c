"""Settings and flags that a release removed, each with a remedy."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.errors import ConfigError


class Removed(NamedTuple):
    """A setting that a release removed."""

    # Its default, as `plain_word` returns it: every run now behaves that way. None: any value loads.
    default: str | None
    remedy: str = ""  # what to do if the setting has any other value, as the end of a sentence


# {full key: the removed setting}. None of them affected the result of a run, so runs that have them can be resumed.
REMOVED: dict[str, Removed] = {
    "PRECISION.EXPLAIN": Removed("false", "see the types of each module with scripts/doctor.py"),
    "STRANGERS": Removed(None),  # every run with CALIBRATE now has statistics for -unknown
}
# {setting: {value that a release removed: what the value was, the release, and what to do instead}}
REMOVED_VALUES: dict[str, dict[str, str]] = {
    "DATA.DATASET": {
        "fractals": "a data set that 3.0.0 took out; fine-tune weights from ImageNet instead, such as -pretrained "
        "tf_efficientnet_lite0, which comes with halfstep",
    },
}
REMOVED_FLAGS: dict[str, str] = {  # {flag: what to do instead}
    "-explain_precision": "see the types of each module with scripts/doctor.py",
    "-part_size": "embed.py writes one file, which -output names",
    "-undo": "-apply moves no file any more, so there is nothing to undo; for corrections that release 1.1.0 applied, use "
    "that release",
    "-yes": "-apply changes no file of the data, so it does not ask; leave the flag out",
}


def check_removed(texts: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError for removed values, and for removed settings that do not have their defaults.

    `texts`: {full key: text}.
    """
    for key in REMOVED_VALUES.keys() & texts.keys():
        if reason := REMOVED_VALUES[key].get(plain_word(texts[key])):
            raise ConfigError(f"{origin}: {key} is {texts[key]!r}, {reason}")
    for key in REMOVED.keys() & texts.keys():
        if REMOVED[key].default not in (None, plain_word(texts[key])):
            raise ConfigError(
                f"{origin}: {key} is {texts[key]!r}, but halfstep has no such setting; {REMOVED[key].remedy}, and "
                "remove this setting"
            )


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings without those that a release removed, or whose value it removed."""
    return {
        key: value
        for key, value in saved.items()
        if key not in REMOVED and str(value) not in REMOVED_VALUES.get(key, ())
    }


def plain_word(value: Any) -> str:
    """Return none, true or false for all their spellings in YAML and Python; return other values in lower case."""
    word = "" if value is None else str(value).strip().lower()
    words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return words.get(word, word)
