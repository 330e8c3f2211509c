"""The tool that measures the tests: which mistakes it can make in a text, and which tests it chooses for a line."""

import os
import random
import subprocess
import sys

import pytest

from tests.mistakes.lines import Lines, Moved, keep_texts, program_files
from tests.mistakes.mutants import apply, find_mutants, is_python
from tests.mistakes.plant import ROOT, draw

PROGRAM = '''
def mean_width(images, rank, local_rank, key=False):
    """Docs."""
    total = 0
    for image in sorted(images):
        if not image.width > 8 and rank == 0:
            continue
        total += resize(image.height, image.width, by=min(2, 3))
    return total / -len(images)
'''


@pytest.mark.parametrize(
    "old, new",
    [
        ("image.width > 8", "image.width >= 8"),
        ("image.width > 8", "image.height > 8"),
        ("8 and rank", "8 or rank"),
        ("if not image.width > 8 and rank == 0", "if not (not image.width > 8 and rank == 0)"),
        ("if not image", "if image"),
        ("rank == 0", "local_rank == 0"),
        ("rank == 0", "rank != 0"),
        ("sorted(images)", "list(images)"),
        ("continue", "break"),
        ("total += resize(image.height, image.width, by=min(2, 3))", "pass"),
        ("image.height, image.width", "image.width, image.height"),
        (", by=min(2, 3)", ""),
        ("min(2, 3)", "max(2, 3)"),
        ("total = 0", "total = (0 + 1)"),
        ("total / -len", "total * -len"),
        ("-len(images)", "len(images)"),
        ("key=False", "key=True"),
    ],
)
def test_mistake_is_among_the_mutants_of_a_text(old, new):
    assert PROGRAM.count(old) == 1
    assert PROGRAM.replace(old, new) in {apply(PROGRAM, each) for each in find_mutants(PROGRAM)}


@pytest.mark.parametrize("call", ["min(a, b)", "np.array_equal(a, b)", "os.path.samefile(a, b)"])
def test_order_of_arguments_that_does_not_matter_is_no_mistake(call):
    assert not [each for each in find_mutants(f"found = {call}\n") if each.operator == "arguments swapped"]
    assert [each for each in find_mutants("found = close(a, b)\n") if each.operator == "arguments swapped"]


def test_each_case_of_a_match_has_its_mutants_once():
    mutants = list(find_mutants("match a:\n    case 1:\n        b = 2 < c\n    case _:\n        b = 3\n"))
    assert [(each.line, each.new) for each in mutants] == [
        *((3, "<="), (3, ">"), (3, "(2 + 1)"), (3, "(2 - 1)")),
        *((5, "(3 + 1)"), (5, "(3 - 1)")),
    ]


def test_first_tests_of_each_function_come_before_its_others(tmp_path):
    seconds = {f"tests/x/test_a.py::test_many[{number}]": 0.1 + number / 100 for number in range(9)}
    seconds |= {"tests/y/test_b.py::test_one": 0.5, "tests/y/test_b.py::test_long": 5.0}
    (tmp_path / "files.txt").write_text("{}")
    chosen = Lines(tmp_path)
    chosen.seconds = seconds
    many, (one, long) = list(seconds)[:9], list(seconds)[9:]
    assert chosen._cheapest_first({*seconds}, "tests/x/") == [*many[:2], one, long, *many[2:]]


def test_nearly_all_mutants_of_the_program_are_valid_python():
    texts = {file: (ROOT / file).read_text() for file in random.Random(0).sample(program_files(ROOT), 20)}
    mutants = [(file, each) for file, text in texts.items() for each in find_mutants(text)]
    mutants = random.Random(0).sample(mutants, 100)
    assert sum(is_python(apply(texts[file], each)) for file, each in mutants) >= 98


def test_drawing_depends_on_the_seed_and_the_chosen_lines():
    texts = {"a.py": PROGRAM, "b.py": PROGRAM}
    assert draw(texts, None, 1, 8) == draw(texts, None, 1, 8) != draw(texts, None, 2, 8)
    assert {(file, each.line) for file, each in draw(texts, {"b.py": {6, 8}}, 1, None)} == {("b.py", 6), ("b.py", 8)}


def test_line_is_found_in_an_older_text():
    moved = Moved("a\nb\nc\n", "new\na\nc\n")
    assert [moved.before(line) for line in (1, 2, 3)] == [0, 1, 3]


STARTING = """
import pytest
from tests.support.runs import run, typed

@pytest.fixture(scope="module")
def ended():
    return PROGRAM

def test_started(ended):
    ended.done()

def test_other():
    pass
"""


@pytest.mark.long
def test_lines_of_started_programs_belong_to_the_tests_of_their_fixture(tmp_path):
    for name, words in (("run", ""), ("typed", ", processes=2")):
        program = f'{name}("scripts/models.py", "test_vit*"{words})'
        (tmp_path / f"test_{name}.py").write_text(STARTING.replace("PROGRAM", program))
    environment = os.environ | {"LINES_FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mistakes.recorder", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    keep_texts(ROOT, tmp_path)
    text = (ROOT / "scripts/models.py").read_text()
    main = text[: text.index("def main(")].count("\n") + 1
    mutant = next(each for each in find_mutants(text) if each.function and each.line > main)
    expected = ["test_run.py::test_started", "test_typed.py::test_started"]
    assert sorted(Lines(tmp_path).tests_of("scripts/models.py", text, mutant)) == expected
