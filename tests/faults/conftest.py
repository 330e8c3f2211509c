"""What tests of faults share: runs that start at once, and the settings of a run that is over in moments."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

# Four updates an epoch, with what draws random numbers or remembers something. The one evaluation is of the best epoch.
TINY = """
DATA: {DATASET: synthetic, SYNTHETIC_SIZE: 64, IMAGE_SIZE: 8, BATCH_SIZE: 8, BATCH_SIZE_EVAL: 64, NUM_WORKERS: 0}
MODEL: {TYPE: vit, PATCH_SIZE: 4, EMBED_DIM: 8, DEPTH: 1, NUM_HEADS: 1, NUM_CLASSES: 4, DROPPATH: 0.2, DROPOUT: 0.1}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 1e-3, MODEL_EMA: true, MODEL_EMA_DECAY: 0.5, ACCUM_ITER: 2}
TENSORBOARD: false
REPORT_FREQ: 1
VALIDATE_FREQ: 2
SAVE_FREQ: 1
KEEP_CHECKPOINTS: 1
"""

Start = Callable[..., dict]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The settings of such a run."""
    path = tmp_path_factory.mktemp("faults") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def start(tiny) -> Iterator[Start]:
    """start(output, *flags, fault=arguments) -> {"code", "told"} of a run in a process of its own."""
    flags = ["-cfg", str(tiny), "-amp"]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.forked", *flags, "-epochs", "1", "-output", str(tiny.parent / "first")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:

        def ask(output: Path, *more: str, **faults: list) -> dict:
            asked = {"flags": [*flags, "-resume", "auto", "-output", str(output), *more], "faults": faults}
            print(json.dumps(asked), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())

        yield ask
