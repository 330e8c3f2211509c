"""Blocks of code in the pages of the project, which tests run."""

import re
from pathlib import Path


def block_of(path: Path, line: str) -> str:
    """Return the block of Python code in a page that contains this line."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S)
    return next(block for block in blocks if line in block)
