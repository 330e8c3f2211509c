"""Reads open sections such as MODEL.KWARGS: arguments of other libraries' constructors, without a schema."""

import math
import re
from typing import Any

from configs.schema import Arguments
from configs.values import FLOAT, INT, Text, quoted
from configs.yaml_files import Quoted, compose, read_node
from utils.errors import ConfigError

BRACKETS = re.compile(r"""("[^"]*"|'[^']*')|[()]""")  # a quoted string, or a parenthesis outside quotes


def add_argument(arguments: Arguments, section: str, key: str, text: Text, origin: str) -> Arguments:
    """Return an open section's arguments with one argument added or replaced. `key`: the full name of this argument."""
    name = key.removeprefix(f"{section}.")
    if not name.isidentifier():
        raise ConfigError(
            f"{origin}: {key} is not allowed; an argument's name must be an identifier without dots, and its value "
            "must be one value or a list of values"
        )
    try:
        return Arguments({**arguments, name: _argument(text)})
    except (ValueError, ConfigError):
        raise ConfigError(
            f"{origin}: {key} is {quoted(text)}; it must be a number, true, false, null, text, or a list of these"
        ) from None


def _to_bracket(match: re.Match) -> str:
    """Return the bracket for a parenthesis, and a quoted string unchanged."""
    return {"(": "[", ")": "]"}.get(match[0], match[0])


def _argument(text: Text, level: int = 0) -> Any:
    """Parse a value by the rules of YAML 1.2, without a schema; also accept Python's None, True and tuples."""
    if isinstance(text, list):
        return tuple(_argument(each, level + 1) for each in text)
    if isinstance(text, Quoted):
        return str(text)
    stripped = text.strip()
    if stripped.startswith("[") or stripped[:1] + stripped[-1:] == "()":
        stripped = BRACKETS.sub(_to_bracket, stripped)
    elif level and stripped.count("(") != stripped.count(")"):  # YAML has split a tuple at its commas
        raise ValueError("write nested lists with brackets, such as [[1, 2], [3, 4]]")
    if stripped[:1] in ("[", "{", "'", '"'):  # only from -opts: in a file, YAML has already parsed lists and quotes
        return _argument(read_node(compose(stripped, "a value")), level + 1)
    return _plain(stripped)


def _plain(text: str) -> Any:
    """Parse a value that has no quotes or brackets."""
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
