"""The learning rate, and the states of torch's own optimizers."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler import create_scheduler_v2

from configs.schema import Config
from engine.train.schedule import Schedule
from tests.support.configs import small_config
from tests.support.optimizers import Learner
from tests.support.properties import examples


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


@pytest.mark.parametrize("scaling, stated_for", [("linear", 512), ("sqrt", 256)])
def test_batch_size_scaling_applies_to_start_base_and_end_rate(train, scaling, stated_for):
    train = dataclasses.replace(train, LINEAR_SCALED_LR=stated_for, LR_SCALING=scaling, END_LR=1e-5)
    scaled = Schedule(train, 10, global_batch=1024)
    assert (scaled.start, scaled.base, scaled.end) == pytest.approx((2e-6, 6e-3, 2e-5))


@st.composite
def choices(draw) -> list[list[int]]:
    """Draw changes of the number of updates of a run of 200 updates: shorter, longer, and back to 200."""
    found, step, total = [], 0, 200
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.integers(step + 1, total - 2))
        total = draw(st.integers(step + 3, 400) | st.just(max(200, step + 3)))
        found.append([step, total])
        if total < step + 4:
            break
    return found


SMOOTH = [{"NAME": "cosine"}, {"NAME": "cosine", "COOLDOWN_EPOCHS": 2}, {"NAME": "wsd"}, {"NAME": "constant"}]
STAIRS = [{"NAME": "paddlevit"}, {"NAME": "step", "DECAY_EPOCHS": 6.0}, {"NAME": "cosine", "PER_EPOCH": True}]


@pytest.mark.slow
@given(st.sampled_from(SMOOTH + STAIRS), choices())
@examples(100)
def test_rate_never_jumps_when_the_number_of_updates_changes(chosen, drawn):
    settings = with_scheduler(dataclasses.replace(Config().TRAIN, NUM_EPOCHS=20, WARMUP_EPOCHS=0), **chosen)
    schedule = Schedule(settings, 10, global_batch=1)
    last = schedule(199)
    for step, total in drawn:
        before = schedule(step - 1)
        schedule.choose(step, total)
        assert schedule(total - 1) == last  # the schedule is complete
        rates = [schedule(each) for each in range(step - 1, total)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] == pytest.approx(before) or chosen in STAIRS


def has_scheduler(name: str) -> bool:
    """Return whether timm has this scheduler. For an unknown name, it makes none."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return create_scheduler_v2(optimizer, name, num_epochs=2, decay_epochs=1)[0] is not None


NEW_IN_TIMM = [name for name in ("constant", "wsd") if has_scheduler(name)]  # timm 1.0.20 does not have them


@st.composite
def schedules(draw) -> tuple[dict, dict, dict]:
    """Draw arguments of timm's create_scheduler_v2 and our TRAIN and TRAIN.LR_SCHEDULER settings for the same rates."""
    name = draw(st.sampled_from(["cosine", "step", "multistep", *NEW_IN_TIMM]))
    warmup, rest, cooldown = draw(st.integers(0, 5)), draw(st.integers(1, 12)), draw(st.integers(0, 3))
    cooldown = cooldown if name in ("cosine", "wsd") else 0
    # timm's multistep drops the rate one unit early, which is no whole epoch if the rate changes in every update.
    is_per_epoch, is_after = name == "multistep" or draw(st.booleans()), name == "wsd" or draw(st.booleans())
    end = draw(st.floats(0, 1e-3)) if name in ("cosine", "wsd") else 0.0
    length, rate = warmup + rest + cooldown, draw(st.floats(0, 1))
    theirs = {
        "sched": name,
        "num_epochs": rest if is_after else warmup + rest,
        "warmup_epochs": warmup,
        "warmup_prefix": is_after,
        "cooldown_epochs": cooldown,
        "warmup_lr": draw(st.floats(0, 1e-3)),
        "min_lr": end,
        "step_on_epochs": is_per_epoch,
    }
    chosen = {"NAME": name, "PER_EPOCH": is_per_epoch, "AFTER_WARMUP": is_after, "COOLDOWN_EPOCHS": cooldown}
    if name == "step":
        theirs |= {"decay_epochs": draw(st.floats(0.5, 6)), "decay_rate": rate}
        chosen |= {"DECAY_EPOCHS": theirs["decay_epochs"], "DECAY_RATE": rate}
    elif name == "multistep":
        milestones = sorted(draw(st.sets(st.integers(0, length), min_size=1)))
        theirs |= {"decay_milestones": [each + 1 for each in milestones], "decay_rate": rate}
        chosen |= {"NAME": "step", "MILESTONES": tuple(milestones), "DECAY_RATE": rate}
    elif name == "wsd":
        theirs["decay_epochs"] = draw(st.integers(1, rest))
        chosen["DECAY_FRACTION"] = theirs["decay_epochs"] / length
    rates = {"WARMUP_START_LR": theirs["warmup_lr"], "END_LR": end}
    return theirs, {"NUM_EPOCHS": length, "WARMUP_EPOCHS": warmup, **rates}, chosen


@given(schedules(), st.integers(1, 6))
@examples(80)
def test_learning_rate_of_every_update_matches_timm(schedules, per_epoch):
    theirs, ours, chosen = schedules
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    scheduler, _ = create_scheduler_v2(optimizer, updates_per_epoch=per_epoch, **theirs)
    settings = dataclasses.replace(Config().TRAIN, BASE_LR=3e-3, **ours)
    schedule = Schedule(with_scheduler(settings, **chosen), per_epoch, global_batch=1)
    for step in range(ours["NUM_EPOCHS"] * per_epoch):
        scheduler.step(step // per_epoch)
        scheduler.step_update(step)
        assert schedule(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9), step


@pytest.mark.parametrize(("name", "moment"), [("AdamW", "exp_avg"), ("Adam", "exp_avg"), ("SGD", "momentum_buffer")])
def test_fused_optimizers_convert_old_bfloat16_moments_to_float32(name, moment):
    saved, loaded = Learner(name).step(0).state()["optimizer"], Learner(name)
    assert loaded.optimizer.defaults["fused"]
    for state in saved["state"].values():
        state[moment] = state[moment].bfloat16()
    loaded.optimizer.load_state_dict(saved)
    for state in loaded.step(1).optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32} and state[moment].any()
