"""One update: clipped, without waits for the device, and fully skipped if it is not finite."""

import math

import pytest
import torch
from timm.utils import ModelEmaV3, dispatch_clip_grad

from configs.schema import Train
from engine.parallel import Parallel
from engine.train.clipping import Clipping
from engine.train.counters import Counters
from engine.train.ema import Ema, decay_at
from tests.support.configs import CPU, ema, replaced, small_config
from tests.support.threads import Threads
from tests.support.trainers import make_trainer, update
from utils.distributed import Process
from utils.seed import seed_update

pytestmark = pytest.mark.slow


def test_non_finite_update_changes_no_training_state(tmp_path):
    trainer = make_trainer(small_config(tmp_path, *ema(0.5, warm_up="false")))
    update(trainer)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    mean_before = {k: v.clone() for k, v in trainer.ema.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in trainer.optimizer.state.values()]
    poison = trainer.model.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
    update(trainer)
    poison.remove()
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert all(torch.equal(v, mean_before[k]) for k, v in trainer.ema.model.state_dict().items())
    for state, saved in zip(trainer.optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg"], saved)
    report = trainer.report()
    assert report.skipped == 1 and trainer.step == 2
    update(trainer)
    assert any(not torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert any(not torch.equal(v, mean_before[k]) for k, v in trainer.ema.model.state_dict().items())
    assert torch.isfinite(torch.tensor(trainer.report().mean_loss))


def test_valid_update_resets_the_count_of_consecutive_skips(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    in_a_row = []
    for factor in ("nan", "nan", "1", "nan"):
        poison = trainer.model.norm.register_forward_hook(lambda *args, by=float(factor): args[-1] * by)
        in_a_row.append(update(trainer).report().skips_in_a_row)
        poison.remove()
    assert in_a_row == [1, 2, 0, 1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_reported_gradient_norm_is_independent_of_world_size(world_size):
    def read(process):
        counters = Counters(CPU)
        for norm in (2.0, 6.0):  # the norm of the whole gradient, as every process knows it
            counters.add(torch.ones(3), torch.tensor(norm), torch.tensor(0.0))
        return counters.read(process)

    for report in Threads(world_size).run(read):
        assert (report["grad_norm"], report["mean_grad_norm"]) == (6, 4)


def test_infinite_losses_leave_the_mean_loss_of_other_images():
    counters, process = Counters(CPU), Process(CPU)
    norm, done = torch.tensor(1.0), torch.tensor(0.0)
    for loss in (4.0, math.inf, 8.0):
        counters.add(torch.tensor([loss, 1.0, 4.0]), norm, done)
    report = counters.read(process)
    assert (report["mean_loss"], report["infinite"], report["accuracy"]) == (12 / 8, 4, 3 / 12)
    counters.add(torch.tensor([math.inf, 1.0, 4.0]), norm, done)
    assert counters.read(process)["loss"] == math.inf, "of the last update"
    again = Counters(CPU)
    again.load_state_dict(counters.state_dict(process), process)
    assert again.read(process) | {"loss": math.inf, "grad_norm": 1.0} == counters.read(process)


def test_saved_counters_with_invalid_numbers_are_refused():
    counters, process = Counters(CPU), Process(CPU)
    state = counters.state_dict(process)
    for name in state:
        with pytest.raises(ValueError, match="invalid"):
            counters.load_state_dict(state | {name: torch.full_like(state[name], math.nan)}, process)


@pytest.mark.parametrize("warm_up, decays", [("false", [0, 0.15, 0.15]), ("true", [0, 1 / 10, 0.15])])
def test_ema_update_matches_its_decay_formula(tmp_path, warm_up, decays):
    words = [*ema(0.15, warm_up), "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=0.1"]
    trainer = make_trainer(small_config(tmp_path, *words))
    name = "blocks.0.mlp.fc1.weight"
    for decay in decays:
        before = trainer.ema.model.state_dict()[name].clone()
        update(trainer)
        weights = trainer.model.state_dict()[name]
        assert (weights - before).abs().mean() > 0.05
        torch.testing.assert_close(trainer.ema.model.state_dict()[name], decay * before + (1 - decay) * weights)


@pytest.mark.parametrize("warm_up", ["false", "timm"])
def test_ema_decays_and_weights_equal_those_of_timms_ema(tmp_path, warm_up):
    settings, model = small_config(tmp_path, *ema(0.99, warm_up)).TRAIN, torch.nn.Linear(3, 3)
    parallel = Parallel(Process(CPU))
    own, theirs = Ema(model, settings, parallel), ModelEmaV3(model, decay=0.99, use_warmup=warm_up == "timm")
    own.follow(model, parallel)
    for step in range(1_100):  # timm's train.py counts updates from 1
        assert decay_at(step, settings) == pytest.approx(theirs.get_decay(step + 1), abs=1e-15), step
    for step in range(10):
        torch.nn.init.normal_(model.weight)
        own.update(step, torch.zeros(()))
        theirs.update(model, step=step + 1)
        torch.testing.assert_close(own.model.state_dict(), theirs.module.state_dict())


def test_ema_copies_batch_norm_batch_count():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    ema = Ema(model, Train(), parallel := Parallel(Process(CPU)))
    ema.follow(model, parallel)
    for step in range(3):
        model(torch.randn(4, 2))
        ema.update(step, torch.zeros(()))
    assert model[1].num_batches_tracked == ema.model[1].num_batches_tracked == 3


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_naive_mode_computes_in_half_and_keeps_float32_weights(tmp_path, dtype):
    config = small_config(tmp_path, "AMP=true", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.ACCUM_ITER=2", "TRAIN.MODEL_EMA=true")
    trainer = make_trainer(replaced(config, PRECISION={"DTYPE": dtype, "MODE": "naive", "INIT_LOSS_SCALING": 1024.0}))
    half = getattr(torch, dtype)
    seen = set()
    for module in trainer.replica.modules():
        module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    losses = [update(trainer).report().loss for _ in range(30)]
    assert seen == {half}, "every operation must run in half precision"
    assert trainer.report().skipped == 0 and sum(losses[-5:]) < sum(losses[:5])
    for name, weight in trainer.model.state_dict().items():
        assert weight.dtype is torch.float32
        assert torch.equal(weight.to(half), trainer.replica.state_dict()[name])
    assert any((weight != weight.to(half).float()).any() for weight in trainer.parameters), (
        "changes too small for half precision must accumulate"
    )
    both = (*trainer.parameters, *trainer.replica.parameters())
    assert all(each.grad is None for each in both), "gradients must not carry over to the next update"
    assert all(state["exp_avg_sq"].dtype is torch.float32 for state in trainer.optimizer.state.values())


def test_skipped_naive_update_leaves_both_weight_copies_unchanged(tmp_path):
    trainer = make_trainer(replaced(small_config(tmp_path, "AMP=true"), PRECISION={"MODE": "naive"}))
    update(trainer)
    before = [parameter.clone() for parameter in (*trainer.parameters, *trainer.replica.parameters())]
    trainer.replica.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
    update(trainer)
    after = [*trainer.parameters, *trainer.replica.parameters()]
    assert trainer.report().skipped == 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, after, strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dropout_depends_only_on_step_process_and_seed(device):
    draws = []
    for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        seed_update(*place, torch.device(device))
        draws.append(torch.rand(8))
    assert torch.equal(draws[0], draws[-1])
    assert all(not torch.equal(draws[0], draw) for draw in draws[1:-1])


def model_with_gradients() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * torch.rand(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
    return model


@pytest.mark.parametrize("mode, limit", [("norm", 0.5), ("value", 0.1), ("agc", 0.05)])
def test_gradient_clipping_matches_timm(mode, limit):
    ours, timms = model_with_gradients(), model_with_gradients()
    parameters = list(ours.parameters())
    before = [each.grad.clone() for each in parameters]
    norm = torch.nn.utils.get_total_norm(before)
    Clipping(Train(CLIP_MODE=mode, GRAD_CLIP=limit), parameters)(parameters, norm)
    # with agc, timm's train.py excludes the last two: the classifier's weight and bias
    dispatch_clip_grad(list(timms.parameters())[: -2 if mode == "agc" else None], limit, mode)
    for mine, theirs in zip(parameters, timms.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    changed = [not torch.equal(each.grad, former) for each, former in zip(parameters, before, strict=True)]
    assert all(changed) if mode == "norm" else any(changed[:-2])
