"""Attention, dropout, patch embedding and convolutions for each device compute the same as timm's and torch's."""

import copy
from unittest import mock

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn

from configs.load import load
from models import build_model
from models.parts import starts_with_convolution
from models.transforms import ModelTransforms, choose_transforms
from models.transforms.gpu_kernels import ChannelsLast, GpuKernels, PatchConv2d
from models.transforms.kernels import CpuDropout, QkvLayoutAttention
from tests.support.configs import small_config
from tests.support.runs import ROOT
from tests.support.trainers import make_trainer, update

HALF, CUDA = torch.bfloat16, torch.device("cuda")


def test_kernels_are_chosen_by_device_and_dtype(tmp_path):
    for device, half, dropout, is_fused in (
        ("cpu", None, 0.0, True),
        ("cpu", None, 0.1, False),
        ("cpu", torch.bfloat16, 0.0, False),
        ("cuda", torch.float16, 0.1, True),
        ("xpu", None, 0.1, True),
        ("mps", None, 0.1, True),
    ):
        config = small_config(tmp_path, "AMP=true", f"MODEL.ATTENTION_DROPOUT={dropout}")
        model = build_model(config, 10)
        choose_transforms(config, torch.device(device), half, training=False).apply(model)
        assert all(block.attn.fused_attn is is_fused for block in model.blocks)
        assert any(type(module) is nn.Dropout for module in model.modules()) is (device != "cpu")
        assert (type(model.patch_embed.proj) is PatchConv2d) is (device != "cpu")


# --- patch embedding


def results(module: nn.Module, *size: int) -> list[torch.Tensor]:
    """Return output and gradients."""
    torch.manual_seed(1)
    inputs = torch.randn(*size, dtype=next(module.parameters()).dtype, requires_grad=True)
    module.zero_grad()
    output = module(inputs)
    output.backward(torch.randn(output.shape, dtype=output.dtype))
    return [output, inputs.grad, *(parameter.grad for parameter in module.parameters())]


VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
PATCHES = {
    "plain": ({}, (2, 3, 8, 8)),
    "no bias": ({"bias": False}, (2, 3, 8, 8)),
    "patches that are not square": ({"patch_size": (4, 2), "img_size": (8, 6)}, (2, 3, 8, 6)),
    "padded": ({"dynamic_img_pad": True, "img_size": None}, (2, 3, 9, 7)),
    "an edge that no patch covers": ({"img_size": None}, (2, 3, 9, 7)),
    "a whole model": (VIT, (2, 3, 8, 8)),
    "another model": (VIT | {"global_pool": "avg", "qk_norm": True, "reg_tokens": 2}, (2, 3, 8, 8)),
}


@pytest.mark.parametrize("case", PATCHES)
def test_patch_embedding_matches_timm_in_fp64(case):
    options, size = PATCHES[case]
    torch.manual_seed(0)
    cls = VisionTransformer if "model" in case else PatchEmbed
    plain = cls(**{"img_size": 8, "patch_size": 4, "embed_dim": 6} | options).double()
    chosen = copy.deepcopy(plain)
    GpuKernels().apply(chosen)
    assert any(type(each) is PatchConv2d for each in chosen.modules())
    assert list(chosen.state_dict()) == list(plain.state_dict())
    for mine, theirs in zip(results(chosen, *size), results(plain, *size), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


class OwnConv2d(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 4, stride=2),
        nn.Conv2d(4, 6, 4, stride=4, padding=4),
        nn.Conv2d(4, 6, 4, stride=4, groups=2),
        nn.Conv2d(4, 6, 1, padding="valid"),
        OwnConv2d(4, 6, 4, stride=4),
    ],
)
def test_gpu_kernels_leave_layers_other_than_patch_embeddings_unchanged(layer):
    embedding = PatchEmbed(img_size=8, patch_size=4, in_chans=4, embed_dim=6)
    embedding.proj = layer
    model = nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), embedding)
    GpuKernels().apply(model)
    assert type(model[0]) is nn.Conv2d and embedding.proj is layer and type(layer) in (nn.Conv2d, OwnConv2d)


@pytest.mark.long
@pytest.mark.parametrize("name", ["test_resnet", "test_maxvit"])
def test_rounding_images_early_does_not_change_the_first_convolution(name):
    model, images = timm.create_model(name).eval(), torch.randn(2, 3, 160, 160)
    assert starts_with_convolution(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), model(images.bfloat16()))
    with torch.device("meta"):
        assert not starts_with_convolution(timm.create_model("crossvit_9_240")), "its images are used in two places"


# --- attention


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [(torch.float32, {"qk_norm": True, "norm_layer": nn.LayerNorm}), (torch.bfloat16, {"qkv_bias": True})],
)
def test_qkv_layout_attention_matches_timm_bitwise(dtype, fields, is_fused):
    torch.manual_seed(0)
    theirs = Attention(24, 3, **fields).to(dtype)
    theirs.fused_attn = is_fused
    mine = copy.deepcopy(theirs)
    mine.__class__ = QkvLayoutAttention
    tokens, weights = torch.randn(2, 2, 5, 24, dtype=dtype)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for arguments in ((), (None,), (mask,)):
        found = []
        for attention in (mine, theirs):
            inputs = tokens.clone().requires_grad_()
            outputs = attention(inputs, *arguments)
            outputs.backward(weights)
            found.append((outputs, inputs.grad, *(parameter.grad for parameter in attention.parameters())))
            attention.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# --- dropout


@pytest.mark.parametrize(("dtype", "probability"), [(torch.float32, 0.1), (torch.bfloat16, 0.9)])
def test_cpu_dropout_keeps_its_rate_and_mean(dtype, probability):
    torch.manual_seed(0)
    ones = torch.ones(301, 997, dtype=dtype)  # not a multiple of 4
    dropped = CpuDropout(probability).train()(ones)
    share = (dropped == 0).double().mean().item()
    deviation = (probability * (1 - probability) / ones.numel()) ** 0.5
    assert abs(share - probability) < 4 * deviation + 2**-16
    assert dropped.double().mean().item() == pytest.approx(1, abs=0.02)
    assert dropped.unique().numel() == 2
    rows, columns = (dropped == 0).double().mean(1), (dropped == 0).double().mean(0)
    assert rows.std() < 1.3 * (probability * (1 - probability) / 997) ** 0.5, "elements of a row must be independent"
    assert columns.std() < 1.3 * (probability * (1 - probability) / 301) ** 0.5


def test_cpu_dropout_is_seeded_and_off_in_evaluation():
    draws, inputs = [], torch.randn(33, 65)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        inputs = inputs.detach().requires_grad_()
        draws.append(CpuDropout(0.3).train()(inputs))
    draws[2].sum().backward()
    torch.testing.assert_close(inputs.grad, draws[2].detach() / inputs.detach())
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert CpuDropout(0.3).eval()(inputs) is inputs


# --- convolutions with channels last


@pytest.fixture
def resnet(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    options = "DATA.DATASET=synthetic DATA.SYNTHETIC_SIZE=64 DATA.IMAGE_SIZE=16 DATA.BATCH_SIZE=16 MODEL.NUM_CLASSES=10"
    options += " MODEL.NAME=test_resnet TRAIN.WARMUP_EPOCHS=0"
    return load(["-cfg", str(ROOT / "configs/timm.yaml"), "-opts", *options.split()]).config


def trainer_with(config, *transforms):
    with mock.patch("engine.build.choose_transforms", return_value=ModelTransforms(transforms)):
        trainer = make_trainer(config, double=True)
    layouts = []
    conv = [each for each in trainer.model.modules() if isinstance(each, nn.Conv2d)][3]
    conv.register_forward_pre_hook(lambda module, images: layouts.append(is_last(images[0])))
    return trainer, layouts


def is_last(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def tensors(state: dict) -> dict[str, torch.Tensor]:
    found = {f"{key}.{name}": each for key in ("state_dict", "state_dict_ema") for name, each in state[key].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"{number}.{name}": each for name, each in moments.items()}
    return found


@pytest.mark.slow
def test_channels_last_training_matches_default_layout_and_resumes_in_it(resnet):
    plain, others = trainer_with(resnet)
    trainer, layouts = trainer_with(resnet, ChannelsLast())
    for each in (plain, trainer):
        update(each, 2)
    assert all(layouts) and layouts and not any(others)
    resumed, _ = trainer_with(resnet)
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    for each in (plain, trainer, resumed):
        update(each, 2)
    expected = tensors(plain.state_dict())
    for each in (trainer, resumed):
        for name, tensor in tensors(each.state_dict()).items():
            assert tensor.stride() == expected[name].stride(), name
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "device"), [("resnet", "cuda"), ("resnet", "cpu"), ("vit", "cuda")])
def test_channels_last_is_used_for_gpu_convolutional_models(resnet, tmp_path, kind, device):
    config = resnet if kind == "resnet" else small_config(tmp_path)
    model = build_model(config, 10)
    cls = type(model)
    chosen = choose_transforms(config, torch.device(device), None, training=True).transforms
    for each in [each for each in chosen if isinstance(each, ChannelsLast)]:
        each.apply(model)
    assert (type(model) is not cls) is ((kind, device) == ("resnet", "cuda"))
    ChannelsLast().revert(model)
    assert type(model) is cls
    if (kind, device) == ("resnet", "cuda"):
        for is_deterministic in (True, False):  # the fastest of cuDNN's kernels varies from run to run
            with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=is_deterministic):
                ChannelsLast().apply(build_model(config, 10))
            assert torch.backends.cudnn.benchmark is not is_deterministic
