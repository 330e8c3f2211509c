"""Open sections: arguments of constructors that are not ours (MODEL.KWARGS), whose types no schema knows."""

import math
import re
from typing import Any

from configs.schema import Arguments
from configs.values import FLOAT, INT, Text, quoted
from configs.yaml_files import Quoted, compose, read_node
from utils.errors import ConfigError

BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|[()]""")  # of tuples, outside of quoted texts


def add_argument(arguments: Arguments, section: str, key: str, text: Text, origin: str) -> Arguments:
    """The arguments of an open section with one more, or another value for one of them. `key`: its full name."""
    name = key.removeprefix(f"{section}.")
    if not name.isidentifier():
        raise ConfigError(f"{origin}: {key}: an argument has a plain name, and one value or a list of values")
    try:
        return Arguments({**arguments, name: _argument(text)})
    except (ValueError, ConfigError):
        raise ConfigError(
            f"{origin}: {key} is {quoted(text)}; it must be a number, true, false, null, text, or a list of these"
        ) from None


def _argument(text: Text, level: int = 0) -> Any:
    """The value of a text whose type no schema knows, by the rules of YAML 1.2; Python's None, True and tuples too."""
    if isinstance(text, list):
        return tuple(_argument(each, level + 1) for each in text)
    if isinstance(text, Quoted):
        return str(text)
    stripped = text.strip()
    if stripped.startswith("[") or stripped[:1] + stripped[-1:] == "()":
        stripped = BRACKETS.sub(lambda found: found[1] or "[]"[found[0] == ")"], stripped)
    elif level and stripped.count("(") != stripped.count(")"):  # YAML has divided a tuple at its commas
        raise ValueError("lists in a list are written [[1, 2], [3, 4]]")
    if stripped[:1] in ("[", "{", "'", '"'):  # typed behind -opts; in a file these are lists and quoted texts already
        return _argument(read_node(compose(stripped, "a value")), level + 1)
    return _plain(stripped)


def _plain(text: str) -> Any:
    """The value of a text without quotes and brackets."""
    if text in ("", "~", "null", "Null", "NULL", "None"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INT.fullmatch(text):
        return int(text)
    if not FLOAT.fullmatch(text):
        return text
    if math.isinf(float(text)):
        raise ValueError("out of bounds")
    return float(text)
