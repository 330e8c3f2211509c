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
    "DATA.CHANNEL_FILES": Removed(
        "none", "3.0.0 took it out: write the channels of each image into one file, TIFF or .npy"
    ),
    "PRECISION.EXPLAIN": Removed("false", "see the types of each module with scripts/doctor.py"),
    "STRANGERS": Removed(None),  # every run with CALIBRATE now has statistics for -unknown
}
REMOVED_FLAGS: dict[str, str] = {  # {flag: what to do instead}
    "-explain_precision": "see the types of each module with scripts/doctor.py",
    "-part_size": "embed.py writes one file, which -output names",
    "-undo": "-apply moves no file any more, so there is nothing to undo; for corrections that release 1.1.0 applied, use "
    "that release",
    "-yes": "-apply changes no file of the data, so it does not ask; leave the flag out",
}


def check_removed(texts: Mapping[str, Any], origin: str) -> None:
    """Raise ConfigError for removed settings, unless they have their defaults. `texts`: {full key: text}."""
    for key in REMOVED.keys() & texts.keys():
        if REMOVED[key].default not in (None, plain_word(texts[key])):
            raise ConfigError(
                f"{origin}: {key} is {texts[key]!r}, but halfstep has no such setting; {REMOVED[key].remedy}, and "
                "remove this setting"
            )


def plain_word(value: Any) -> str:
    """Return none, true or false for all their spellings in YAML and Python; return other values in lower case."""
    word = "" if value is None else str(value).strip().lower()
    words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return words.get(word, word)
