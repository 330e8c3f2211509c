"""Tests and cases of the program that also use an extra."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from utils.extras import has_extra


def needing_extra(name: str) -> pytest.MarkDecorator:
    """Skip a test or a case if this extra was deleted."""
    return pytest.mark.skipif(not has_extra(name), reason=f"extras/{name} is not there")


OF_CONFIGS = {"lora": "lora", "deit3_small_patch16_224": "optimizers", "deit3_base_patch16_192": "optimizers"}


def configs_with_extras(names: Iterable[str | Path]) -> list[ParameterSet]:
    """The settings files in configs/, by name or path, each with the mark of the extra that it asks for."""
    marks = {name: needing_extra(extra) for name, extra in OF_CONFIGS.items()}
    stems = {name: name.stem if isinstance(name, Path) else name for name in names}
    return [pytest.param(name, marks=marks.get(stem, ()), id=stem) for name, stem in stems.items()]
