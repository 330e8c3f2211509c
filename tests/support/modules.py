"""Finds the modules that a file of the project imports, by parsing its text."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path, also_names: bool = False) -> set[str]:
    """Return the full names of all modules that a file imports. `also_names`: also return names imported from them."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {
                f"{node.module}.{alias.name}" for alias in node.names if also_names or is_module_of_ours(node, alias)
            }
    return names


def bound_names(path: Path) -> set[str]:
    """Return the full name of each module, function and class that a file imports by name."""
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".") for node in nodes for alias in node.names}


def imported_at_the_top(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports at its top level."""
    names = set()
    nodes = list(parsed(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_for_types(node):
            nodes += ast.iter_child_nodes(node)
    return names


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_module_of_ours(node: ast.ImportFrom, alias: ast.alias) -> bool:
    """Return whether the imported name is a module of the project, as in `from utils import errors`."""
    place = ROOT / node.module.replace(".", "/") / alias.name
    return place.with_suffix(".py").exists() or place.is_dir()
