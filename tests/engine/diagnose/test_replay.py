"""A replay is of the update that failed, its scale leaves room, and each streak of skipped updates is examined anew."""

import math
from types import SimpleNamespace

import pytest
import torch

from engine.diagnose import overflow
from engine.diagnose.doctor import Diagnosis, best_scale, replay
from engine.diagnose.overflow import AutoDoctor, LastUpdate, make_case
from tests.support.configs import replaced, small_config
from tests.support.trainers import Lines, make_trainer, train, update
from utils.seed import seed_update


def test_a_replay_has_the_dropout_of_the_update_that_failed(tmp_path):
    config = small_config(tmp_path, "AMP=true", "PRECISION.DTYPE=float16", "MODEL.DROPOUT=0.5")
    last = LastUpdate()
    trainer = update(make_trainer(config, callbacks=[last]), 3)
    case = make_case(config, trainer.model, trainer.prepare, last.batches(0), 1.0, trainer.loss)
    assert case.seed == (config.SEED, 2, 0)
    seen = []
    case.loss = lambda logits, targets: seen.append(logits.detach()) or logits.sum()
    seed_update(7, 7, 7)
    replay(case, in_half=False, scale=1.0)
    seed_update(*case.seed)
    with torch.no_grad():
        expected = [case.model.train()(images) for images, _, _ in case.batches]
    assert all(map(torch.equal, seen, expected)) and len(seen) == len(expected)


@pytest.mark.parametrize("largest", [3.0, 1e-3, 20_000.0])
def test_the_largest_gradient_stays_a_factor_of_two_below_the_end_of_float16(largest):
    exact = SimpleNamespace(gradients={"one": (None, largest), "two": (None, largest / 9), "in float32": (None, 1e9)})
    scale = best_scale(exact, SimpleNamespace(in_half={"one", "two"}), torch.float16)
    assert scale * largest <= 65504 / 2 < 2 * scale * largest and math.log2(scale) % 1 == 0


def test_a_streak_after_a_rollback_is_examined_anew(tmp_path, monkeypatch):
    config = replaced(small_config(tmp_path, "AMP=true"), PRECISION={"DTYPE": "float16"})
    last, log, found = LastUpdate(), Lines(), []
    monkeypatch.setattr(overflow, "diagnose", lambda case: found.append(1) or Diagnosis(torch.float16, len(found)))
    doctor = AutoDoctor(config, tmp_path, log, last)
    trainer = make_trainer(config, callbacks=[last])
    report = train(trainer)
    report.skips_in_a_row = 10
    doctor.on_report(trainer, report)
    doctor.on_report(trainer, report)
    assert len(found) == 1 and doctor.get_advice()
    doctor.on_rollback(trainer)
    assert not doctor.get_advice()
    doctor.on_report(trainer, report)
    assert len(found) == 2
