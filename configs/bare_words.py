"""Words of a command line that follow no flag: the photos in `halfstep train photos`."""

import argparse
import os
from collections.abc import Mapping, Sequence

from configs.schema import AUTO
from configs.values import ALL_SETTINGS, BOOLS
from utils.errors import ConfigError
from utils.text import is_url

PHOTOS = "DATA.DATA_PATH"
BEFORE_PHOTOS = ("CHECK", "EVAL")  # switches that a command puts before its words: halfstep check photos


def with_photos(known: argparse.Namespace, rest: Sequence[str], switches: Mapping[str, str]) -> argparse.Namespace:
    """Return the parsed flags, with the word that follows no flag as DATA.DATA_PATH.

    argparse gives the word after `-amp` or `-opts KEY=VALUE` to these flags, so photos are looked for there too.
    `switches`: {setting: its flag} of the flags whose value is optional.
    """
    values, words = {**vars(known)}, [*rest]
    for key in switches:
        text = values[key]
        if text is not None and not is_value_of(key, text):
            words.append(text)
            values[key] = "true"
    photos = [option for option in known.opts if "=" not in option and is_place(option)]
    if len(photos) < len(known.opts):
        values["opts"] = [option for option in known.opts if option not in photos]
        words += photos
    if words:
        values[PHOTOS] = the_photos(words, values[PHOTOS])
    return argparse.Namespace(**values)


def is_value_of(key: str, text: str) -> bool:
    """Return whether a word after a switch is its value. If not, it names the photos."""
    if text.lower() in (*BOOLS, AUTO, *map(str, ALL_SETTINGS[key].choices)):
        return True
    return key not in BEFORE_PHOTOS and not is_place(text)


def is_place(word: str) -> bool:
    return is_url(word) or os.path.exists(os.path.expanduser(word))


def the_photos(words: Sequence[str], typed: str | None) -> str:
    """Return the only word, which names the photos. Raise ConfigError if it is something else, or if there are more."""
    word = words[0]
    is_setting = "=" in word or word.endswith((".yaml", ".yml"))
    if len(words) > 1 or (is_setting and not os.path.isdir(word)):
        raise ConfigError(
            f"{word!r} on the command line does not belong to a flag; only one word may stand alone, the folder of the "
            "photos, as in halfstep train photos; write settings after -opts, give a settings file with -cfg, and "
            "quote a value that has spaces; -h lists the flags"
        )
    if typed is not None:
        raise ConfigError(
            f"DATA.DATA_PATH: both {word!r} and -data_path {typed!r} name photos; leave one of them out, and quote a "
            "value that has spaces; -h lists the flags"
        )
    return word
