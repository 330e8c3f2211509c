"""The modules that a file of the project imports, read from its text."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def imported(path: Path, also_names: bool = False) -> set[str]:
    """Full names of all modules that a file imports, wherever in it; `also_names`: and of what it takes out of them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {
                f"{node.module}.{alias.name}" for alias in node.names if also_names or is_module_of_ours(node, alias)
            }
    return names


def is_module_of_ours(node: ast.ImportFrom, alias: ast.alias) -> bool:
    """from utils import errors"""
    place = ROOT / node.module.replace(".", "/") / alias.name
    return place.with_suffix(".py").exists() or place.is_dir()
