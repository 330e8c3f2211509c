"""Blocks of code and commands in the pages of the project, which tests run."""

import re
from collections.abc import Sequence
from pathlib import Path


def block_of(path: Path, line: str) -> str:
    """Return the block of Python code in a page that contains this line."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    return next(block for block in blocks if line in block)


# {command of halfstep: the flags that it adds to those of train}
ADDED = {"train": [], "check": ["-check"], "evaluate": ["-eval", "-pretrained"], "resume": ["-resume"]}


def script_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script and the arguments of a command, `python scripts/x.py ...` or `halfstep x ...`."""
    program, command, *words = words
    if program == "python":
        return command, words
    assert program == "halfstep", program
    if command not in ADDED:
        return f"scripts/{command.replace('-', '_')}.py", words
    if command == "resume" and (not words or words[0].startswith("-")):
        words = ["auto", *words]
    return "main_multi_gpu.py" if "-ngpus" in words else "main_single_gpu.py", [*ADDED[command], *words]
