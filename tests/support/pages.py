"""The pages of the project as tests read them: commands, code, tables and sentences.

Placeholders in commands: `...` and `[...]` stand for further words, a single capital letter or a shell variable for a
number, and `KEY=VALUE` for a setting. FOLDER, RUN and other words in capitals are ordinary texts.
"""

import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from halfstep import __main__ as halfstep
from halfstep.__main__ import COMMANDS
from tests.support.forks import ROOT

# Pages that are read by users, and files with commands in their comments, docstrings or texts
PAGES = [
    *(
        "README.md",
        "BENCHMARKS.md",
        "RELIABILITY.md",
        "CONTRIBUTING.md",
        "AGENTS.md",
        "weights/README.md",
        "tests/README.md",
    ),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
]
PAGES = [page for page in PAGES if (ROOT / page).exists()]
FILES = [
    "configs/flags.py",
    "deploy/Dockerfile",
    *(
        str(path.relative_to(ROOT))
        for pattern in (
            "scripts/**/*.py",
            "scripts/*.sh",
            "configs/**/*.yaml",
            "tests/kill/*.py",
            "tests/mistakes/*.py",
        )
        for path in sorted(ROOT.glob(pattern))
    ),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.M | re.S)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
SCRIPT = r"(?:main_(?:single|multi)_gpu|scripts/[\w/]+|tests/(?:kill|mistakes)/\w+)\.py"
RUNS = re.compile(r"(?:^|[ /])(?:python[0-9.]*|torchrun|torch\.distributed\.run)(?: |$)")


class Command(NamedTuple):
    """A command of this project on a page."""

    program: str  # the path of a script, or "halfstep COMMAND"
    words: list[str]
    text: str
    is_part: bool  # whether it is code in a sentence, which may leave out required arguments


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def block_of(path: Path, line: str) -> str:
    """Return the block of Python code in a page that contains this line."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    return next(block for block in blocks if line in block)


def started_by(command: str, words: list[str]) -> tuple[str, list[str]]:
    """Return the script that a command of the installed program starts, and its words."""
    with patch("os.execv") as started, patch.object(sys, "argv", ["halfstep", command, *words]), patch.dict(os.environ):
        assert halfstep.main() is None, f"there is no command halfstep {command}"
    _, script, *given = started.call_args.args[1]
    return str(Path(script).relative_to(ROOT)), given


def script_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script and the arguments of a command, `python scripts/x.py ...` or `halfstep x ...`."""
    program, command, *words = words
    assert program in ("python", "halfstep"), program
    return (command, words) if program == "python" else started_by(command, words)


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the (language, code) of each block."""
    return [(language, code) for _, language, code in FENCE.findall(text)]


def spans_of(text: str) -> list[str]:
    """Return the code in the text of a page, outside of blocks."""
    return [" ".join(code.split()) for _, code in SPAN.findall(FENCE.sub("", text))]


@functools.cache
def scripts() -> dict[str, str]:
    """Return {name that a page may use for a script: its path}."""
    patterns = (
        "scripts/*.py",
        "scripts/benchmarks/*.py",
        "scripts/maintenance/*.py",
        "tests/kill/*.py",
        "tests/mistakes/plant.py",
    )
    found = [*ROOT.glob("main_*.py"), *(path for pattern in patterns for path in ROOT.glob(pattern))]
    paths = [path for path in found if "def main(" in path.read_text() and path.name != "worker.py"]
    return {path.name: str(path.relative_to(ROOT)) for path in paths}


def lines_with_code(page: str) -> list[str]:
    """Return the lines that may contain commands, except code in sentences."""
    text = text_of(page)
    if page.endswith(".md"):
        return joined("\n".join(code for language, code in blocks_of(text) if language in ("", "bash", "sh")))
    if page.endswith(".py"):
        return joined("\n".join(re.findall(r'^[^"\n]*"""\\?(.*?)"""', text, re.M | re.S)))
    return joined(re.sub(r"^# ?", "", text, flags=re.M))


def joined(code: str) -> list[str]:
    """Return the lines of code, with continued lines joined, and without remarks after two spaces or #."""
    lines = re.sub(r" *\\{1,2}\n\s*", " ", code).splitlines()
    return [re.split(r"(?<=\S)\s{2,}|\s#", line.strip())[0].rstrip(":") for line in lines]


def commands_of(page: str) -> Iterator[Command]:
    """Yield the commands of a page: `python scripts/x.py ...`, `halfstep x ...`, and in sentences also `x.py ...`."""
    for line in lines_with_code(page):
        yield from commands_in(line, False, is_prose=not page.endswith(".md"))
    for span in spans_of(text_of(page)) if page.endswith(".md") else []:
        yield from commands_in(span, True)


def commands_in(line: str, is_part: bool, is_prose: bool = False) -> Iterator[Command]:
    """Yield the commands in a line. `is_prose`: `halfstep` may also begin a sentence."""
    first = line.split(" ")[0]
    if first == "->":  # a remedy in the output of -check
        return
    is_named = is_part and (first in scripts() or first in scripts().values())
    for words in parts_of(line.replace(first, scripts().get(first, first), 1) if is_named else line):
        words = [word.removeprefix("./") for word in words]
        starts = [place for place, word in enumerate(words) if re.fullmatch(rf"{SCRIPT}|halfstep", word)]
        before, program, *rest = (words[: starts[0]], *words[starts[0] :]) if starts else ([], "")
        if program == "halfstep":
            starts_it = not before or before[-1] == "--no-python" or before[0] in ("srun", "mpirun", "exec")
            if starts_it and rest and (rest[0] in COMMANDS or not is_prose):
                yield Command(f"halfstep {rest[0]}", rest[1:], line, is_part)
        elif program and (is_named or RUNS.search(" ".join(before))):
            yield Command(program, rest, line, is_part)


def parts_of(line: str) -> list[list[str]]:
    """Return the words of each command in a line of a shell, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe in prose
        return []
    parts, is_file = [[]], False
    for word in words:
        if re.fullmatch(r"[|&;]+", word):
            parts.append([])
        elif re.fullmatch(r"[<>]+", word):
            is_file = True
        elif is_file:
            is_file = False
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def table_of(header: str) -> list[list[str]]:
    """Return the rows of the table with these first cells, which must be on exactly one page in English, as cells."""
    found = []
    for page in PAGES:
        lines = ("" if "/zh/" in page else text_of(page)).splitlines()
        for place, line in enumerate(lines):
            if line.startswith(f"| {header} |"):
                below = itertools.takewhile(lambda each: each.startswith("|"), lines[place + 2 :])
                found.append([re.split(r"(?<!\\) \| ", each.strip("| ")) for each in below])
    (table,) = found
    return table


LINK = re.compile(r"\]\((?:[^()]|\([^()]*\))*\)")


def sentences_of(page: str, with_links: bool = False) -> list[str]:
    """Return the sentences of a page without its blocks of code and the targets of its links.

    A row of a table is one.
    """
    text = FENCE.sub("\n\n", text_of(page))
    text = text if with_links else LINK.sub("]", text)
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\||#))", text)]
    ends = r"(?<=[.!?])\s+(?=[A-Z`\[*(\"])"
    return [each for part in parts for each in ([part] if part.startswith("|") else re.split(ends, part)) if each]
