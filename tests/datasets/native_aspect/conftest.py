"""Fixtures: a folder with photos of many shapes, and a function that starts runs on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.datasets.native_aspect.photos import written
from tests.support.runs import Ended, run


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Return a folder with `photos` and the settings file native.yaml."""
    folder = tmp_path_factory.mktemp("native")
    written(folder)
    return folder


@pytest.fixture(scope="session")
def start(folder) -> Callable[..., Ended]:
    """Return start(output, *options, processes=1, fault=arguments), which runs an epoch with these `-opts` words."""

    def start(output: Path, *options: str, processes: int = 1, **faults: list) -> Ended:
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        flags = ["-cfg", str(folder / "native.yaml"), "-output", str(output), "-epochs", "1"]
        opts = ["-opts", *options] if options else []
        return run(script, *flags, *opts, processes=processes, faults=faults)

    return start
