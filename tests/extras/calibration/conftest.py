"""Fixtures: a calibrated run on the digits, and the digits as files."""

import pytest

from tests.scripts.conftest import digits  # noqa: F401
from tests.support.configs import CONVOLUTIONS
from tests.support.runs import run, run_folder


@pytest.fixture(scope="session")
def convolutions(tmp_path_factory):
    """Return a YAML file with the settings above."""
    path = tmp_path_factory.mktemp("settings") / "convolutions.yaml"
    path.write_text(CONVOLUTIONS)
    return path


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory, convolutions):
    """Return the folder of a run with the settings above, including its report."""
    output = tmp_path_factory.mktemp("calibrated")
    flags = ["-cfg", str(convolutions), "-output", str(output), "-opts", "REPORT=true"]
    run("main_single_gpu.py", *flags, faults={"draw_no_curves": []}).done()
    return run_folder(output)
