"""Runs commands one after the other, in a Python that sees only the packages of requirements.txt and their dependencies.

    python -m tests.support.programs.newcomer RESULTS.json COMMAND ...

Each `python FILE ...` runs in a fork of this process, any other command in a shell. RESULTS.json gets the exit codes.
"""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

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


class Hidden:
    """An import hook that finds no module of other distributions."""

    def __init__(self, known: set[str]):
        owners = importlib.metadata.packages_distributions().items()
        self.modules = {module for module, names in owners if not known & {*map(canonicalize_name, names)}}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


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
    sys.meta_path.insert(0, Hidden(closure((ROOT / "requirements.txt").read_text().splitlines())))
    import tests.support.preloaded  # noqa: F401

    codes = []
    for each in commands:
        print(f"$ {each}", flush=True)
        codes.append(exit_code_of(each))
    Path(results).write_text(json.dumps(codes))
    os._exit(0)
