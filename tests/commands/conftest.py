"""A model trained on the digits, and the digits as files."""

import pytest
from PIL import Image

from tests.support.configs import ema, small_config
from tests.support.opened import open_sets
from tests.support.runs import run, run_folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml):
    """Return the folder of a run of one epoch with EMA weights, which predicts without a calibration."""
    output = tmp_path_factory.mktemp("trained")
    flags = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "1", "-batch_size", "8", "-amp"]
    run("main_single_gpu.py", *flags, "-opts", *ema(0.8), "CALIBRATE=false").done()
    return run_folder(output)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Write the validation digits to DIGIT/NUMBER.png."""
    folder = tmp_path_factory.mktemp("digits")
    _, images = open_sets(small_config(folder))
    for index, target in enumerate(images.targets):
        path = folder / images.classes[target] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(images.read(index)[:, :, 0]).save(path)
    return folder
