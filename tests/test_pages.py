"""Sentences of the pages agree with the code: commands, flags, settings, tables, and what halfstep cannot do."""

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from configs.flags import parse
from configs.load import load, merge
from configs.yaml_files import find_settings_file, read_layers, shipped_files
from scripts import sweep
from tests.support.pages import COMMANDS, FILES, PAGES, ROOT, Command, commands_of, scripts
from utils.errors import ConfigError

RUN = "output/train-20260102-03-04-05"
MAIN = ("main_single_gpu.py", "main_multi_gpu.py")
SHIPPED = {name for path in shipped_files() for name in (path.stem, path.name, str(path.relative_to(ROOT)))}


class Parsed(Exception):
    """Ends a script after its parser has accepted the words."""


def filled(words: list[str]) -> list[str]:
    """Return the words of a command with values for its placeholders (tests/support/pages.py)."""
    words = ["vit_digits" if before == "-cfg" and word == "..." else word for before, word in zip(["", *words], words)]
    words = [word for word in words if not re.fullmatch(r"\[?\.\.\.\]?|KEY=VALUES?|.*(?:\[@\]|\$@).*", word)]
    words = [re.sub(r"^([\w.]+=)?(\[?[A-Z]\]?|\$\{?\w+\}?)$", r"\g<1>2", word) for word in words]
    return [RUN if word == "latest" else word for word in words]


def check_settings(words: list[str], is_whole: bool) -> None:
    """Load the settings of a run, except those of files and weights that only the reader has."""
    line = parse(filled(words))
    typed = {key for layer in line.layers for key in layer.texts}
    cfg = line.cfg if line.cfg in SHIPPED else None
    is_tuned = "MODEL.PRETRAINED" in typed and not {"EVAL", "MODEL.RESUME"} & typed
    names_file = line.cfg or {"MODEL.RESUME", "MODEL.PRETRAINED"} & typed
    assert names_file or not is_whole or filled(words) != words, "-cfg is missing"
    files = read_layers(find_settings_file(cfg or "finetune")) if cfg or (is_tuned and not line.cfg) else []
    load(line._replace(cfg=None), needs_file=False, beneath=files)


@contextlib.contextmanager
def stopped_after_parsing(is_part: bool) -> Iterator[None]:
    """Make each parser raise Parsed instead of returning. `is_part`: required arguments may be left out."""
    depth, known = [0], argparse.ArgumentParser.parse_known_args

    def parse_known(parser, args=None, namespace=None):
        for action in parser._actions if is_part else []:
            action.required = False
            action.nargs = "*" if action.nargs in (None, 2) and action.option_strings else action.nargs
        depth[0] += 1
        found = known(parser, args, namespace)
        depth[0] -= 1
        if depth[0]:
            return found
        raise Parsed(*found)

    def parse_all(parser, args=None, namespace=None):
        depth[0] += 1
        try:
            found, rest = parser.parse_known_args(args, namespace)
            if rest:
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
        finally:
            depth[0] = 0
        raise Parsed(found, [])

    with patch.multiple(argparse.ArgumentParser, parse_known_args=parse_known, parse_args=parse_all):
        yield


def check_script(program: str, words: list[str], is_part: bool) -> None:
    """Parse the words with the parser of a script, and settings among them with the parser of the settings."""
    module, words = importlib.import_module(program.removesuffix(".py").replace("/", ".")), filled(words)
    if program == "scripts/sweep.py":
        of_runs = sweep.parse(words)[1]
        check_settings(of_runs, is_whole=False)
    try:
        with stopped_after_parsing(is_part), patch.object(sys, "argv", [program, *words]):
            module.main(*[words] * module.main.__code__.co_argcount)
    except Parsed as parsed:
        found, rest = parsed.args
    if getattr(found, "opts", None) and program != "scripts/from_timm.py":
        merge(parse(["-opts", *found.opts]).layers)
    if rest:
        check_settings(rest, is_whole=False)


def check(command: Command) -> None:
    program, words = command.program, command.words
    if program.startswith("halfstep "):
        name = program.split()[1]
        assert name in COMMANDS, f"there is no command {program}"
        program = COMMANDS[name]
        if name in ("resume", "evaluate") and words and not words[0].startswith("-"):
            words = {"resume": ["-resume"], "evaluate": ["-eval", "-pretrained"]}[name] + words
        elif name == "resume":
            words = ["-resume", "auto", *words]
    if program in MAIN:
        if not {"-h", "-version"} & {*words}:
            check_settings(words, is_whole=bool(words) and not command.is_part)
    elif program in scripts().values() and words:
        check_script(program, words, command.is_part)


@pytest.mark.parametrize("page", [*PAGES, *FILES])
def test_commands_of_a_page_are_accepted_by_the_real_parsers(page):
    wrong = []
    for command in commands_of(page):
        try:
            check(command)
        except (ConfigError, AssertionError) as error:
            wrong.append(f"{command.text}\n      {error}")
    assert not wrong, "\n".join(wrong)
