"""Writes the tables of scripts/completions/words from the parsers:  python scripts/maintenance/make_completion.py"""

import argparse
import importlib
import re
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.program import exit_code  # isort: skip
from configs.flags import FLAGS, build_parser
from configs.schema import Arguments
from configs.tables import SOURCES
from configs.values import ALL_SETTINGS
from configs.yaml_files import shipped_files
from halfstep.__main__ import COMMANDS, TRAIN
from scripts.command_line import Parser
from scripts.completion import SHELLS, WORDS
from scripts.models import FIRST
from utils.commands import HALFSTEP

PLACE = re.compile(r"(?<=make_completion\.py\n).*?(?=# end\n)", re.DOTALL)
OTHER_NAMES = {"-help", "--help", "--local-rank", "--local_rank"}  # aliases of -h, and a flag of torch's launcher


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    WORDS.write_text(with_tables(WORDS.read_text()))
    return 0


def with_tables(text: str) -> str:
    """Return the text of the file with the tables of the present parsers and settings."""
    tables = {
        "all commands": [*COMMANDS, "-h", "-version"],
        "all settings": [key + ("." if row.kind is Arguments else "=") for key, row in ALL_SETTINGS.items()],
        "all settings files": sorted(path.stem for path in shipped_files()),
        "all weights": [*(f"weights/{path.name}" for path in HALFSTEP.glob("weights/*.safetensors")), *FIRST],
        "completion": SHELLS,
    }
    tables |= {f"flags of {command}": flags_of(command) for command in COMMANDS} | values_of_settings()
    lines = [f'    {quoted(name)}) printf "%s\\n" {" ".join(words)} ;;\n' for name, words in tables.items() if words]
    return PLACE.sub(lambda _: "".join(lines), text)


def quoted(name: str) -> str:
    return f'"{name}"' if " " in name else name


class Built(Exception):
    """Has the parser of a script, before it parses anything."""


def parser_of(script: str) -> Parser:
    def stop(parser, *_):
        raise Built(parser)

    with patch.object(Parser, "parse_known_args", stop):  # every way of parsing starts there
        try:
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main([])
        except Built as built:
            return built.args[0]
    raise AssertionError(f"{script} has no parser")


def flags_of(command: str) -> list[str]:
    script, parsers = COMMANDS[command][0], [Parser()]
    if script != TRAIN and command != "from-timm":  # which has the many arguments of timm
        parsers.append(parser_of(script))
    if script == TRAIN or command == "sweep":  # which passes flags to its runs
        parsers.append(build_parser())
    flags = [flag for parser in parsers for flag in parser._option_string_actions if flag not in OTHER_NAMES]
    return [*dict.fromkeys([*flags, "-version"])]


def values_of_settings() -> dict[str, list[str]]:
    """Return {setting, after its flag: its possible values} for the settings that have a list of values."""
    flags = {key: flag for group in FLAGS.values() for flag, (key, _) in group.items()}
    values = {}
    for key, setting in ALL_SETTINGS.items():
        words = [*setting.choices, *setting.special]
        if setting.kind is bool:
            words = ["true", "false", *words]
        if key == "DATA.DATASET":
            words = [source.removesuffix("NAME") for source in SOURCES]
        values[f"{flags[key]}|{key}" if key in flags else key] = words
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
