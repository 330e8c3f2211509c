"""The attention and the dropout for CPUs compute what timm's and torch's do."""

import copy

import pytest
import torch
from timm.models.vision_transformer import Attention
from torch import nn

from models import build_model
from models.transforms import choose_transforms
from models.transforms.kernels import CpuDropout, CpuKernels, QkvLayoutAttention
from tests.support.configs import small_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_cpu_dropout_drops_its_share_and_keeps_the_mean(dtype, probability):
    torch.manual_seed(0)
    ones = torch.ones(301, 997, dtype=dtype)  # no multiple of 4
    dropped = CpuDropout(probability).train()(ones)
    share = (dropped == 0).double().mean().item()
    deviation = (probability * (1 - probability) / ones.numel()) ** 0.5
    assert abs(share - probability) < 4 * deviation + 2**-16
    assert dropped.double().mean().item() == pytest.approx(1, abs=0.02)
    assert dropped.unique().numel() == 2
    rows, columns = (dropped == 0).double().mean(1), (dropped == 0).double().mean(0)
    assert rows.std() < 1.3 * (probability * (1 - probability) / 997) ** 0.5, "elements of a row are not independent"
    assert columns.std() < 1.3 * (probability * (1 - probability) / 301) ** 0.5


def test_cpu_dropout_has_the_gradient_of_what_it_kept_and_does_nothing_in_evaluation():
    torch.manual_seed(0)
    inputs = torch.randn(33, 65, requires_grad=True)
    outputs = CpuDropout(0.3).train()(inputs)
    outputs.sum().backward()
    torch.testing.assert_close(inputs.grad, outputs.detach() / inputs.detach())
    assert CpuDropout(0.3).eval()(inputs) is inputs


def test_cpu_dropout_follows_the_seed():
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(CpuDropout(0.5).train()(torch.ones(1000)))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_chosen_attention_has_the_same_logits_and_gradients(tmp_path):
    model = build_model(small_config(tmp_path), 10)
    chosen = copy.deepcopy(model)
    CpuKernels(in_half=True).apply(chosen)
    assert [block.attn.fused_attn for block in (*model.blocks, *chosen.blocks)] == [True, True, False, False]
    images = torch.randn(3, 1, 8, 8)
    for each in (model, chosen):
        each(images).square().sum().backward()
    torch.testing.assert_close(model(images), chosen(images), rtol=0, atol=1e-6)
    for mine, theirs in zip(model.parameters(), chosen.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "norm_layer": nn.LayerNorm}, {"qkv_bias": True}])
def test_attention_in_the_layout_of_qkv_is_timms_to_the_last_bit(dtype, fields, is_fused):
    torch.manual_seed(0)
    theirs = Attention(24, 3, **fields).to(dtype)
    theirs.fused_attn = is_fused
    mine = copy.deepcopy(theirs)
    mine.__class__ = QkvLayoutAttention
    tokens, weights = torch.randn(2, 2, 5, 24, dtype=dtype)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for arguments in ((), (None,), (mask,)):
        results = []
        for attention in (mine, theirs):
            inputs = tokens.clone().requires_grad_()
            outputs = attention(inputs, *arguments)
            outputs.backward(weights)
            results.append((outputs, inputs.grad, *(parameter.grad for parameter in attention.parameters())))
            attention.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_attention_in_the_layout_of_qkv_copies_once_less(tmp_path):
    model = build_model(small_config(tmp_path), 10)
    CpuKernels(in_half=True).apply(model)
    mine = model.blocks[0].attn
    theirs = copy.deepcopy(mine)
    theirs.__class__ = Attention
    copies = []
    for attention in (mine, theirs):
        with torch.autograd.profiler.profile() as profile:
            attention(torch.randn(2, 5, 16, requires_grad=True)).sum().backward()
        copies.append(sum(event.name == "aten::clone" for event in profile.function_events))
    assert copies[0] == copies[1] - 1


def test_kernels_are_chosen_by_device_and_type(tmp_path):
    for device, half, dropout, fused in (
        ("cpu", None, 0.0, True),
        ("cpu", None, 0.1, False),
        ("cpu", torch.bfloat16, 0.0, False),
        ("cuda", torch.float16, 0.1, True),
    ):
        config = small_config(tmp_path, "AMP=true", f"MODEL.ATTENTION_DROPOUT={dropout}")
        model = build_model(config, 10)
        choose_transforms(config, torch.device(device), half, training=True).apply(model)
        assert all(block.attn.fused_attn is fused for block in model.blocks)
        assert any(type(module) is nn.Dropout for module in model.modules()) is (device == "cuda")
