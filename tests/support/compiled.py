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
    compiled, eager = losses_of(folder, case), losses_of(folder, case, "COMPILE=false")
    if "bfloat16" in MODES[case]:
        # Compiled kernels round less often. On some processors this changes the losses by more than 1e-3, but they are
        # as near to those of float32.
        exact = losses_of(folder, case, "COMPILE=false", "AMP=false")
        error = max(abs(one - other) for one, other in zip(eager, exact, strict=True))
        assert compiled == pytest.approx(exact, abs=2 * error) and error < 0.01
    else:
        assert compiled == pytest.approx(eager, rel=1e-5 if "float32" in case else 1e-3)


def losses_of(folder: Path, case: str, *more: str) -> list[float]:
    # With this rate, weights that are never updated change the losses by 1.6% or more in each case.
    recipe = ["DATA.BATCH_SIZE=90", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=3e-2", "REPORT_FREQ=1"]
    reports = Reports()
    trainer = make_trainer(small_config(folder, *MODES[case].split(), *recipe, *more), callbacks=[reports])
    train(trainer)
    losses = [report.loss for report in reports.seen]
    assert len(losses) == trainer.data.steps_per_epoch
    return losses
