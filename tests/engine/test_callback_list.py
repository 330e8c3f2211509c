"""Which callbacks a run has."""

import ast
import importlib
import pkgutil

import engine
import extras
from engine.train.callback import Callback
from tests.support.modules import ROOT


def test_every_callback_is_added_to_a_run():
    """engine/callback_list.py adds those of the program, and calls the functions of extras that return theirs."""
    for package in (engine, extras):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    added, kinds = (ROOT / "engine/callback_list.py").read_text(encoding="utf-8"), [Callback]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds[1:]:
        room, *names = kind.__module__.split(".")
        if room not in ("engine", "extras") or kind.__subclasses__():
            continue
        made = added + (text_of_extra(names[0]) if room == "extras" and f"extras.{names[0]}" in added else "")
        assert f"{kind.__name__}(" in made or f"{kind.__name__}.on(" in made, (
            f"engine/callback_list.py: no line adds {kind.__name__} of {kind.__module__}"
        )


def text_of_extra(name: str) -> str:
    """The calls in an extra's files, without the definitions of its classes."""
    folder = ROOT / "extras" / name
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return "\n".join(ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
