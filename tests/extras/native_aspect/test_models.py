"""Models of DATA.TOKENS in the other parts of a run: the doctor, deterministic kernels, teachers, memory and messages."""

import pytest
import torch

from tests.support.extras import needing_extra
from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder, typed

pytestmark = pytest.mark.slow

# The doctor


@needing_extra("doctor")
def test_doctor_replays_saved_batch_of_a_stopped_run(folder, tmp_path):
    words = [
        "-cfg",
        str(folder / "native.yaml"),
        "-output",
        str(tmp_path / "o"),
        "-amp",
        "-amp_dtype",
        "float16",
        "-opts",
    ]
    options = "TRAIN.BASE_LR=1000 DATA.TRAIN_TOKENS=[12] PRECISION.MAX_CONSECUTIVE_SKIPS=2 TRAIN.RANDOM_ERASE_PROB=0.5"
    stopped = run("main_single_gpu.py", *words, *options.split())
    assert stopped.returncode == 3 and "python scripts/doctor.py" in stopped.stdout, stopped.printed
    saved = run_folder(tmp_path / "o")
    said = typed("scripts/doctor.py", saved).done().stdout
    assert_names(said, "process 0: 8 images", "first: embeds.proj")
    state = torch.load(saved / "overflow-batch.pth", weights_only=True)
    torch.save(state | {"images": torch.zeros((8, 3, 8, 8), dtype=torch.uint8)}, saved / "overflow-batch.pth")
    ended = typed("scripts/doctor.py", saved)
    ended.refused("-batch", "DATA.TOKENS", page="extras/native_aspect/mistakes_of_models", case="doctor.py")
