"""Patch embedding and attention of GPUs, run on the CPU: the numbers are timm's, only the operations differ."""

import copy
from unittest import mock

import pytest
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models import build_model
from models.transforms import ModelTransforms, attention, choose_transforms
from models.transforms.kernels import GpuKernels, PatchConv2d
from models.transforms.op_overrides import OpOverrides
from tests.support.configs import CPU, small_config
from tests.support.refusals import assert_names

HALF = torch.bfloat16


def results(module: nn.Module, *size: int) -> list[torch.Tensor]:
    """Output and gradients."""
    torch.manual_seed(1)
    inputs = torch.randn(*size, dtype=next(module.parameters()).dtype, requires_grad=True)
    module.zero_grad()
    output = module(inputs)
    output.backward(torch.randn(output.shape, dtype=output.dtype))
    return [output, inputs.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same_in_fp64(module: nn.Module, *size: int) -> None:
    plain = module.double()
    chosen = copy.deepcopy(plain)
    GpuKernels(CPU).apply(chosen)
    assert {name: each.shape for name, each in chosen.state_dict().items()} == {
        name: each.shape for name, each in plain.state_dict().items()
    }
    assert any(type(each) is PatchConv2d for each in chosen.modules())
    for mine, theirs in zip(results(chosen, *size), results(plain, *size), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


PATCHES = {
    "plain": ({}, (2, 3, 8, 8)),
    "one image of 5 channels": ({"in_chans": 5}, (1, 5, 8, 8)),
    "no bias": ({"bias": False}, (2, 3, 8, 8)),
    "patches that are not square": ({"patch_size": (4, 2), "img_size": (8, 6)}, (2, 3, 8, 6)),
    "another norm": ({"norm_layer": nn.LayerNorm}, (2, 3, 8, 8)),
    "not flattened": ({"flatten": False}, (2, 3, 8, 8)),
    "channels last": ({"output_fmt": "NHWC"}, (2, 3, 8, 8)),
    "padded": ({"dynamic_img_pad": True, "img_size": None}, (2, 3, 9, 7)),
    "images of any size": ({"img_size": None}, (2, 3, 12, 4)),
    "an edge that no patch covers": ({"img_size": None}, (2, 3, 9, 7)),
}


@pytest.mark.parametrize("case", PATCHES)
def test_patches_are_embedded_as_timm_does_in_fp64(case):
    options, size = PATCHES[case]
    torch.manual_seed(0)
    assert_same_in_fp64(PatchEmbed(**{"img_size": 8, "patch_size": 4, "embed_dim": 6} | options), *size)


@pytest.mark.parametrize(
    "options", [{}, {"global_pool": "avg", "qk_norm": True, "reg_tokens": 2, "dynamic_img_size": True}]
)
def test_a_whole_model_computes_the_same_in_fp64(options):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    assert_same_in_fp64(VisionTransformer(**sizes, **options), 2, 3, 8, 8)


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
def test_other_layers_stay_as_they_are(layer):
    embedding = PatchEmbed(img_size=8, patch_size=4, in_chans=4, embed_dim=6)
    embedding.proj = layer
    model = nn.Sequential(nn.Conv2d(4, 4, 2, stride=2), embedding)
    GpuKernels(CPU).apply(model)
    assert type(model[0]) is nn.Conv2d and embedding.proj is layer and type(layer) in (nn.Conv2d, OwnConv2d)


def test_neither_convolution_nor_its_backward_is_left_also_compiled(tmp_path):
    model = build_model(small_config(tmp_path, "MODEL.DEPTH=1"), 10)
    GpuKernels(CPU).apply(model)
    images = torch.randn(2, 1, 8, 8)
    for run in (model, torch.compile(model, fullgraph=True, backend="eager", dynamic=False)):
        run(images)
        with torch.autograd.profiler.profile() as profile:
            run(images).sum().backward()
        names = {event.name for event in profile.function_events}
        assert {"aten::linear", "aten::mm"} <= names and not [name for name in names if "conv" in name.lower()]


LISTS = {
    "none": ((), (), HALF),
    "conv2d black": (("conv2d",), (), torch.float32),
    "patch_embed black": (("patch_embed",), (), torch.float32),
    "patch_embed.proj white, patch_embed black": (("patch_embed",), ("patch_embed.proj",), HALF),
    "matmul_v2 black": (("matmul_v2",), (), HALF),
}


@pytest.mark.parametrize("is_listed_first", [True, False])
@pytest.mark.parametrize("lists", LISTS)
def test_lists_mean_what_they_say(tmp_path, lists, is_listed_first):
    """Before, as in a run, or after, as the doctor tries black lists."""
    black, white, dtype = LISTS[lists]
    model = build_model(small_config(tmp_path), 10)
    transforms = [OpOverrides(black, white, "cpu", HALF), GpuKernels(CPU)]
    ModelTransforms(tuple(transforms if is_listed_first else reversed(transforms))).apply(model)
    seen = []
    model.patch_embed.proj.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=HALF):
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert seen == [dtype]
    assert dict(model.named_parameters())["patch_embed.proj.weight"].grad.dtype is torch.float32


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "cpu"])
def test_they_are_for_devices_other_than_the_cpu(tmp_path, device):
    config = small_config(tmp_path)
    model = build_model(config, 10)
    choose_transforms(config, torch.device(device), None, training=False).apply(model)
    assert (type(model.patch_embed.proj) is PatchConv2d) is (device != "cpu")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_log_names_the_kernel_of_attention_that_torch_takes(tmp_path, monkeypatch, dropout):
    model = build_model(small_config(tmp_path, f"MODEL.ATTENTION_DROPOUT={dropout}"), 10)
    (line,) = GpuKernels(CPU, torch.float32).apply(model)
    assert_names(line, "flash" if dropout == 0 else "math", f"dropout {dropout:g}")  # the CPU's own choice
    asked = []
    for number, name in ((3, "cudnn"), (2, "efficient")):
        monkeypatch.setattr(
            attention, "sdpa_choice", lambda *given, answer=number, **words: asked.append(given) or answer
        )
        (line,) = GpuKernels(CPU, HALF).apply(model)
        assert_names(line, name)
    assert all(each.dtype is HALF and each.requires_grad for each in asked[0])
    assert GpuKernels(CPU).apply(model) == []


def test_a_device_that_cannot_tell_its_kernel_trains_without_that_line(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "sdpa_choice", mock.Mock(side_effect=NotImplementedError))
    assert GpuKernels(CPU, HALF).apply(build_model(small_config(tmp_path), 10)) == []
