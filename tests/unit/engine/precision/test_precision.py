"""Autocast, loss scaling and skipped updates in every precision."""

import itertools
import random
import time

import pytest
import torch
import yaml

from engine.precision import Precision, amp_hint, choose_half, set_matmul
from engine.train.optimizers import build_optimizer
from models import build_model
from models.transforms import choose_transforms
from models.transforms.blocks import HalfResidual
from tests.support.cases import cases_of, value_of
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import refused
from tests.support.trainers import make_trainer, scaled_step, update
from utils.errors import ConfigError
from utils.host import half_speedup, speedup_of


def make(tmp_path, amp=True, dtype=None, **scaling):
    config = small_config(tmp_path, f"AMP={amp}")
    return replaced(config, PRECISION={"DTYPE": dtype, **scaling})


def one_update(precision, config, model, factor=1.0) -> bool:
    """Run one update of a linear model. Return whether it was skipped."""
    optimizer = build_optimizer(config.TRAIN, model)
    with precision.autocast():
        output = model(torch.ones(4, 3))
    precision.scaler.scale(output.float().sum() * factor).backward()
    return scaled_step(precision.scaler, optimizer)


@pytest.mark.parametrize(
    ("amp", "dtype", "expected", "line"),
    [
        (False, None, torch.float32, "float32, as -amp is off"),
        (True, None, torch.bfloat16, "autocast bfloat16 with GradScaler"),
        (True, "float16", torch.float16, "autocast float16 with GradScaler"),
    ],
)
def test_amp_autocasts_to_the_chosen_dtype_and_reports_that_dtype(tmp_path, amp, dtype, expected, line):
    precision = Precision(make(tmp_path, amp, dtype), CPU)
    assert line in precision.describe()
    with precision.autocast():
        assert torch.nn.Linear(3, 2)(torch.ones(1, 3)).dtype is expected


@pytest.mark.parametrize("case", cases_of("half_types"))
def test_half_dtype_follows_setting_and_device(case):
    wanted, device, has_bfloat16 = case.split()
    half, _ = choose_half(True, {"None": None}.get(wanted, wanted), torch.device(device), has_bfloat16 == "True")
    assert str(half) == value_of("half_types", case)


def test_measured_half_precision_speed_ignores_other_load(monkeypatch):
    """Other processes use the processor during half-precision products, and two products take longer to compute."""
    computing, passing, numbers = [0.0], [0.0], itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: computing[0])
    monkeypatch.setattr(time, "perf_counter", lambda: passing[0])

    def product(x, weight):
        number, is_half = next(numbers), x.dtype is torch.bfloat16
        seconds = (1e-3 if is_half else 2e-3) * (5 if number in (5, 8) else 1)
        computing[0] += seconds
        passing[0] += seconds + (0.01 if is_half else 0)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert half_speedup.__wrapped__(CPU, torch.bfloat16) == pytest.approx(2)


def test_measured_half_precision_speed_includes_gradients(monkeypatch):
    """On many CPUs half precision computes a layer's output as fast as float32, but its gradients ten times slower."""
    computing = [0.0]

    def product(x, weight):
        computing[0] += 1e-3

    def gradient(one, other):
        computing[0] += 1e-3 if one.dtype is torch.float32 else 1e-2

    monkeypatch.setattr(time, "thread_time", lambda: computing[0])
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    monkeypatch.setattr(torch, "mm", gradient)
    assert half_speedup.__wrapped__(CPU, torch.float16) == pytest.approx(3 / 21)


# Milliseconds of float32 and bfloat16 in each round, as on a Xeon with bfloat16 units. Other work prolongs most rounds.
QUIET = [(3.3, 5.7), (1.5, 0.6), (1.4, 0.5), (1.3, 0.5)]
BESIDE_OTHER_WORK = [(3.9, 6.4), (1.6, 4.9), (1.4, 1.3), (7.7, 1.2), (1.3, 3.1), (1.5, 0.6), (1.4, 1.9)]


@pytest.mark.parametrize("rounds", [QUIET, BESIDE_OTHER_WORK, BESIDE_OTHER_WORK[::-1]])
def test_warning_of_slow_half_precision_is_the_same_beside_other_work(tmp_path, monkeypatch, rounds):
    half = Precision(make(tmp_path), CPU)
    for times, speedup in ((rounds, 2.6), ([(half, whole) for whole, half in rounds], 1 / 2.6)):
        assert speedup_of(times) == pytest.approx(speedup, rel=0.2)
        monkeypatch.setattr("utils.host.half_speedup", lambda device, half, times=times: speedup_of(times))
        line = half.describe(trains=True)
        assert ("use -amp auto" in line) == ("slower" in line) == (speedup < 1)
        assert ("leave -amp out" in half.describe()) == (speedup < 1), "an evaluation makes no updates"
        assert half.describe(trains=True, is_fastest=True).endswith("the default on cpu")


def test_float32_run_measures_nothing_and_names_auto_precision(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.host.half_speedup", None)
    whole = Precision(make(tmp_path, amp=False), CPU)
    assert "; -amp auto uses half precision" in whole.describe(trains=True)
    assert "-amp auto" not in whole.describe() + whole.describe(trains=True, is_fastest=True)


def test_advice_against_lack_of_memory_names_amp_only_on_devices(tmp_path):
    assert "use -amp" in amp_hint(False, torch.device("cuda"))
    assert not amp_hint(True, torch.device("cuda")) and not amp_hint(False, CPU)


def test_half_precision_speed_is_measured_in_one_thread(monkeypatch):
    """With several threads, CPU time includes busy waiting."""
    before, during, multiply = torch.get_num_threads(), set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda *both: during.add(torch.get_num_threads()) or multiply(*both))
    try:
        torch.set_num_threads(2)
        half_speedup.__wrapped__(CPU, torch.float16)
        assert (during, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("amp", [True, False])
def test_loss_scale_is_one_without_float16_and_nonfinite_updates_are_skipped(tmp_path, amp):
    config = make(tmp_path, amp)
    precision, model = Precision(config, CPU), torch.nn.Linear(3, 2)
    for _ in range(3):
        before = model.weight.clone()
        assert one_update(precision, config, model, factor=float("nan"))
        assert torch.equal(model.weight, before)
        assert not one_update(precision, config, model)
        assert precision.scaler.get_scale() == 1


def test_gradients_are_unscaled_before_they_are_clipped(tmp_path):
    half = ["AMP=true", "PRECISION.DTYPE=float16", "PRECISION.INIT_LOSS_SCALING=4096"]
    norms = [update(make_trainer(small_config(tmp_path, *options))).report().grad_norm for options in ([], half)]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


def test_saved_loss_scale_is_restored_only_for_same_dtype(tmp_path):
    half = Precision(make(tmp_path, True, "float16"), CPU)
    half.scaler.load_state_dict({**half.scaler.state_dict(), "scale": 128.0})
    again = Precision(make(tmp_path, True, "float16"), CPU)
    again.load_state_dict(half.state_dict())
    assert again.scaler.get_scale() == 128
    for other in (Precision(make(tmp_path, True, "bfloat16"), CPU), Precision(make(tmp_path, False), CPU)):
        other.load_state_dict(half.state_dict())
        assert other.scaler.get_scale() == 1


INITIAL_SCALE, LOWEST_SCALE, HIGHEST_SCALE = 1024.0, 4.0, 2.0**20


def paddles_rule(found, every_good, every_bad):
    """Return Paddle's loss scale after each update, which it doubles or halves, computed in plain Python."""
    scale, good, bad, scales = INITIAL_SCALE, 0, 0, []
    for is_bad in found:
        if is_bad:
            good, bad = 0, bad + 1
            if bad == every_bad:
                scale, bad = max(scale / 2, LOWEST_SCALE), 0
        else:
            bad, good = 0, good + 1
            if good == every_good:
                scale, good = min(scale * 2, HIGHEST_SCALE), 0
        scales.append(scale)
    return scales


def our_scales(config, found, stop_at=None):
    """Return the scale after each update. After update `stop_at`, save the state and load it into a new scaler."""
    precision, parameter = Precision(config, CPU), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0, fused=True)
    scales = []
    for number, is_bad in enumerate(found):
        if number == stop_at:
            state, precision = precision.state_dict(), Precision(config, CPU)
            precision.load_state_dict(state)
        precision.scaler.scale(parameter.sum() * (float("inf") if is_bad else 1.0)).backward()
        assert scaled_step(precision.scaler, optimizer) is is_bad
        scales.append(precision.scaler.get_scale())
    return scales


@pytest.mark.long
def test_loss_scale_follows_paddle_rule_over_random_sequences(tmp_path):
    draw = random.Random(0)
    for _ in range(25):
        every_good, every_bad = draw.randint(1, 4), draw.randint(1, 4)
        found = [draw.random() < draw.choice((0.1, 0.5, 0.9)) for _ in range(120)]
        config = make(
            tmp_path, True, "float16", INIT_LOSS_SCALING=INITIAL_SCALE, INCR_EVERY_N_STEPS=every_good,
            DECR_EVERY_N_NAN_OR_INF=every_bad, MIN_LOSS_SCALING=LOWEST_SCALE,
            MAX_LOSS_SCALING=HIGHEST_SCALE,
        )  # fmt: skip
        expected, stop_at = paddles_rule(found, every_good, every_bad), draw.randint(1, 119)
        scales = our_scales(config, found, stop_at)
        assert scales[:stop_at] == expected[:stop_at]
        assert scales[stop_at:] == expected[stop_at:], "counters are lost in a checkpoint"


def test_constant_loss_scale_never_changes_but_still_skips_updates(tmp_path):
    config = make(tmp_path, True, "float16", INIT_LOSS_SCALING=256.0, USE_DYNAMIC_LOSS_SCALING=False)
    assert set(our_scales(config, [True, False, True, True])) == {256.0}


@pytest.mark.parametrize(("mode", "precision"), [("tf32", "high"), ("ieee", "highest")])
def test_matmul_precision_setting_applies_to_matrices_and_convolutions(mode, precision):
    try:
        set_matmul(mode)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cudnn.allow_tf32 == (mode == "tf32")
    finally:
        set_matmul("ieee")


@pytest.mark.parametrize("case", cases_of("types_of_images"))
def test_input_dtype_matches_the_first_layer(tmp_path, case):
    device, _, settings = case.partition(" ")
    precision = Precision(make(tmp_path, dtype="bfloat16", **yaml.safe_load(settings)), CPU)
    model = precision.computing(build_model(small_config(tmp_path), 10))
    precision.device = torch.device(device)
    assert str(precision.input_dtype(model)) == value_of("types_of_images", case)


def test_tf32_is_refused_on_unsupported_device(tmp_path):
    with refused(ConfigError, "PRECISION.MATMUL", "tf32"):
        Precision(make(tmp_path, False, MATMUL="tf32"), CPU)


def types_between_blocks(config, compiled=False):
    """Return the types of the blocks' outputs in a training step, and the gradients."""
    from models import build_model

    torch.manual_seed(0)
    precision, model = Precision(config, CPU), build_model(config, 10)
    choose_transforms(config, CPU, precision.half).apply(model)
    seen = []
    for block in model.blocks[:-1]:
        block.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with precision.autocast():
        run(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).float().sum().backward()
    return set(seen), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.long
def test_gradients_with_half_residual_stream_stay_close_to_float32(tmp_path):
    half = make(tmp_path, True, RESIDUAL="half")
    (single, exact), (halves, near) = types_between_blocks(make(tmp_path)), types_between_blocks(half)
    assert (single, halves) == ({torch.float32}, {torch.bfloat16})
    assert types_between_blocks(make(tmp_path, False, RESIDUAL="half"))[0] == {torch.float32}
    assert all(torch.cosine_similarity(exact[name].flatten(), near[name].flatten(), 0) > 0.98 for name in exact)
    assert any(not exact[name].equal(near[name]) for name in exact)
    torch.testing.assert_close(near, types_between_blocks(half, compiled=True)[1], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("case", cases_of("residuals_of_half_precision"))
def test_compiled_bfloat16_on_gpu_defaults_to_half_residual_stream(tmp_path, case):
    device, half, words = case.split()
    dtype = "auto" if half == "None" else half
    config = small_config(tmp_path, f"AMP={half != 'None'}", f"PRECISION.DTYPE={dtype}", words)
    chosen = choose_transforms(config, torch.device(device), getattr(torch, half, None), training=False).transforms
    found = [each for each in chosen if isinstance(each, HalfResidual)]
    assert str([each.half for each in found]) == value_of("residuals_of_half_precision", case)
    for each in found:
        assert each.apply(torch.nn.Linear(1, 1)) == []  # a model without blocks is unchanged
