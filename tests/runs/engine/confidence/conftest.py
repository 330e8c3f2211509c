"""Fixtures: calibrated runs on the digits, one of which is the same on every processor, and the digits as files."""

import numpy as np
import pytest
from PIL import Image

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


@pytest.fixture(scope="session")
def unmoved(tmp_path_factory):
    """Return the folder of a calibrated run whose weights no update moves: random ones with a fitted classifier.

    A training multiplies rounding errors, so its accuracy and its features depend on the processor. Here the best epoch
    is 0. The later ones are far worse, because batch normalization then has the statistics of some training images.
    """
    output = tmp_path_factory.mktemp("unmoved")
    (output / "settings.yaml").write_text(CONVOLUTIONS)
    settings = beginning_with_weights(output / "settings.yaml", num_classes=3)  # a classifier for 10 is fitted
    flags = ["-cfg", str(settings), "-output", str(output / "runs"), "-epochs", "2", "-opts", "TRAIN.BASE_LR=0"]
    typed("main_single_gpu.py", *flags, "MODEL.NEW_CLASSIFIER=linear", faults={"judge_no_labels": []}).done()
    return run_folder(output / "runs")


@pytest.fixture
def noise(tmp_path):
    """Write images of random black and white pixels, and return their paths."""
    rng, paths = np.random.default_rng(0), [tmp_path / f"noise{number}.png" for number in range(20)]
    for path in paths:
        Image.fromarray(255 * rng.integers(0, 2, (8, 8), dtype=np.uint8)).save(path)
    return paths
