"""Runs commands one after another, in a Python that sees only the packages of requirements.txt and their dependencies.

    python -m tests.support.programs.newcomer RESULTS.json COMMAND ...

Each `python FILE ...` runs in a fork of this process, any other command in a shell. RESULTS.json gets the exit codes.
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.forks import ROOT, run_to_the_end


def closure(lines: list[str]) -> set[str]:
    """Return the names of these requirements and of everything that they require."""
    found, left = set(), [Requirement(line) for line in lines if line and not line.startswith("#")]
    while left:
        each = left.pop()
        name = canonicalize_name(each.name)
        if name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(name)
            left += map(Requirement, importlib.metadata.requires(name) or ())
    return found


class WithoutModules:
    """A finder of modules that does not find some of them."""

    def __init__(self, finder: Any, hidden: set[str]):
        self.finder, self.hidden = finder, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, path, target)


def hide_other_packages() -> None:
    known = closure((ROOT / "requirements.txt").read_text().splitlines())
    owners = importlib.metadata.packages_distributions().items()
    hidden = {module for module, names in owners if not known & {*map(canonicalize_name, names)}}
    sys.meta_path[:] = [WithoutModules(finder, hidden) for finder in sys.meta_path]


def exit_code_of(command: str) -> int:
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] != "python":
            code = subprocess.run(part, shell=True).returncode
        elif pid := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            run_to_the_end(str(ROOT / words[1]), words[2:], dict(os.environ), {})
        if code:
            return code
    return 0


if __name__ == "__main__":
    results, *commands = sys.argv[1:]
    hide_other_packages()
    import tests.support.preloaded  # noqa: F401

    codes = []
    for each in commands:
        print(f"$ {each}", flush=True)
        codes.append(exit_code_of(each))
    Path(results).write_text(json.dumps(codes))
    os._exit(0)
