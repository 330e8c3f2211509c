"""Settings whose compiled training has the losses of the eager one."""

from pathlib import Path

import pytest

from tests.support.configs import small_config
from tests.support.trainers import Reports, make_trainer, train

LISTS = "PRECISION.CUSTOM_BLACK_LIST=[blocks.0.mlp] PRECISION.CUSTOM_WHITE_LIST=[LayerNorm]"
MODES = {  # each scope and each option that changes the forward is in one of these cases
    "float32, checkpointed blocks": "COMPILE=blocks TRAIN.GRAD_CHECKPOINTING=true",
    "float16 with lists, residual in "
    "half": f"AMP=true PRECISION.DTYPE=float16 PRECISION.RESIDUAL=half COMPILE=true {LISTS}",
    "naive": "AMP=true PRECISION.MODE=naive PRECISION.DTYPE=bfloat16 COMPILE=true",
}


def assert_compiled_losses_match(folder: Path, case: str) -> None:
    """Train an epoch compiled and eagerly, and compare the losses of all updates."""
    # With this rate, weights that are never updated change the losses by 1.6% or more in each case.
    recipe = ["DATA.BATCH_SIZE=90", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=3e-2", "REPORT_FREQ=1"]
    options = [*MODES[case].split(), *recipe]
    losses = {}
    for compiled in (True, False):
        reports = Reports()
        trainer = make_trainer(small_config(folder, *options, *["COMPILE=false"][compiled:]), callbacks=[reports])
        train(trainer)
        losses[compiled] = [report.loss for report in reports.seen]
    assert len(losses[True]) == trainer.data.steps_per_epoch
    assert losses[True] == pytest.approx(losses[False], rel=1e-5 if "float32" in case else 1e-3)
