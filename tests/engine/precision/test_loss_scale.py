"""The loss scale of a resumed run is the one that it was saved with, and moves when it would have."""

import io

import pytest
import torch

from tests.support.configs import small_config
from tests.support.trainers import make_trainer, update

# Four good updates in a row double the scale; three overflows in a row halve it.
OPTIONS = ("AMP=true", "PRECISION.DTYPE=float16", "PRECISION.INIT_LOSS_SCALING=1024", "PRECISION.INCR_EVERY_N_STEPS=4")
OPTIONS += ("PRECISION.DECR_EVERY_N_NAN_OR_INF=3", "PRECISION.DECR_RATIO=0.5")


def overflow(trainer, times: int) -> None:
    hook = trainer.parameters[0].register_hook(lambda grad: grad * float("inf"))
    update(trainer, times)
    hook.remove()


def scale(trainer) -> float:
    return trainer.precision.scaler.get_scale()


@pytest.mark.parametrize(
    ("before", "go_on", "then"),
    [
        (lambda trainer: update(trainer, 2), lambda trainer: update(trainer, 2), 4096),
        (lambda trainer: overflow(trainer, 1), lambda trainer: overflow(trainer, 2), 1024),
    ],
)
def test_scale_and_both_counters_of_float16_go_through_a_checkpoint(tmp_path, before, go_on, then):
    config = small_config(tmp_path, *OPTIONS)
    trainer, file = make_trainer(config), io.BytesIO()
    update(trainer, 4)
    before(trainer)
    torch.save(trainer.state_dict(), file)
    file.seek(0)
    resumed = make_trainer(config)
    assert scale(resumed) == 1024
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert scale(resumed) == scale(trainer) == 2048
    for each in (trainer, resumed):
        go_on(each)
    assert scale(resumed) == scale(trainer) == then
