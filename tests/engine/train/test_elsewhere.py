"""Training on a device other than the host: the same numbers, and nothing in an update that the host has to wait for."""

import pytest
import torch

from engine.diagnose.failing_batch import LastUpdate
from engine.report.timing import Timing
from engine.train.stop_conditions import SkipLimit
from tests.support.configs import CPU, small_config
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.trainers import make_trainer, update

HALF = "AMP=true"
MODES = {
    "float32": "",
    "bfloat16": HALF,
    "float16": f"{HALF} PRECISION.DTYPE=float16",
    "naive bfloat16": f"{HALF} PRECISION.MODE=naive",
    "naive float16": f"{HALF} PRECISION.MODE=naive PRECISION.DTYPE=float16",
    "mixup and cutmix": "TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1",
    "erasing": "TRAIN.RANDOM_ERASE_PROB=0.5",
    "EMA": "TRAIN.MODEL_EMA=true",
    "accumulation": "TRAIN.ACCUM_ITER=2",
    "no clipping": "TRAIN.GRAD_CLIP=null",
    "SGD": "TRAIN.OPTIMIZER.NAME=SGD",
    "activation checkpointing": "TRAIN.GRAD_CHECKPOINTING=true",
    "op lists": f"{HALF} PRECISION.CUSTOM_BLACK_LIST=[softmax] PRECISION.CUSTOM_WHITE_LIST=[layer_norm]",
    "half residual": f"{HALF} PRECISION.RESIDUAL=half",
}


@on_pretend_device
def test_the_device_counts_what_the_host_waits_for_and_refuses_to_mix():
    ones, here = torch.ones(3, device=DEVICE), torch.zeros(3, pin_memory=True)
    with waits() as seen:
        there = here.to(DEVICE, non_blocking=True)
        there.copy_(here, non_blocking=True)
        here.copy_((ones + there)[torch.arange(3, device=DEVICE)], non_blocking=True)
    assert seen == {} and here.tolist() == [0, 0, 0]
    with waits() as seen:
        torch.accelerator.current_stream(DEVICE).synchronize()
    assert seen == {"synchronize": 1} and here.tolist() == [1, 1, 1]
    with waits() as seen:
        values = ones.tolist(), ones.cpu().tolist(), ones.sum().item(), len(ones.nonzero()), len(ones[ones > 0])
        here.to(DEVICE)
        torch.zeros(3).to(DEVICE, non_blocking=True)
        torch.zeros(3).copy_(ones, non_blocking=True)
    assert values == ([1, 1, 1], [1, 1, 1], 3, 3, 3)
    assert seen == {"tolist": 1, "blocking copy": 4, "item": 1, "nonzero": 1, "index": 1}
    with pytest.raises(RuntimeError, match="a tensor of the host"):
        ones + here


@pytest.mark.parametrize("mode", MODES)
@on_pretend_device
def test_an_update_waits_for_nothing_and_computes_what_the_host_does(tmp_path, mode):
    config = small_config(tmp_path, *MODES[mode].split(), "TRAIN.WARMUP_EPOCHS=0")
    trainer = make_trainer(config, device=torch.device(DEVICE))
    trainer.callbacks = [Timing.on(CPU), LastUpdate(), SkipLimit(50, str)]
    with waits() as seen:
        update(trainer, 3)
    assert seen == {}
    here, there = update(make_trainer(config), 3).report(), trainer.report()
    assert (there.loss, there.grad_norm) == pytest.approx((here.loss, here.grad_norm), rel=2e-3)
