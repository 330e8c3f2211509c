"""Which callbacks a run has."""

import importlib
import pkgutil

import engine
from engine.train.callback import Callback
from tests.support.modules import ROOT


def test_every_callback_is_added_to_a_run():
    for module in pkgutil.walk_packages(engine.__path__, "engine."):
        importlib.import_module(module.name)
    added, kinds = (ROOT / "engine/callback_list.py").read_text(encoding="utf-8"), [Callback]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds[1:]:
        is_ours = kind.__module__.startswith("engine.") and not kind.__subclasses__()
        assert not is_ours or f"{kind.__name__}(" in added or f"{kind.__name__}.on(" in added, (
            f"engine/callback_list.py: no line adds {kind.__name__} of {kind.__module__}"
        )
