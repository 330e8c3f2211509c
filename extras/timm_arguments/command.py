"""Reads a command of timm's train.py: its launcher, its arguments with their types, and an args.yaml."""

import argparse
import ast
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from configs.timm_arguments import TIMM_ARGUMENTS, Argument
from configs.values import BOOLS, FLOAT, INT, Text
from configs.yaml_files import Quoted, read_file
from scripts.command_line import Parser
from utils.errors import ConfigError, did_you_mean

KWARGS = ("model-kwargs", "opt-kwargs", "pretrained-cfg-overlay")  # their values have the form NAME=VALUE
# Arguments without a default that must not be empty. For the others, an empty value means "not set".
NEVER_EMPTY = ("gp", "input-img-mode", "kd-model-name")
# Arguments with a default that may be empty. For the others, an empty value is a mistake.
MAY_BE_EMPTY = ("train-split", "val-split", "train-interpolation", "dist-bn", "worker-seeding")
SCRIPTS = ("train.py", "distributed_train.sh")
COUNTS = ("--nnodes", "--nproc-per-node")  # options of torchrun for the number of nodes and of processes


class Launch(NamedTuple):
    """The processes that a command starts, and how it starts them."""

    nodes: int = 1
    per_node: int = 1
    words: tuple[str, ...] = ()  # the launcher with its options, before train.py
    variables: tuple[str, ...] = ()  # environment variables (NAME=VALUE) in front of the command

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node

    def command(self, arguments: Sequence[str]) -> str:
        """Return the halfstep command with the same number of processes. On several nodes it uses the same launcher."""
        words = list(self.words) if self.nodes > 1 else ["python"]
        words.append("main_multi_gpu.py" if self.processes > 1 else "main_single_gpu.py")
        count = ["-ngpus", str(self.processes)] if self.nodes == 1 < self.processes else []
        variables = [
            f"{name}={shlex.quote(value)}" for name, _, value in (each.partition("=") for each in self.variables)
        ]
        return " ".join([*variables, shlex.join([*words, *arguments, *count])])


def read_arguments(words: list[str], description: str = "") -> tuple[dict[str, Any], Launch]:
    """Return {name without dashes: value} for the arguments that differ from their defaults, and the launch.

    `description`: the text for -h.
    """
    launch, words = read_launch(words)
    typed = vars(_parser(description).parse_args(words))
    data = typed.get("data") or ""
    if data.endswith((".yaml", ".yml")) and "config" not in typed:
        typed["config"] = typed.pop("data")
    elif _is_command(data) or data.endswith((".py", ".sh")) or _is_launcher(data):
        raise ConfigError(
            f"{data!r} is where train.py expects its data folder; type the whole command, starting with python "
            "or torchrun, without quotes around it"
        )
    given = _of_file(typed.pop("config")) if "config" in typed else {}
    given |= {_name(key): _typed(_name(key), value) for key, value in typed.items()}
    changed = {name: value for name, value in given.items() if value not in (None, {}, TIMM_ARGUMENTS[name].default)}
    return changed, launch


def read_launch(words: list[str]) -> tuple[Launch, list[str]]:
    """Return the launch of a command, and its arguments for train.py."""
    place = next((place for place, word in enumerate(words) if word.endswith(SCRIPTS)), None)
    if place is None:
        return Launch(), words
    script, rest = words[place], words[place + 1 :]
    variables = list(takewhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), words[:place]))
    launcher = words[len(variables) : place]
    if _is_command(script):
        raise ConfigError(f"{script!r} is a command in quotes; leave out the quotes")
    if launcher and not _is_launcher(launcher[0]):
        raise ConfigError(
            f"{launcher[0]}: the number of processes that it starts is unknown; replace it with torchrun --nnodes "
            "NODES --nproc_per_node PROCESSES, or with python for one process"
        )
    nodes, per_node = (_count(launcher, option) for option in COUNTS)
    world_size = next((each for each in variables if each.startswith("WORLD_SIZE=")), "WORLD_SIZE=1")
    if nodes * per_node == 1 and world_size != "WORLD_SIZE=1":
        raise ConfigError(
            f"{world_size} makes train.py one of several processes; halfstep starts these with torchrun, so replace "
            "the variables with torchrun --nnodes NODES --nproc_per_node PROCESSES"
        )
    if script.endswith(".sh"):
        if not rest or not rest[0].isdecimal():
            raise ConfigError(f"{script}: its first argument must be the number of processes, such as {script} 4")
        per_node, rest = int(rest[0]), rest[1:]
    return Launch(nodes, per_node, tuple(launcher), tuple(variables)), rest


def _count(launcher: list[str], option: str) -> int:
    """Return the number after the last occurrence of a torchrun option. The option may be abbreviated."""
    number = 1
    for word, following in zip_longest(launcher, launcher[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        name, value = name.replace("_", "-"), value if equals else following
        if len(name) < len("--nn") or not option.startswith(name):
            continue
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(
                f"{word.partition('=')[0]} is {value!r}; it must be a number, because learning rates depend on it"
            )
        number = int(value)
    return number


def _is_launcher(word: str) -> bool:
    name = Path(word).name
    return name in ("torchrun", "bash", "sh") or re.fullmatch(r"python[\d.]*", name) is not None


def _is_command(word: str) -> bool:
    """Return whether a word is a command that was typed in quotes."""
    pieces = word.split()
    starts = bool(pieces) and (_is_launcher(pieces[0]) or pieces[0].endswith(SCRIPTS))
    return len(pieces) > 1 and (starts or any(re.match("--?[A-Za-z]", piece) for piece in pieces))


def _is_argument(word: str) -> bool:
    """Return whether a word is an argument of train.py, with or without =VALUE."""
    return word.startswith("--") and _name(word[2:].partition("=")[0]) in TIMM_ARGUMENTS


def _parser(description: str) -> Parser:
    """Return a parser for the arguments of train.py. It leaves their values as text."""
    parser = Parser(description, usage="from_timm.py ARGUMENT ... | ARGS.YAML", argument_default=argparse.SUPPRESS)
    parser.allow_abbrev = True  # because train.py allows abbreviations
    parser.add_argument("-c", "--config", metavar="FILE", help="an args.yaml; other arguments override it")
    for name, argument in TIMM_ARGUMENTS.items():
        options = [f"--{name}", *(dash + argument.short for dash in ("-", "--") if argument.short)]
        kind: dict[str, Any] = {"nargs": "*" if name in KWARGS else "+"} if argument.is_list else {}
        if argument.kind is bool:
            kind = {"action": "store_true"}
        elif name in ("data", "torchcompile"):
            kind = {"nargs": "?", "const": "inductor"}
        parser.add_argument(*(["data"] if name == "data" else options), help=argparse.SUPPRESS, **kind)
    return parser


def _of_file(path: str) -> dict[str, Any]:
    """Return the arguments in an args.yaml."""
    found: dict[str, Any] = {}
    for key, text in read_file(path).items():
        name, _, member = key.partition(".")  # model_kwargs, for example, is a section
        name = _name(name)
        if name not in TIMM_ARGUMENTS:
            raise ConfigError(f"{path}: train.py has no argument {key}{did_you_mean(name, TIMM_ARGUMENTS)}")
        is_null = not isinstance(text, Quoted) and text in ("", "~", "null", "Null", "NULL")
        if member and name in KWARGS:
            found[name] = found.get(name, {}) | {member: text}
        elif not (is_null or (name in KWARGS and text == "{}")):
            found[name] = _typed(name, text)
    return found


def _name(key: str) -> str:
    return key if key in TIMM_ARGUMENTS else key.replace("_", "-")


def _typed(name: str, given: Any) -> Any:
    """Return the value of an argument, converted from one or more strings."""
    argument = TIMM_ARGUMENTS[name]
    if name in KWARGS:
        return _pairs(name, given)
    if argument.is_list:
        return [_convert(name, argument, each) for each in (given if isinstance(given, list) else [given])]
    return _convert(name, argument, given)


def _convert(name: str, argument: Argument, text: Any) -> Any:
    if text is None or isinstance(text, bool):  # None: a missing positional argument; bool: a switch
        return text
    if isinstance(text, list):
        raise ConfigError(f"--{name} is {text}; it must be one value")
    if argument.kind is str:
        return _checked(name, argument, text)
    if argument.kind is bool:
        if text.lower() not in BOOLS:
            raise ConfigError(f"--{name} is {str(text)!r}; it must be true or false")
        return BOOLS[text.lower()]
    number = float(text) if FLOAT.fullmatch(text) else None
    if number is None or (argument.kind is int and not number.is_integer()):
        raise ConfigError(f"--{name} is {str(text)!r}; it must be a {'whole ' * (argument.kind is int)}number")
    if INT.fullmatch(text):  # int is exact even for a large seed
        return int(text)
    return int(number) if number.is_integer() else number


def _checked(name: str, argument: Argument, text: str) -> str | None:
    """Return the text unchanged, even if it is 007, on or null. Return None if an empty string means "not set"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--{name} is {text!r}; it must be UTF-8 text") from None
    if inside := next(filter(_is_argument, text.split()[1:]), None):
        raise ConfigError(f"--{name} is {text!r}, which contains the argument {inside}; close the quotes before it")
    if text or argument.is_list or name in MAY_BE_EMPTY:
        return text
    if argument.default is None and name not in NEVER_EMPTY:
        return None
    raise ConfigError(f"--{name} is empty; give it a value, or leave it out")


def _pairs(name: str, words: list[str]) -> dict[str, Text]:
    """Return {name: text} for words NAME=VALUE. A value is a Python literal as in train.py, or otherwise text."""
    pairs: dict[str, Text] = {}
    for key, equals, text in (word.partition("=") for word in words if word):
        if not equals:
            raise ConfigError(f"--{name}: {key!r} has no =; write NAME=VALUE")
        try:
            pairs[key] = _as_text(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            pairs[key] = Quoted(text)
        except TypeError:
            raise ConfigError(
                f"--{name}: {key} is {text}; it must be a number, True, False, None, text, or a list of these"
            ) from None
    return pairs


def _as_text(value: Any) -> Text:
    """Return the text that a settings file contains for a Python value."""
    if isinstance(value, list | tuple):
        return [_as_text(each) for each in value]
    if isinstance(value, str):
        return Quoted(value)
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    raise TypeError(type(value))
