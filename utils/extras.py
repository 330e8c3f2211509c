"""Which extras are there: the files and folders of extras/ that a user may delete (extras/__init__.py)."""

import ast
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "extras"


def has_extra(name: str) -> bool:
    return find_missing(name) is None


def find_missing(name: str) -> str | None:
    """The name of this extra, or of one that it needs, if it is not there. None: it can be used."""
    path = first_file(name)
    if path is None:
        return name
    return next(filter(None, map(find_missing, needs_of(path))), None)


def first_file(name: str) -> Path | None:
    """The file of an extra, or the first one of its folder; None: there is neither."""
    files = FOLDER / f"{name}.py", FOLDER / name / "__init__.py"
    return next((path for path in files if path.is_file()), None)


def needs_of(path: Path) -> Sequence[str]:
    """The extras that an extra names in NEEDS. Its file is read and not imported."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDS":
            return ast.literal_eval(node.value)
    return ()


def how_to_get_back(name: str) -> str:
    """What to say where an extra that is missing was asked for."""
    return f"extras/{name} is missing; get it back with: git checkout HEAD -- 'extras/{name}*'"
