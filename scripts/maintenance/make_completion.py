"""Writes the files of scripts/completions from the parsers:  python scripts/maintenance/make_completion.py"""

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
from scripts.models import FIRST
from utils.commands import HALFSTEP

FOLDER = HALFSTEP / "scripts/completions"
# Flags with two dashes, and other names of -h
OTHER_NAMES = {"-help", "--help", "--local-rank", "--local_rank"}
OF_RUNS = "resume|report|doctor|compare|export"  # commands whose arguments are runs
OF_WEIGHTS = "evaluate|predict|labels|embed"  # commands whose arguments are runs, weights or files

# A program for sh, with words in capitals for tables. Its arguments are the typed words, and it prints the words that can be the last one. It never evaluates
# a name, because files can have any name. It has no quote ' and no double backslash, so each shell can quote it.
WORDS = """\
runs() {
    printf "%s\\n" latest
    for file in output/*/status.json; do [ -e "$file" ] && printf "%s\\n" "${file%/*}"; done
}
files() {  # those that start with $1 and end with $2, and folders
    for file in "$1"*; do
        case $file in *[[:cntrl:]]*) continue ;; esac
        [ -d "$file" ] && [ ! -e "$file/status.json" ] && printf "%s/\\n" "$file" && continue
        case $file in *"$2") [ -e "$file" ] && printf "%s\\n" "$file" ;; esac
    done
}
flags() {  # of the command $1
    case $1 in
FLAGS
    from-timm|completion) ;;
    *) return ;;
    esac
    printf "%s\\n" -h -version
}
values() {  # of the flag, setting or command $1. $2: the value, as far as it is typed
    case $1 in
    -resume|MODEL.RESUME) runs; printf "%s\\n" auto ;;
    OF_RUNS) runs ;;
    -pretrained|MODEL.PRETRAINED|OF_WEIGHTS) files "$2" ""; runs; printf "%s\\n" WEIGHTS ;;
    -cfg) files "$2" .yaml; printf "%s\\n" FILES ;;
VALUES
    esac
}
candidates() {  # $1: the last word
    case $1 in -*) flags "$command"; return ;; esac
    case $flag in
    -opts|-over)
        case $1 in
        *=*) values "${1%%=*}" "${1#*=}" | while IFS= read -r line; do printf "%s\\n" "${1%%=*}=$line"; done ;;
        *) printf "%s\\n" SETTINGS ;;
        esac
        return ;;
    "$before") values "$flag" "$1"; return ;;
    esac
    values "$command" "$1" | grep . || flags "$command"
}
command=$1 flag=- before=
[ $# -gt 1 ] || command=
while [ $# -gt 1 ]; do
    case $1 in -*) flag=$1 ;; esac
    before=$1
    shift
done
word=$1
if [ -z "$command" ]; then printf "%s\\n" COMMANDS; else candidates "$word"; fi |
    while IFS= read -r line; do case $line in "$word"*) printf "%s\\n" "$line" ;; esac; done
"""
HEADER = "# Tab completes commands of halfstep. scripts/maintenance/make_completion.py writes this file.\n"
# {shell: its code}
CODE = {
    "bash": """\
_halfstep_words='PROGRAM'
_halfstep() {
    local line current=${COMP_WORDS[COMP_CWORD]} word=${COMP_LINE:0:COMP_POINT}
    word=${word##*[[:space:]]} COMPREPLY=()
    [[ $current == [=:] ]] && current=
    [[ $word == *"$current" ]] || return  # the word has quotes
    while IFS= read -r line; do
        [[ $line == *[/=.] ]] && compopt -o nospace 2> /dev/null
        printf -v line %q "${line#"${word%"$current"}"}"  # without the part before = or :, which bash keeps
        COMPREPLY+=("$line")
    done < <(sh -c "$_halfstep_words" halfstep "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2> /dev/null)
}
complete -o default -F _halfstep halfstep
""",
    "zsh": """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_halfstep_words='PROGRAM'
_halfstep() {
    local -a lines
    lines=("${(@f)$(sh -c "$_halfstep_words" halfstep "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    [[ -n $lines ]] || { _files; return }
    compadd -S '' -- ${(M)lines:#*[/=.]}
    compadd -- ${lines:#*[/=.]}
}
compdef _halfstep halfstep
""",
    "fish": """\
set -g __halfstep_words 'PROGRAM'
function __halfstep
    set -l typed (commandline -opc) (commandline -ct)
    set -g __halfstep_lines (sh -c $__halfstep_words halfstep $typed[2..-1] 2> /dev/null)
    test -n "$__halfstep_lines"
end
complete -c halfstep -n __halfstep -f -a '$__halfstep_lines'
""",
}


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    for shell in CODE:
        (FOLDER / f"halfstep.{shell}").write_text(content(shell), encoding="utf-8")
    return 0


def content(shell: str) -> str:
    """Return the content of the file for a shell."""
    return HEADER + CODE[shell].replace("PROGRAM", program())


def program() -> str:
    """Return WORDS with the words of the parsers and tables."""
    flags = {command: flags_of(command) for command in COMMANDS}
    values = values_of_settings() | {"completion": [*CODE]}
    shipped = [str(path.relative_to(HALFSTEP)) for path in HALFSTEP.glob("weights/*.safetensors")]
    settings = [key + ("." if setting.kind is Arguments else "=") for key, setting in ALL_SETTINGS.items()]
    parts = {
        "FLAGS": cases(flags),
        "VALUES": cases(values),
        "OF_RUNS": OF_RUNS,
        "OF_WEIGHTS": OF_WEIGHTS,
        "WEIGHTS": " ".join([*shipped, *FIRST]),
        "FILES": " ".join(sorted(path.stem for path in shipped_files())),
        "SETTINGS": " ".join(settings),
        "COMMANDS": " ".join([*COMMANDS, "-h", "-version"]),
    }
    return re.sub(r"\b(" + "|".join(parts) + r")\b", lambda name: parts[name[0]], WORDS)


def cases(table: dict[str, list[str]]) -> str:
    """Return the lines of a `case` of sh that print the words of a name."""
    lines = [f'    {name}) printf "%s\\n" {" ".join(words)} ;;' for name, words in table.items() if words]
    return "\n".join(lines)


class Built(Exception):
    """Has the parser of a script, before it parses anything."""


def parser_of(script: str) -> Parser:
    """Return the parser of a script. Every way of parsing begins with parse_known_args."""

    def stop(parser, *_):
        raise Built(parser)

    with patch.object(Parser, "parse_known_args", stop):
        try:
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main([])
        except Built as built:
            return built.args[0]
    raise AssertionError(f"{script} has no parser")


def flags_of(command: str) -> list[str]:
    """Return the flags of a command, without -h and -version, which all commands have."""
    script = COMMANDS[command][0]
    if command == "from-timm":  # it has the many arguments of timm
        return []
    parsers = [] if script == TRAIN else [parser_of(script)]
    if script == TRAIN or command == "sweep":  # a sweep passes other flags to the runs
        parsers.append(build_parser())
    flags = [flag for parser in parsers for flag in parser._option_string_actions]
    return [flag for flag in dict.fromkeys(flags) if flag not in OTHER_NAMES | {"-h", "-version"}]


def values_of_settings() -> dict[str, list[str]]:
    """Return {a setting, with its flag: the words that are its values}."""
    flags = {key: flag for group in FLAGS.values() for flag, (key, _) in group.items()}
    values = {}
    for key, setting in ALL_SETTINGS.items():
        name = f"{flags[key]}|{key}" if key in flags else key
        values[name] = [*setting.choices, *setting.special]
        if setting.kind is bool:
            values[name] = ["true", "false", *values[name]]
        if key == "DATA.DATASET":
            values[name] = [source.removesuffix("NAME") for source in SOURCES]
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
