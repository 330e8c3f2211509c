"""Chooses the tests of a line: those that execute it, as recorder.py recorded them, the cheapest first."""

import difflib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from coverage.numbits import numbits_to_nums

from tests.mistakes.mutants import Mutant

FEW = 2  # tests of a function with many parameters that come before the others
# Tests of the program's tables, and of the pages that are written from them.
OF_TABLES = "tests/repository/test_registered.py::"
SECONDS_ALONE = 1.0  # a test that takes longer runs together with the other tests of its file, which share fixtures


def record(project: Path, folder: Path) -> None:
    """Run the whole suite of a copy of the project, record the lines of each test, and keep the text of its files."""
    folder.mkdir(parents=True)
    environment = os.environ | {"LINES_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.mistakes.recorder", "-n", "3", "--dist", "loadscope"]
    subprocess.run(command, cwd=project, env=environment)
    keep_texts(project, folder)


def keep_texts(project: Path, folder: Path) -> None:
    texts = {file: (project / file).read_text() for file in program_files(project)}
    (folder / "files.txt").write_text(json.dumps(texts))  # .txt, because each .json file is the record of a process


def program_files(project: Path) -> list[str]:
    """Return all Python files of the program."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=project, text=True).splitlines()
    return [file for file in listed if not file.startswith("tests/")]


class Lines:
    """Which tests execute which lines, and how long each test takes."""

    def __init__(self, folder: Path):
        self.seconds: dict[str, float] = defaultdict(float)
        # {file: {context: lines}}
        self.contexts: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.users: dict[str, set[str]] = defaultdict(set)  # {context: tests}; a test uses itself and its fixtures
        self.texts = json.loads((folder / "files.txt").read_text())
        for path in folder.glob("*.json"):
            facts = json.loads(path.read_text())
            for context, seconds in facts["seconds"].items():
                self.seconds[context] += seconds
            for test, contexts in facts["fixtures"].items():
                self.users[test].add(test)
                for context in contexts:
                    self.users[context].add(test)
            for context, files in facts["lines"].items():
                for file, bits in files.items():
                    self.contexts[file][context].update(numbits_to_nums(bytes.fromhex(bits)))
        # A test that runs alone has to make its fixtures.
        for context, seconds in [*self.seconds.items()]:
            for test in self.users[context] - {context}:
                self.seconds[test] += seconds

    def tests_of(self, file: str, text: str, mutant: Mutant) -> list[str]:
        """Return the tests that can notice a mutant of this file, whose present text is `text`."""
        if mutant.function is None:  # executed by the import: tests of the lines that use the name, then of the file
            lines = [each for name in (file, *self.texts) for each in self._uses(name, mutant.name)]
            of_tables = {test for test in self.seconds if test.startswith(OF_TABLES)}
            found = [of_tables, self._executing(lines), self._executing([(file, None)])]
        else:
            moved = Moved(self.texts.get(file, ""), text)
            spans = [mutant.lines, mutant.function]  # the tests of the function are for its head, and for new lines
            if mutant.lines[0] < mutant.function[0]:
                spans = [mutant.function]
            tests = [
                self._executing((file, moved.before(line)) for line in range(first, last + 1)) for first, last in spans
            ]
            found = [next(filter(None, tests), set())]
        chosen = [test for tests in found for test in self._cheapest_first(tests, f"tests/unit/{Path(file).parent}/")]
        return list(dict.fromkeys(chosen))

    def _uses(self, file: str, name: str) -> list[tuple[str, int]]:
        if not name:
            return []
        lines = enumerate(self.texts.get(file, "").splitlines(), start=1)
        return [(file, number) for number, line in lines if re.search(rf"\b{name}\b", line)]

    def _executing(self, lines: Iterable[tuple[str, int | None]]) -> set[str]:
        """Return the tests that execute one of these lines, or any line of a file (None)."""
        wanted = defaultdict(set)
        for file, line in lines:
            wanted[file].add(line)
        found: set[str] = set()
        for file, numbers in wanted.items():
            for context, executed in self.contexts[file].items():
                if context in self.users and (None in numbers or executed & numbers):
                    found |= self.users[context]
        return found

    def _cheapest_first(self, tests: set[str], near: str) -> list[str]:
        """Order tests: first some of each function, because its other parameters seldom notice more, then the rest."""
        functions = defaultdict(list)
        for test in sorted(tests, key=self.seconds.__getitem__):
            functions[test.split("[")[0]].append(test)
        some = [test for group in functions.values() for test in group[:FEW]]
        rest = [test for group in functions.values() for test in group[FEW:]]
        return [test for part in (some, rest) for test in self._ordered(part, near)]

    def _ordered(self, tests: list[str], near: str) -> list[str]:
        """Order tests: short ones in the folder `near`, other short ones, then the rest by file, each by time."""
        alone = [test for test in tests if self.seconds[test] <= SECONDS_ALONE]
        files = defaultdict(list)
        for test in sorted({*tests} - {*alone}, key=self.seconds.__getitem__):
            files[test.split("::")[0]].append(test)
        together = sorted(files.values(), key=lambda group: sum(map(self.seconds.__getitem__, group)))
        alone.sort(key=lambda test: (not test.startswith(near), self.seconds[test]))
        return [*alone, *(test for group in together for test in group)]


class Moved:
    """Finds lines of a file in an older text of it."""

    def __init__(self, old: str, new: str):
        matches = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False)
        self.old = {
            block.b + index + 1: block.a + index + 1
            for block in matches.get_matching_blocks()
            for index in range(block.size)
        }

    def before(self, line: int) -> int:
        """Return the number of this line in the old text, or 0 if it was not there."""
        return self.old.get(line, 0)
