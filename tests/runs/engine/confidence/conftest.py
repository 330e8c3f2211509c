"""Fixtures: a calibrated run on the digits, and the digits as files."""

import pytest

from tests.commands.conftest import digits  # noqa: F401
from tests.support.configs import CONVOLUTIONS, beginning_with_weights
from tests.support.runs import run_folder, typed


@pytest.fixture(scope="session")
def convolutions(tmp_path_factory):
    """Return a YAML file with these settings, whose runs begin with weights of a file."""
    path = tmp_path_factory.mktemp("settings") / "convolutions.yaml"
    path.write_text(CONVOLUTIONS)
    return beginning_with_weights(path)


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory, convolutions):
    """Return the folder of a run with the settings above, including its report."""
    output = tmp_path_factory.mktemp("calibrated")
    flags = ["-cfg", str(convolutions), "-output", str(output), "-epochs", "8", "-opts", "REPORT=true"]
    typed("main_single_gpu.py", *flags, faults={"judge_no_labels": []}).done()
    return run_folder(output)
