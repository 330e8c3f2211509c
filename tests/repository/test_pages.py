"""Sentences of the pages agree with the code: commands, flags, settings, tables, and what halfstep cannot do."""

import argparse
import ast
import contextlib
import functools
import importlib
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import timm

from configs.flags import build_parser, parse
from configs.load import load, merge, resolve
from configs.tables import TASKS
from configs.translate.paddlevit import KEYS
from configs.translate.paddlevit_files import IGNORED, RENAMED, REPLACED
from configs.values import ALL_SETTINGS, OPEN_SECTIONS, SECTIONS, SETTINGS, convert, to_text
from configs.yaml_files import Layer, find_settings_file, read_layers, shipped_files
from datasets.sources.shards import check_keys
from datasets.sources.torchvision_sets import SHORT_NAMES, SPLITS
from engine.settings import chooses
from engine.tasks import class_tables
from scripts import sweep
from scripts.export import FORMATS
from tests.support.cases import cases_of, names_of
from tests.support.forks import ROOT
from tests.support.modules import parsed
from tests.support.pages import (
    FILES,
    LINK,
    PAGES,
    SPAN,
    Command,
    blocks_of,
    commands_in,
    commands_of,
    joined,
    parts_of,
    scripts,
    sentences_of,
    spans_of,
    started_by,
    table_of,
    text_of,
)
from tests.support.refusals import refused
from utils.errors import AFTER_SIGNAL, ConfigError, ExitCode
from utils.program import STOPPING

RUN = "output/train-20260102-03-04-05"
MAIN = ("main_single_gpu.py", "main_multi_gpu.py", "scripts/train.py")
# Flags of programs without a parser, and of other programs
OTHERS = "-quick -release -np -vb".split()
SHIPPED = {name for path in shipped_files() for name in (path.stem, path.name, str(path.relative_to(ROOT)))}


class Parsed(Exception):
    """Ends a script after its parser has accepted the words."""


def filled(words: list[str]) -> list[str]:
    """Return the words of a command with values for its placeholders (tests/support/pages.py)."""
    words = [
        "vit_digits" if before == "-cfg" and word == "..." else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    words = [word for word in words if not re.fullmatch(r"\[?\.\.\.\]?|KEY=VALUES?|.*(?:\[@\]|\$@).*", word)]
    words = [re.sub(r"^([\w.]+=)?(\[?[A-Z]\]?|\$\{?\w+\}?)$", r"\g<1>2", word) for word in words]
    return [RUN if word == "latest" else word for word in words]


def check_settings(words: list[str], is_whole: bool) -> None:
    """Load the settings of a run, except those of files and weights that only the reader has."""
    line = parse(filled(words))
    typed = {key for layer in line.layers for key in layer.texts}
    cfg = line.cfg if line.cfg in SHIPPED else None
    assert cfg or not re.fullmatch(r"[a-z]\w+", line.cfg or ""), f"-cfg {line.cfg}: there are no such settings"
    for layer in line.layers:
        name = layer.texts.get("MODEL.PRETRAINED", "").partition(".")[0]
        is_name = re.fullmatch(r"[a-z]\w+(\.[a-z]\w+_\w+)?", layer.texts.get("MODEL.PRETRAINED", ""))
        assert not is_name or timm.is_model(name) or chooses(name), f"-pretrained {name}: timm has no such model"
    is_tuned = "MODEL.PRETRAINED" in typed and not {"EVAL", "MODEL.RESUME"} & typed
    names_file = line.cfg or {"MODEL.RESUME", "MODEL.PRETRAINED", "DATA.DATA_PATH"} & typed
    assert names_file or not is_whole or filled(words) != words, "-cfg is missing"
    files = read_layers(find_settings_file(cfg or "finetune")) if cfg or (is_tuned and not line.cfg) else []
    resolve(line, files)


@contextlib.contextmanager
def stopped_after_parsing(is_part: bool) -> Iterator[list[argparse.ArgumentParser]]:
    """Make each parser raise Parsed instead of returning. Yield the parsers used, the script's own first.

    `is_part`: required arguments may be left out.
    """
    depth, parsers, known = [0], [], argparse.ArgumentParser.parse_known_args

    def parse_known(parser, args=None, namespace=None):
        parsers.append(parser)
        for action in parser._actions if is_part else []:
            action.required = False
            action.nargs = "*" if action.nargs in (None, 2) and action.option_strings else action.nargs
        depth[0] += 1
        found = known(parser, args, namespace)
        depth[0] -= 1
        if depth[0]:
            return found
        raise Parsed(*found)

    def parse_all(parser, args=None, namespace=None, is_mixed=False):
        depth[0] += 1
        try:
            parse_words = parser.parse_known_intermixed_args if is_mixed else parser.parse_known_args
            found, rest = parse_words(args, namespace)
            if rest:
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
        finally:
            depth[0] = 0
        raise Parsed(found, [])

    replaced = {"parse_known_args": parse_known, "parse_args": parse_all}
    replaced["parse_intermixed_args"] = functools.partialmethod(parse_all, is_mixed=True)
    with patch.multiple(argparse.ArgumentParser, **replaced):
        yield parsers


def check_script(program: str, words: list[str], is_part: bool) -> None:
    """Parse the words with the parser of a script, and settings among them with the parser of the settings."""
    module, words = importlib.import_module(program.removesuffix(".py").replace("/", ".")), filled(words)
    if program == "scripts/sweep.py":
        of_runs = sweep.parse(words)[1]
        check_settings(of_runs, is_whole=False)
    try:
        with stopped_after_parsing(is_part), patch.object(sys, "argv", [program, *words]):
            module.main(*[words] * module.main.__code__.co_argcount)
        return  # it accepted the words without a parser
    except Parsed as parsed:
        found, rest = parsed.args
    if getattr(found, "opts", None) and program != "scripts/from_timm.py":
        merge(parse(["-opts", *found.opts]).layers)
    if rest:
        check_settings(rest, is_whole=False)


def check(command: Command) -> None:
    program, words = command.program, command.words
    if program.startswith("halfstep "):
        program, words = started_by(program.split()[1], words)
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


@functools.cache
def flags_of(program: str) -> set[str]:
    """Return all flags of a program."""
    if program in MAIN:
        parser = build_parser()
    else:
        try:
            with stopped_after_parsing(True) as parsers, patch.object(sys, "argv", [program]):
                module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
                module.main(*[[]] * module.main.__code__.co_argcount)
        except (Parsed, ConfigError):
            parser = parsers[0]
    below = [
        each
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action.choices.values()
    ]
    return {flag for each in (parser, *below) for flag in each._option_string_actions}


@functools.cache
def known_flags() -> set[str]:
    return {flag for path in scripts().values() if path != "scripts/from_timm.py" for flag in flags_of(path)} | {
        *OTHERS
    }


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_sentences_of_a_page_exist_and_take_their_values(page):
    for code in spans_of(text_of(page)):
        flags = {*re.findall(r"(?:^|(?<=[ (|]))-[a-z]\w+(?![\w-])", "" if code.startswith("find ") else code)}
        assert flags <= known_flags(), f"{code}: there is no flag {flags - known_flags()}"
        if code.startswith("-") and flags and flags <= flags_of(MAIN[0]):
            try:
                merge(parse(filled(parts_of(code)[0])).layers)
            except ConfigError as error:  # a sentence may name a flag without a value
                assert re.search("expected .* argument|unknown flag -[hv]", str(error)), f"{code}: {error}"


@functools.cache
def known_names() -> set[str]:
    """Return the names in capitals that a page may use: settings, by any ending, and constants of the code."""
    keys = [*ALL_SETTINGS, *SECTIONS, *RENAMED, *IGNORED, *REPLACED, *KEYS]
    endings = {key.split(".", place)[place] for key in keys for place in range(key.count(".") + 1)}
    folders = ("configs", "datasets", "engine", "models", "scripts", "tests", "utils")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return endings | {name for path in files for name in re.findall(r"\b[A-Z][A-Z0-9_]+\b", path.read_text("utf-8"))}


@pytest.mark.parametrize("page", PAGES)
def test_settings_in_sentences_of_a_page_exist_and_take_their_values(page):
    for code in spans_of(text_of(page)):
        for key in re.findall(r"(?<![\w./$-])[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)+(?![\w.]*[a-z*])", code):
            is_open = key.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))
            assert key in known_names() or is_open, f"{code}: there is no setting {key}"
        if found := re.fullmatch(r"([A-Z][A-Z0-9_.]+)(?:=|: )([^{} ]+)", code):
            named = [key for key in ALL_SETTINGS if f".{key}".endswith(f".{found[1]}")]
            is_name = found[1] in known_names() or re.match(
                "AWS|WANDB|MLFLOW|TORCH|NCCL|GLOO|FSSPEC|CUDA|[A-Z]+$", found[1]
            )
            assert named or is_name, f"{code}: there is no setting {found[1]}"
            assert not named or any(takes(key, filled(re.split(r"(?<=\]),", found[2]))[0]) for key in named), (
                f"{code}: a wrong value"
            )


def takes(key: str, value: str) -> bool:
    try:
        return bool(merge([Layer("-opts", {key: value})]))
    except ConfigError:
        return False


# --- tables ---


def titles_of_check() -> set[str]:
    """Return the titles of the rows that the code of -check can print."""
    found, files = set(), [ROOT / "engine" / name for name in ("plan.py", "plan_lines.py", "quick_checks.py")]
    for file in (*files, *(ROOT / "engine/check").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        of_rows = ("refusals", "notes_on", "describe_chosen")
        functions = [each for each in ast.walk(tree) if getattr(each, "name", "") in of_rows]
        loops = [each for each in ast.walk(tree) if isinstance(each, ast.For) and isinstance(each.target, ast.Tuple)]
        for node in ast.walk(tree):
            name = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
            if name in ("section", "Finding"):
                found.add(ast.unparse(node.args[0]))
            if isinstance(node, ast.Assign) and "title" in (
                texts := ast.unparse(node.targets[0]).strip("()").split(", ")
            ):
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                found.add(ast.unparse(values[texts.index("title")]))
        for node in [each for part in (*functions, *(loop.iter for loop in loops)) for each in ast.walk(part)]:
            found |= {ast.unparse(key) for key in node.keys if key} if isinstance(node, ast.Dict) else set()
            found |= (
                {ast.unparse(node.slice)}
                if isinstance(node, ast.Subscript) and "checks" in ast.unparse(node)
                else set()
            )
    texts = {ast.literal_eval(each) for each in found if each[0] in "'\""}
    parts = {each[2:-1] for each in found if each.startswith("f'{part}")}
    return texts | {each.format(part=part) for each in parts for part in ("training", "validation")}


def exit_codes() -> set[str]:
    return {str(int(code)) for code in (*ExitCode, *(AFTER_SIGNAL + each for each in (*STOPPING, signal.SIGKILL)))}


def what_may_change() -> set[str]:
    files = [text_of(f"engine/checkpoint/{name}.py") for name in ("compare", "resume")]
    return {name for text in files for name in re.findall(r'"([A-Z_]+)"', text)} - SETTINGS.keys()


NO_DEFAULTS = {("TRAIN.GRAD_CLIP", "1.0")}  # a value to start with
# {first cells of a table's header: (column, the names in it, the names in the code)}
TABLES = {
    "row | what is checked": (
        0,
        r"[^,]+",
        lambda: titles_of_check() - {"images"} | {"numbers"},
    ),  # images: only if reading fails; the noun of a task
    "`-to` | writes": (0, r"\w+", lambda: {*FORMATS}),
    "names | training | validation": (0, r"\w+", lambda: SPLITS.keys() - SHORT_NAMES.values()),
    "exit code | cause": (0, r"\d+", exit_codes),
    "event | the run | exit code": (2, r"\d+", exit_codes),
    "name | what changed": (0, r"\w+", what_may_change),
}
NOT_NAMES = {"128"}  # "128 + signal"


@pytest.mark.parametrize("header", TABLES)
def test_table_of_a_page_has_the_names_of_the_code(header):
    column, pattern, names = TABLES[header]
    cells = " ".join(f"{row[column]}," for row in table_of(header))
    found = {each.strip(" `") for each in re.findall(pattern, cells)} - {""} - NOT_NAMES
    assert found == names(), f"missing: {names() - found}, wrong: {found - names()}"


@pytest.mark.parametrize("header", ["file | written", "key | value"])
def test_names_in_the_tables_of_a_runs_files_are_in_the_code(header):
    code = "".join(
        path.read_text("utf-8") for room in ("engine", "scripts", "utils") for path in (ROOT / room).rglob("*.py")
    )
    for name in re.findall("`(.+?)`", " ".join(row[0] for row in table_of(header))):
        text = re.escape(name.rstrip("/")).replace("N", r"\{.+?\}")
        assert re.search(rf"""["'/]{text}["']|\b{text}=""", code), f"{name} is not in the code"


NOT_MEASURED = {"167"}  # images of a class that real_sets.py writes
NUMBER = re.compile(r"(?<![\w.,-])(?=(?:[.,]?\d){3})\d[\d,]*(?:\.\d+)?(?!\w)")
DEFAULT = re.compile(r"`([A-Z][A-Z_.0-9]+)`(?: \w+)? \((?:default:? )?`?([\d.]+(?:e-?\d+)?|\w+)`?(?=[;)])")


def test_defaults_in_sentences_are_those_of_the_settings():
    """`SETTING` (0.1), also with a word before the bracket, names the default."""
    found = [(page, *each) for page in PAGES for each in DEFAULT.findall(" ".join(sentences_of(page)))]
    checked = 0
    for page, name, text in found:
        keys = [key for key in SETTINGS if f".{key}".endswith(f".{name}")]
        defaults = {to_text(SETTINGS[key].default) for key in keys}
        is_value = text[0].isdecimal() or any(text in SETTINGS[key].choices for key in keys)
        if keys and is_value and (name, text) not in NO_DEFAULTS:
            assert any(takes(key, text) and defaults >= {to_text(convert(SETTINGS[key], text, ""))} for key in keys), (
                f"{page}: {name} ({text}), but the default is {defaults}"
            )
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("part", cases_of("pages-figures"))
def test_figure_in_a_sentence_is_that_of_the_code(part):
    assert any(part in each for page in PAGES for each in sentences_of(page)), (
        "no page says this: change or remove the row"
    )
    (code,) = names_of("pages-figures", part)
    modules = {name: importlib.import_module(name) for name in re.findall(r"\b([a-z]\w+(?:\.[a-z]\w+)+)", code)}
    assert eval(code, {name.partition(".")[0]: sys.modules[name.partition(".")[0]] for name in modules})


def test_measured_figures_beside_a_link_to_the_benchmarks_are_on_that_page():
    """Numbers of at least three digits, which are hardly there by chance."""
    known, checked = {*NUMBER.findall(text_of("BENCHMARKS.md"))}, 0
    for page in {*PAGES} - {"BENCHMARKS.md"}:
        for sentence in sentences_of(page, with_links=True):
            if "(../BENCHMARKS.md" in sentence or "(BENCHMARKS.md" in sentence:
                found = {*NUMBER.findall(SPAN.sub("", LINK.sub("]", sentence)))}
                assert found <= known | NOT_MEASURED, f"{page}: {found - known} is not in BENCHMARKS.md: {sentence}"
                checked += len(found)
    assert checked > 8


def test_optional_packages_of_the_page_are_the_extras_of_requirements():
    section = text_of("docs/how.md").split("\n## Add an optional package\n")[1].split("\n## ")[0]
    extras = re.findall(r"^# optional (\w+): ", text_of("requirements.txt"), re.M)
    assert len(extras) > 8 and spans_of(section) == ["uv tool install", "pipx install", *extras]


# --- translations ---


@pytest.mark.parametrize("name", ["README.md", "from-paddlevit.md"])
def test_chinese_page_has_the_commands_of_the_english_page(name):
    english = "README.md" if name == "README.md" else f"docs/{name}"
    pages = [[code for _, code in blocks_of(text_of(page))] for page in (english, f"docs/zh/{name}")]
    theirs, ours = ([line for block in page for line in joined(block) if is_command(line)] for page in pages)
    assert ours == theirs


def is_command(line: str) -> bool:
    return bool([*commands_in(line, False)]) or line.startswith(
        ("bash ", "pip ", "git ", "uv ", "pipx ", "tensorboard ")
    )


# --- what halfstep cannot do, refuses, or has not measured ---

# Sentences with these words need a row in tests/cases/pages-limits.txt: `part of the sentence => proofs`. The proofs:
#   load WORDS refused: NAMES    these settings are refused, and the message has the names
#   call CODE refused: NAMES     this call is refused in the same way
#   case FILE CASE               this case of tests/cases/FILE.txt, which another test types
#   test FILE::NAME              this test
#   value CODE                   this is true of the tables of the program
#   absent PATTERN in FILE       nothing like this has been measured or tested: the file does not mention it
#   statement WHY                the sentence is about something else
LIMITS = re.compile(
    r"\b(can ?not|refus(e|es|ed)|unsupported|not supported?|(does|do) not support|untested|been (tested|measured)|"
    r"not (tested|measured)|emulation|no \w+ yet|(is an|are) errors?|not available|lacks?|no longer be|"
    r"not for [a-z]+)\b",
    re.IGNORECASE,
)
# Pages for those who change the code, of figures and of faults; the settings, whose texts are in configs/schema.py; and
# translations
OTHER_PAGES = re.compile(
    r"docs/(zh/.*|architecture|settings)\.md|(AGENTS|BENCHMARKS|CONTRIBUTING|RELIABILITY|tests/README)\.md"
)
PROOFS = cases_of("pages-limits")
NAMES = {  # available to the code in proofs
    **{"FORMATS": FORMATS, "SETTINGS": SETTINGS, "TASKS": TASKS},
    **{"check_keys": check_keys, "class_tables": class_tables},
    "settings": lambda words: load(words.split(), needs_file=False).config,
}


def assert_checked(file: str, name: str) -> None:
    """Fail unless this test exists, is never left out, and checks something, maybe in a function that it calls."""
    functions = {node.name: node for node in parsed(ROOT / "tests" / file).body if isinstance(node, ast.FunctionDef)}
    assert name.startswith("test_") and name in functions, f"there is no test {file}::{name}"
    marks = " ".join(ast.unparse(mark) for mark in functions[name].decorator_list)
    assert not re.search(r"\b(skip|skipif|xfail)\b", marks), f"{file}::{name} may be left out: {marks}"
    nodes = [*ast.walk(functions[name])]
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    called |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    bodies = [functions[each] for each in [name, *(called & functions.keys())]]
    checks = [node for body in bodies for node in ast.walk(body) if isinstance(node, ast.Assert)]
    assert checks or called & {"refused", "raises", "assert_names"}, f"{file}::{name} checks nothing"


@functools.cache
def is_typed(cases: str) -> bool:
    """Return whether a test is called with each case of this file, and compares the message with its row."""
    used = re.compile(rf"(cases_of|names_of|assert_cases)\(\s*\"{re.escape(cases)}\"")
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return any({call[1] for call in used.finditer(text)} >= {"cases_of", "names_of"} for text in texts)


def limits() -> list[str]:
    pages = [page for page in PAGES if not OTHER_PAGES.fullmatch(page)]
    return [each for page in pages for each in sentences_of(page) if LIMITS.search(each)]


def test_each_sentence_about_a_limit_has_a_proof():
    unproven = [f"{each} => " for each in limits() if not any(part in each for part in PROOFS)]
    assert not unproven, "tests/cases/pages-limits.txt: add a row for each of these sentences:\n" + "\n".join(unproven)


@pytest.mark.parametrize("part", PROOFS)
def test_limit_that_a_page_names_is_one_of_the_program(part):
    assert any(part in each for each in limits()), "no page says this: remove the row from tests/cases/pages-limits.txt"
    for proof in names_of("pages-limits", part):
        verb, _, given = proof.partition(" ")
        if verb == "load":
            words, _, names = given.partition(" refused: ")
            with refused(ConfigError, *names.split()):
                load(shlex.split(words), needs_file=False)
        elif verb == "call":
            code, _, names = given.partition(" refused: ")
            with refused(ConfigError, *names.split()):
                eval(code, NAMES)
        elif verb == "case":
            file, _, case = given.partition(" ")
            assert case in cases_of(file), f"{file}: there is no case {case}"
            assert is_typed(file), f"no test types the cases of {file}"
        elif verb == "test":
            file, _, name = given.partition("::")
            assert_checked(file, name)
        elif verb == "value":
            assert eval(given, NAMES)
        elif verb == "absent":
            pattern, _, file = given.rpartition(" in ")
            found = re.search(pattern, text_of(file))
            assert not found, f"{file} mentions {found[0]}"
        else:
            assert verb == "statement" and given
