"""The doctor on the pretend device."""

import pytest
import torch

from extras.doctor.in_runs import AutoDoctor, LastUpdate
from tests.support.configs import small_config
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.trainers import Lines, make_trainer, update

pytestmark = pytest.mark.slow

HALF = "AMP=true"


@on_pretend_device
def test_doctor_adds_no_sync_to_an_update(tmp_path):
    config, last_update = small_config(tmp_path, HALF), LastUpdate()
    callbacks = [last_update, AutoDoctor(config, tmp_path, Lines(), last_update)]
    trainer = make_trainer(config, callbacks=callbacks, device=torch.device(DEVICE))
    with waits() as seen:
        update(trainer, 2)
    assert seen == {}


@on_pretend_device
def test_doctor_gives_the_same_advice_on_device_and_host(tmp_path):
    config = small_config(tmp_path, HALF, "PRECISION.DTYPE=float16", "PRECISION.MAX_CONSECUTIVE_SKIPS=1")
    said = {}
    for device in ("cpu", DEVICE):
        last_update, lines = LastUpdate(), Lines()
        doctor = AutoDoctor(config, tmp_path, lines, last_update)
        trainer = make_trainer(config, callbacks=[last_update, doctor], device=torch.device(device))
        with torch.no_grad():
            trainer.model.blocks[1].mlp.fc1.weight.mul_(2e6)
        trainer.notify("on_report", update(trainer).report())
        assert lines.warned == []
        said[device] = doctor.get_advice()
    assert said["cpu"] == said[DEVICE] and "blocks.1.mlp" in said[DEVICE]
