"""Clipping of gradients: by norm, by value, and each unit's by its weights."""

import pytest
import torch
from timm.utils import dispatch_clip_grad

from configs.schema import Train
from engine.precision.loss_scale import Clipping


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
