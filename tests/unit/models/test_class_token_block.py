"""The last block for only the class token gives timm's logits and gradients, and unknown models stay unchanged."""

import copy

import pytest
import timm
import torch
from timm.layers import SwiGLU
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn

from models.transforms.kernels import ClassTokenBlock, ClassTokenVisionTransformer


def make_vit(**fields) -> VisionTransformer:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 7}
    model = VisionTransformer(**(small | fields))
    for parameter in model.parameters():  # biases start at zero, which would hide a mistake
        nn.init.normal_(parameter, std=0.2)
    return model


def with_short_last_block(model):
    chosen = copy.deepcopy(model)
    ClassTokenBlock().apply(chosen)
    assert type(chosen) is ClassTokenVisionTransformer
    return chosen


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"qkv_bias": False, "qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True},
        {"reg_tokens": 2, "init_values": 0.5, "pre_norm": True, "no_embed_class": True, "fc_norm": True},
        {"depth": 1, "num_classes": 0},
    ],
)
def test_short_last_block_matches_timm_logits_and_gradients(fields, fused):
    model = make_vit(**fields).double()
    for block in model.blocks:
        block.attn.fused_attn = fused
    chosen = with_short_last_block(model)
    images = torch.randn(5, 3, 32, 32, dtype=torch.float64)
    for each in (model, chosen):
        each(images).square().sum().backward()
    torch.testing.assert_close(chosen(images), model(images), rtol=0, atol=1e-12)
    for mine, theirs in zip(chosen.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = model.float()(images.float()), chosen.float()(images.float())
    assert theirs.dtype is ours.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)


def test_short_last_block_keeps_weight_names_and_features_and_can_be_copied():
    model = make_vit()
    chosen = with_short_last_block(model)
    assert list(chosen.state_dict()) == list(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(chosen.forward_features(images), model.forward_features(images))
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    assert torch.equal(chosen(images, attn_mask=mask), model(images, attn_mask=mask))
    shapes = []
    for module in (chosen.blocks[-1].mlp, chosen.blocks[-1].attn.proj, chosen.norm):
        module.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    chosen(images)
    assert shapes == [(2, 1, 32)] * 3, "must compute only one token"
    copied = copy.deepcopy(chosen)
    nn.init.zeros_(copied.blocks[-1].attn.qkv.weight)
    torch.testing.assert_close(chosen(images), model(images))
    assert not torch.allclose(copied(images), model(images))


@pytest.mark.slow
def test_short_last_block_keeps_drop_path_rate_and_frozen_weights():
    model = make_vit(drop_path_rate=0.5, proj_drop_rate=0.2, attn_drop_rate=0.2)
    model.blocks[-1].attn.qkv.requires_grad_(False)
    chosen = with_short_last_block(model).train()
    chosen(torch.randn(2, 3, 32, 32)).sum().backward()
    assert chosen.blocks[-1].attn.qkv.weight.grad is None and chosen.blocks[0].attn.qkv.weight.grad is not None
    branches = []
    chosen.blocks[-1].drop_path1.register_forward_hook(lambda module, inputs, output: branches.append(output))
    with torch.no_grad():
        chosen(torch.randn(1000, 3, 32, 32))
    dropped = (branches[0] == 0).all(-1).double().mean().item()
    assert 0.43 < dropped < 0.57


@pytest.mark.long
def test_short_last_block_applies_dropout_only_in_training_and_compiles():
    chosen, images = with_short_last_block(make_vit(attn_drop_rate=0.5)), torch.randn(2, 3, 32, 32)
    assert not torch.equal(chosen.train()(images), chosen(images))
    assert torch.equal(chosen.eval()(images), chosen(images))
    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), chosen(images))


class OtherBlock(Block):
    pass


class OtherAttention(Attention):
    pass


def changed(name: str, change) -> VisionTransformer:
    model = make_vit()
    change(model.get_submodule(name))
    return model


def hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, inputs: None)


def own_forward(module: nn.Module) -> None:
    module.forward = module.forward


OTHERS = {
    "mean of patches": lambda: make_vit(global_pool="avg"),
    "block": lambda: make_vit(block_fn=OtherBlock),
    "MLP": lambda: make_vit(mlp_layer=SwiGLU),
    "attention": lambda: changed("blocks.2.attn", lambda module: setattr(module, "__class__", OtherAttention)),
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=1, embed_dim=12),
    "hook on the block": lambda: changed("blocks.2", hook),
    "hook on qkv": lambda: changed("blocks.2.attn.qkv", hook),
    "forward of attention": lambda: changed("blocks.2.attn", own_forward),
    "forward in the MLP": lambda: changed("blocks.2.mlp.fc1", own_forward),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_unsupported_model_keeps_its_full_last_block(make):
    model = make()
    before = type(model)
    ClassTokenBlock().apply(model)
    assert type(model) is before


def test_single_query_attention_avoids_fused_kernel_except_on_cpu(monkeypatch):
    """In float64, both variants give the same logits, as the first test shows."""
    fused, queries = torch.nn.functional.scaled_dot_product_attention, []

    def noted(q, *others, **options):
        queries.append(q.shape[2])
        return fused(q, *others, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for device, expected in (("cpu", [17, 17, 1]), ("meta", [17, 17])):
        queries.clear()
        with_short_last_block(make_vit()).to(device)(torch.empty(2, 3, 32, 32, device=device))
        assert queries == expected
