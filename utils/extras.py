"""Finds extras: the files and folders in extras/, which a user may delete (extras/__init__.py)."""

import ast
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "extras"


def has_extra(name: str) -> bool:
    return find_missing(name) is None


def find_missing(name: str) -> str | None:
    """Return the name of the extra if it is missing, or of a missing extra that it needs, or None if it can be used."""
    path = first_file(name)
    if path is None:
        return name
    return next(filter(None, map(find_missing, needs_of(path))), None)


def first_file(name: str) -> Path | None:
    """Return the file of an extra, or its folder's __init__.py, or None if the extra is missing."""
    files = FOLDER / f"{name}.py", FOLDER / name / "__init__.py"
    return next((path for path in files if path.is_file()), None)


def needs_of(path: Path) -> Sequence[str]:
    """Return the extras that an extra lists in NEEDS. Its file is parsed, not imported."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDS":
            return ast.literal_eval(node.value)
    return ()


def how_to_get_back(name: str) -> str:
    """Return the message for a missing extra that the user asked for."""
    return f"extras/{name} is missing; get it back with: git checkout HEAD -- 'extras/{name}*'"
