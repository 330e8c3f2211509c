"""One path for every precision: autocast, the loss scale, and skipped updates."""

import pytest
import torch

from engine.optim import build_optimizer
from engine.precision import Precision
from tests.helpers import replaced, small_config

CPU = torch.device("cpu")


def make(tmp_path, amp=True, dtype=None, **scaling):
    config = small_config(tmp_path, f"AMP={amp}")
    return replaced(config, PRECISION={"DTYPE": dtype, **scaling})


def one_update(precision, config, model, factor=1.0, clip=None):
    """One update on a linear model; returns gradient norm and whether it was skipped."""
    optimizer = build_optimizer(config.TRAIN, model)
    with precision.autocast():
        output = model(torch.ones(4, 3))
    precision.backward(output.float().sum() * factor)
    norm, skipped = precision.update(optimizer, list(model.parameters()), clip)
    return float(norm), bool(skipped)


@pytest.mark.parametrize(
    "amp, dtype, expected",
    [
        (False, None, torch.float32),
        (True, None, torch.bfloat16),
        (True, "float16", torch.float16),
        (True, "bfloat16", torch.bfloat16),
    ],
)
def test_amp_switches_autocast_to_the_chosen_type(tmp_path, amp, dtype, expected):
    precision = Precision(make(tmp_path, amp, dtype), CPU)
    with precision.autocast():
        assert torch.nn.Linear(3, 2)(torch.ones(1, 3)).dtype is expected


def test_auto_takes_float16_only_on_gpus_without_bfloat16(monkeypatch):
    for fast, device, expected in (
        (True, "cuda", torch.bfloat16),
        (False, "cuda", torch.float16),
        (False, "cpu", torch.bfloat16),  # float16 would be slower still
    ):
        monkeypatch.setattr("engine.precision.has_fast_bfloat16", lambda device, fast=fast: fast)
        assert Precision._choose(True, "auto", torch.device(device))[0] is expected


def test_float16_is_the_default_on_cuda(tmp_path):
    assert Precision._choose(True, None, torch.device("cuda"))[0] is torch.float16


def test_float16_scale_shrinks_after_an_overflow_and_grows_after_good_updates(tmp_path):
    config = make(tmp_path, True, "float16", INIT_LOSS_SCALING=1024.0, INCR_EVERY_N_STEPS=2, DECR_RATIO=0.25)
    precision, model = Precision(config, CPU), torch.nn.Linear(3, 2)
    before = model.weight.clone()
    _, skipped = one_update(precision, config, model, factor=float("inf"))
    assert skipped and precision.scaler.get_scale() == 256
    assert torch.equal(model.weight, before)
    for _ in range(2):
        assert not one_update(precision, config, model)[1]
    assert precision.scaler.get_scale() == 512
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("amp", [True, False])
def test_without_float16_the_scale_stays_one_and_non_finite_updates_are_skipped(tmp_path, amp):
    config = make(tmp_path, amp)
    precision, model = Precision(config, CPU), torch.nn.Linear(3, 2)
    for _ in range(3):
        before = model.weight.clone()
        assert one_update(precision, config, model, factor=float("nan"))[1]
        assert torch.equal(model.weight, before)
        assert not one_update(precision, config, model)[1]
        assert precision.scaler.get_scale() == 1


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path):
    config = make(tmp_path, True, "float16", INIT_LOSS_SCALING=4096.0)
    norm, _ = one_update(Precision(config, CPU), config, torch.nn.Linear(3, 2), clip=1.0)
    assert norm == pytest.approx((6 * 16 + 2 * 16) ** 0.5, rel=1e-3)  # d/dw = 4, d/db = 4


def test_a_saved_scale_is_taken_up_by_the_same_type_only(tmp_path):
    half = Precision(make(tmp_path, True, "float16"), CPU)
    half.scaler.load_state_dict({**half.scaler.state_dict(), "scale": 128.0})
    again = Precision(make(tmp_path, True, "float16"), CPU)
    again.load_state_dict(half.state_dict())
    assert again.scaler.get_scale() == 128
    for other in (Precision(make(tmp_path, True, "bfloat16"), CPU), Precision(make(tmp_path, False), CPU)):
        other.load_state_dict(half.state_dict())
        assert other.scaler.get_scale() == 1


def test_the_start_line_says_what_and_why(tmp_path):
    assert "float32, as -amp was not given" in Precision(make(tmp_path, False), CPU).describe()
    assert "autocast bfloat16 with GradScaler" in Precision(make(tmp_path, True), CPU).describe()
    assert "very slow on a CPU" in Precision(make(tmp_path, True, "float16"), CPU).describe()
