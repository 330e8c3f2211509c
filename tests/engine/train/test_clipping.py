"""Clipping of gradients: by norm, by value, and each unit's by its weights."""

import pytest
import torch
from timm.utils import dispatch_clip_grad

from configs.schema import Train
from engine.precision.loss_scale import Clipping
from engine.train.trainer import Trainer
from tests.support.configs import small_config
from tests.support.trainers import make_trainer, update


def model_with_gradients() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 2), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * torch.rand(len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
    return model


@pytest.mark.parametrize("mode, limit", [("norm", 0.5), ("value", 0.1), ("agc", 0.05)])
def test_gradients_are_clipped_as_timm_clips_them(mode, limit):
    ours, timms = model_with_gradients(), model_with_gradients()
    parameters = list(ours.parameters())
    before = [each.grad.clone() for each in parameters]
    norm = torch.nn.utils.get_total_norm(before)
    Clipping(Train(CLIP_MODE=mode, GRAD_CLIP=limit), ours)(parameters, norm)
    # timm's train.py leaves out the last two, weight and bias of the classifier, with agc
    dispatch_clip_grad(list(timms.parameters())[: -2 if mode == "agc" else None], limit, mode)
    for mine, theirs in zip(parameters, timms.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    changed = [not torch.equal(each.grad, former) for each, former in zip(parameters, before, strict=True)]
    assert all(changed) if mode == "norm" else any(changed[:-2])


def test_without_a_limit_nothing_is_clipped():
    model = model_with_gradients()
    before = [each.grad.clone() for each in model.parameters()]
    for mode in ("norm", "value", "agc"):
        Clipping(Train(CLIP_MODE=mode), model)(list(model.parameters()), torch.tensor(9.0))
    assert all(torch.equal(each.grad, former) for each, former in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("mode, limit", [("value", 0.01), ("agc", 0.01)])
def test_clipping_is_the_same_for_any_number_of_micro_batches(tmp_path, mode, limit):
    def weights(*options: str) -> Trainer:
        words = (f"TRAIN.CLIP_MODE={mode}", f"TRAIN.GRAD_CLIP={limit}", "TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=1")
        return update(make_trainer(small_config(tmp_path, *words, "TRAIN.WARMUP_EPOCHS=0", *options)), 2).model

    whole, split = weights(), weights("DATA.BATCH_SIZE=16", "TRAIN.ACCUM_ITER=2")
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    unclipped = weights("TRAIN.GRAD_CLIP=null")
    assert not torch.allclose(unclipped.blocks[0].mlp.fc1.weight, whole.blocks[0].mlp.fc1.weight, atol=1e-4)
