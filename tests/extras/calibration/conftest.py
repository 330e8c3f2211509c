"""Fixtures: a calibrated run on the digits, and the digits as files."""

import pytest

from tests.scripts.conftest import digits  # noqa: F401
from tests.support.runs import run, run_folder

# A model that classifies 9 of 10 digits correctly after one epoch.
CONVOLUTIONS = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.8, 1], BATCH_SIZE: 32, NUM_WORKERS: 0}
MODEL: {TYPE: timm, NAME: test_resnet}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, SMOOTHING: 0, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
TRACK: []
REPORT: false
"""


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
