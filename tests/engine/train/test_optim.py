"""The learning rate, and the states of torch's own optimizers."""

import dataclasses
import math

import pytest
import torch
import yaml

from engine.train.schedule import Schedule
from tests.support.configs import small_config
from tests.support.optimizers import Learner
from tests.support.printed import cases_of, same_message


@pytest.fixture
def train(tmp_path):
    config = small_config(tmp_path, "TRAIN.NUM_EPOCHS=300", "TRAIN.WARMUP_EPOCHS=32", "TRAIN.BASE_LR=3e-3")
    return config.TRAIN


def with_scheduler(train, **values):
    return dataclasses.replace(train, LR_SCHEDULER=dataclasses.replace(train.LR_SCHEDULER, **values))


@pytest.mark.parametrize("epoch, expected", [(1, 9.471875e-05), (32, 3e-3), (300, 0.0)])
def test_paddlevit_schedule_matches_paddlevit_throughout_an_epoch(train, epoch, expected):
    schedule = Schedule(with_scheduler(train, NAME="paddlevit"), steps_per_epoch=10, global_batch=1)
    for step in (10 * (epoch - 1), 10 * epoch - 1):
        assert schedule(step) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_default_schedule_changes_every_step_down_to_the_end_rate(train, end):
    schedule = Schedule(dataclasses.replace(train, END_LR=end), steps_per_epoch=10, global_batch=1)
    rates = [schedule(step) for step in range(3001)]
    assert rates[0] == pytest.approx(1e-6)
    assert rates[320] == pytest.approx(3e-3)
    assert all(a < b for a, b in zip(rates[:320], rates[1:321], strict=True))
    assert all(a > b for a, b in zip(rates[320:3000], rates[321:], strict=True))
    assert rates[3000] == pytest.approx(end, abs=1e-12)
    assert rates[1660] == pytest.approx((3e-3 + end) / 2)  # halfway down the cosine


@pytest.mark.parametrize("case", cases_of("rates_after_the_warm_up"))
def test_schedule_rates_after_warm_up_match_the_printed_page(train, case):
    settings, _, epochs = case.partition(" at ")
    schedule = Schedule(with_scheduler(train, **yaml.safe_load(f"{{{settings}}}")), steps_per_epoch=10, global_batch=1)
    rates = (f"{schedule(10 * int(epoch)):.6g}" for epoch in epochs.split())
    same_message(" ".join(rates), "rates_after_the_warm_up", case)
    assert Schedule(dataclasses.replace(train, WARMUP_EPOCHS=0), 10, global_batch=1)(0) == 3e-3


@pytest.mark.parametrize("scaling, stated_for", [("linear", 512), ("sqrt", 256)])
def test_batch_size_scaling_applies_to_start_base_and_end_rate(train, scaling, stated_for):
    train = dataclasses.replace(train, LINEAR_SCALED_LR=stated_for, LR_SCALING=scaling, END_LR=1e-5)
    scaled = Schedule(train, 10, global_batch=1024)
    assert (scaled.start, scaled.base, scaled.end) == pytest.approx((2e-6, 6e-3, 2e-5))


TIMMS = [  # arguments of timm's create_scheduler_v2, and our settings for the same rates
    ({"warmup_epochs": 5, "min_lr": 1e-5}, {"AFTER_WARMUP": False, "PER_EPOCH": True}),  # DeiT's schedule
    ({"warmup_epochs": 5, "min_lr": 1e-5, "step_on_epochs": False}, {"AFTER_WARMUP": False}),
    (
        {"warmup_epochs": 5, "min_lr": 1e-5, "cooldown_epochs": 10},
        {"AFTER_WARMUP": False, "PER_EPOCH": True, "COOLDOWN_EPOCHS": 10},
    ),
    *(
        (
            {"sched": name, "warmup_epochs": 5, "step_on_epochs": is_per_epoch, "warmup_prefix": is_after} | timms,
            {"NAME": "step", "PER_EPOCH": is_per_epoch, "AFTER_WARMUP": is_after} | ours,
        )
        for name, timms, ours, kinds in (
            ("step", {"decay_epochs": 2.4, "decay_rate": 0.9}, {"DECAY_EPOCHS": 2.4, "DECAY_RATE": 0.9}, (True, False)),
            ("multistep", {"decay_milestones": [1, 9]}, {"MILESTONES": (0, 8), "DECAY_RATE": 0.1}, (True,)),
        )
        for is_per_epoch in kinds
        for is_after in (True, False)
    ),
]


@pytest.mark.parametrize("timms, ours", TIMMS)
def test_learning_rates_match_timm_in_every_update(train, timms, ours):
    from timm.scheduler import create_scheduler_v2

    length, per_epoch = 40, 5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    epochs = length - ours.get("COOLDOWN_EPOCHS", 0) - 5 * timms.get("warmup_prefix", False)
    chosen = {"num_epochs": epochs, "warmup_lr": 1e-6, "updates_per_epoch": per_epoch}
    scheduler, num_epochs = create_scheduler_v2(optimizer, **chosen, **timms)
    assert num_epochs == length
    settings = dataclasses.replace(train, NUM_EPOCHS=length, WARMUP_EPOCHS=5, END_LR=timms.get("min_lr", 0.0))
    schedule = Schedule(with_scheduler(settings, **ours), per_epoch, global_batch=1)
    for step in range(length * per_epoch):
        scheduler.step(step // per_epoch)
        scheduler.step_update(step)
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step


def test_wsd_schedule_warms_up_stays_constant_then_decays(train):
    train = dataclasses.replace(train, NUM_EPOCHS=100, WARMUP_EPOCHS=10, END_LR=1e-5)
    schedule = Schedule(with_scheduler(train, NAME="wsd", DECAY_FRACTION=0.2), 10, global_batch=1)
    rates = [schedule(step) for step in range(1001)]
    assert all(a < b for a, b in zip(rates[:100], rates[1:101], strict=True))
    assert rates[100:801] == pytest.approx([3e-3] * 701)
    assert all(a > b for a, b in zip(rates[800:1000], rates[801:], strict=True))
    assert rates[900] == pytest.approx(1e-5 + (3e-3 - 1e-5) * (1 - math.sqrt(0.5)))
    assert rates[1000] == pytest.approx(1e-5)


@pytest.mark.parametrize(("name", "moment"), [("AdamW", "exp_avg"), ("Adam", "exp_avg"), ("SGD", "momentum_buffer")])
def test_fused_optimizers_convert_old_bfloat16_moments_to_float32(name, moment):
    saved, loaded = Learner(name).step(0).state()["optimizer"], Learner(name)
    assert loaded.optimizer.defaults["fused"]
    for state in saved["state"].values():
        state[moment] = state[moment].bfloat16()
    loaded.optimizer.load_state_dict(saved)
    for state in loaded.step(1).optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32} and state[moment].any()
