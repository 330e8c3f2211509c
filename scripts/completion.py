"""Prints shell code with which Tab completes commands of halfstep: its commands, flags, settings, files and runs.

    source <(halfstep completion bash)            in ~/.bashrc
    source <(halfstep completion zsh)             in ~/.zshrc
    halfstep completion fish | source             in ~/.config/fish/config.fish

Each Tab starts this file with -words and the typed words, and the file prints the words that can be the last one. If there
are none, the shell completes the name of a file.
"""

import os
import re
import shlex
import sys
from glob import escape, glob

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Settings and commands whose values are runs, or runs, weights and images.
OF_RUNS = ("MODEL.RESUME", "resume", "report", "doctor", "compare", "export")
OF_WEIGHTS = ("MODEL.PRETRAINED", "evaluate", "predict", "labels", "embed")
# {function that adds flags to several scripts: its file}
SHARED = {"add_model_flags": "scripts/predict.py", "add_output": "scripts/command_line.py"}
# {shell: its code, in which CALL starts this file}. The code never evaluates a printed word, because files can have any name.
CODE = {
    "bash": """\
_halfstep() {
    local found current=${COMP_WORDS[COMP_CWORD]} word=${COMP_LINE:0:COMP_POINT}
    word=${word##*[[:space:]]} COMPREPLY=()
    [[ $current == [=:] ]] && current=
    [[ $word == *"$current" ]] || return  # the word has quotes
    while IFS= read -r found; do
        [[ $found == *[/=.] ]] && compopt -o nospace 2> /dev/null
        printf -v found %q "${found#"${word%"$current"}"}"  # without the part before = or :, which bash keeps
        COMPREPLY+=("$found")
    done < <(CALL "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2> /dev/null)
}
complete -o default -F _halfstep halfstep""",
    "zsh": """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_halfstep() {
    local -a found
    found=("${(@f)$(CALL "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    [[ -n $found ]] || { _files; return }
    compadd -S '' -- ${(M)found:#*[/=.]}
    compadd -- ${found:#*[/=.]}
}
compdef _halfstep halfstep""",
    "fish": """\
function __halfstep
    set -l typed (commandline -opc) (commandline -ct)
    set -g __halfstep_found (CALL $typed[2..-1] 2> /dev/null)
end
complete -c halfstep -n __halfstep -f -a '$__halfstep_found'""",
}


def main(argv: list[str]) -> int:
    if argv not in ([shell] for shell in CODE):
        from scripts.command_line import Parser  # local: its import would delay each start of a shell

        parser = Parser(__doc__)
        parser.add_argument("shell", choices=[*CODE], help="your shell")
        argv = [parser.parse_args(argv).shell]
    call = shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__), "-words"])  # -I -S: a faster start
    print(CODE[argv[0]].replace("CALL", call))
    return 0


# The rest reads halfstep's tables as text, because importing them takes longer than users wait after Tab.


def words(typed: list[str]) -> list[str]:
    """Return the words that can be the last typed word."""
    *before, word = typed
    found = [each for each in candidates(before, word) if each.startswith(word) and each.isprintable()]
    return list({each.rstrip("/"): each for each in found}.values())  # a run is also a folder


def candidates(before: list[str], word: str) -> list[str]:
    """Return words that can follow the words `before`. `word`: the next word, as far as it is typed."""
    program = "__main__.py" if os.path.exists(os.path.join(ROOT, "__main__.py")) else "halfstep/__main__.py"
    scripts = dict(re.findall(r'^    "([a-z-]+)": \("?([\w/.]+)', source(program), re.M))  # {command: its script}
    if not before:
        return [*scripts, "-h", "-version"]
    if before[0] not in scripts:
        return []
    flags = [*flags_of(scripts[before[0]]), "-h", "-version"]
    if word.startswith("-"):
        return flags
    last_flag = next((each for each in reversed(before) if each.startswith("-")), "")
    if last_flag in ("-opts", "-over"):
        key, equals, value = word.partition("=")
        return [f"{key}={each}" for each in values_of(key, value)] if equals else [*settings()]
    return values_of(last_flag, word) if last_flag == before[-1] else values_of(before[0], word) or flags


def flags_of(script: str) -> list[str]:
    """Return the flags of a script, or of the training programs, which the table names without a path."""
    of_training = ["-cfg", "-opts", *(flag for flag, _ in settings().values() if flag)]
    if "/" not in script:
        return of_training
    text = source(script)
    for function, file in SHARED.items():
        if f"{function}(" in text:
            text += re.search(rf"def {function}\(.*?\n\n", source(file), re.S)[0]
    added = re.findall(r'\badd(?:_argument)?\(\s*("-[^=]*)', text)
    flags = re.findall(r'"(-\w+)"', " ".join(added))
    return flags + of_training if script == "scripts/sweep.py" else flags


def values_of(name: str, word: str) -> list[str]:
    """Return values of a setting or flag, or arguments of a command. `word`: the value, as far as it is typed."""
    rows = settings()
    key = next((start[:-1] for start, (flag, _) in rows.items() if flag == name), name)
    files = [each + "/" * os.path.isdir(each) for each in glob(escape(word) + "*")]
    runs = ["latest", *(os.path.dirname(each) for each in glob("output/*/status.json"))]
    if key in OF_RUNS:
        return [*runs, "auto"] if key == "MODEL.RESUME" else runs
    if key in OF_WEIGHTS:
        shipped = [os.path.relpath(each, ROOT) for each in glob(f"{escape(ROOT)}/weights/*.safetensors")]
        return [*files, *runs, *shipped, *re.findall(r'^    "(\S+)": "[\d.]+ M"', source("scripts/models.py"), re.M)]
    if key == "-cfg":
        shipped = glob(f"{escape(ROOT)}/configs/**/*.yaml", recursive=True)
        names = [os.path.basename(each).removesuffix(".yaml") for each in shipped]
        return [*names, *(each for each in files if each.endswith((".yaml", "/")))]
    if key == "DATA.DATASET":
        names = re.findall(r'^    "(\S+)": SourceRow', source("configs/tables.py"), re.M)
        return [each.removesuffix("NAME") for each in names]
    return [*CODE] if key == "completion" else rows.get(f"{key}=", ("", []))[1]


def settings() -> dict[str, tuple[str, list[str]]]:
    """Return {KEY=: (its flag or "", the words that are its values)} from docs/settings.md, which is generated."""
    rows, section = {}, ""
    for line in source("docs/settings.md").splitlines():
        if line.startswith("## "):
            title = line[3:]
            section = f"{title}." if title.isupper() else ""  # below other titles, settings have their full name
        elif row := re.match(r"\| `(\S+)`(?: `(\S+)`)? \| \S+ \| ([^|]*) \|", line):
            key, flag, kind = row.groups("")
            choices = ["true", "false"] * kind.startswith("true or false") + re.findall(r"`(\S+)`", kind)
            end = "." if kind == "arguments" else "="  # an argument's name follows, as in MODEL.KWARGS.init_values=1e-5
            rows[f"{section}{key}{end}"] = (flag, choices)
    return rows


def source(file: str) -> str:
    with open(os.path.join(ROOT, file), encoding="utf-8") as opened:
        return opened.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["-words"]:
        found = words(sys.argv[2:])
        print(*found, sep="\n", end="\n" * bool(found))
        sys.exit(not found)
    sys.path.insert(0, ROOT)
    from utils.program import exit_code

    sys.exit(exit_code(main, sys.argv[1:]))
