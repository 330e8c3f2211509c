"""Fixtures for tests of faults: a function that starts runs, settings for a very short run, and a few images."""

import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.image_sets import make_folders
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, run_folder, typed

# Four updates per epoch, with random numbers and state between updates. The only evaluation is at the last epoch.
TINY = """
DATA: {DATASET: synthetic, SYNTHETIC_SIZE: 64, IMAGE_SIZE: 8, BATCH_SIZE: 8, BATCH_SIZE_EVAL: 64, NUM_WORKERS: 0}
MODEL: {TYPE: vit, PATCH_SIZE: 4, EMBED_DIM: 8, DEPTH: 1, NUM_HEADS: 1, NUM_CLASSES: 4, DROPPATH: 0.2, DROPOUT: 0.1}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 1e-3, MODEL_EMA: true, MODEL_EMA_DECAY: 0.5, ACCUM_ITER: 2}
TRACK: []
REPORT: false
REPORT_FREQ: 1
VALIDATE_FREQ: 2
SAVE_FREQ: 1
KEEP_CHECKPOINTS: 1
"""

Start = Callable[..., Ended]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Return a file with these settings."""
    path = tmp_path_factory.mktemp("faults") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def start(tiny) -> Start:
    """Return start(output, *flags, processes=1, fault=arguments), which runs these settings with planted faults."""

    def start(output: Path, *flags: str, processes: int = 1, **faults: list) -> Ended:
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        flags = ["-cfg", str(tiny), "-amp", "-resume", "auto", "-output", str(output), *flags]
        return typed(script, *flags, processes=processes, faults={"draw_nothing": []} | faults)

    return start


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory, start) -> Callable[..., str]:
    """Return a function that runs these flags without interruption and returns the hash."""

    @functools.cache
    def train(*flags: str, processes: int = 1) -> str:
        output = tmp_path_factory.mktemp("unbroken")
        start(output, *flags, processes=processes).done()
        return run_hash(run_folder(output))

    return train


@pytest.fixture
def photos(tmp_path) -> Path:
    """Return 200 training images, 2 of them (1%) unreadable, and 4 validation images."""
    make_folders(tmp_path / "photos/train", {"ant": 100, "bee": 100})
    make_folders(tmp_path / "photos/val", {"ant": 2, "bee": 2})
    cut = tmp_path / "photos/train/ant/07.JPEG"
    cut.write_bytes(cut.read_bytes()[:50])
    (tmp_path / "photos/train/bee/42.JPEG").write_bytes(b"no picture")
    return tmp_path / "photos"


def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a small disk, or skip the test if the system does not allow it."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", folder]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted(tmp_path / "disk", "size=4m")


@pytest.fixture
def read_only_disk(tmp_path):
    yield from mounted(tmp_path / "disk", "size=1m,ro")
