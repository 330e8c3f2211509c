"""Fixtures: a folder with photos of many shapes, and functions that start runs on them."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.extras.native_aspect.photos import written
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, run, run_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Return a folder with `photos` and the settings file native.yaml."""
    folder = tmp_path_factory.mktemp("native")
    written(folder)
    return folder


@pytest.fixture(scope="session")
def start(folder) -> Callable[..., Ended]:
    """Return start(output, *flags, processes=1, fault=arguments), which runs the settings with planted faults."""

    def start(output: Path, *flags: str, processes: int = 1, **faults: list) -> Ended:
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        flags = ["-cfg", str(folder / "native.yaml"), "-resume", "auto", "-output", str(output), *flags]
        return run(script, *flags, processes=processes, faults={"draw_nothing": []} | faults)

    return start


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, start) -> Callable[..., str]:
    """Return a function that trains with the given flags, without interruption, and returns the hash of the run."""

    @functools.cache
    def train(*flags: str, processes: int = 1) -> str:
        output = tmp_path_factory.mktemp("unbroken")
        start(output, *flags, processes=processes).done()
        return run_hash(run_folder(output))

    return train
