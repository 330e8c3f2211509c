"""Attention rollout compared with a computation in numpy, and the models that support it."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torchvision.ops import Permute

from engine.predict.attention_maps import GradientMaps, Rollout, map_names, overlaid

pytestmark = pytest.mark.slow

SMALL = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 12, "depth": 3, "num_heads": 3, "num_classes": 5}
KINDS = {
    "class token": {},
    "mean": {"global_pool": "avg", "class_token": False},
    "mean beside a class token and registers": {"global_pool": "avg", "reg_tokens": 2},
    "class token before registers": {"reg_tokens": 3},
    "mean of all": {"global_pool": "avg", "pool_include_prefix": True},
    "normalized queries and keys": {"qk_norm": True},
    "as CLIP has it": {"pre_norm": True, "fc_norm": False},
    "distilled": {"build": VisionTransformerDistilled},
}


def random_model(build=VisionTransformer, **arguments) -> torch.nn.Module:
    """Return a model with large random weights, so that its attention is far from uniform."""
    torch.manual_seed(0)
    model = build(**arguments).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


def rollout_in_numpy(model, images) -> np.ndarray:
    """Return rollout [B, N, N], computed only from the weights of a plain ViT and the inputs of its blocks."""
    inputs = []
    hooks = [block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in model.blocks]
    with torch.no_grad():
        model(images)
    for hook in hooks:
        hook.remove()
    mixed = np.eye(inputs[0].shape[1])
    for block, tokens in zip(model.blocks, inputs, strict=True):
        x = normalized(tokens.double().numpy(), block.norm1)
        qkv = x @ array(block.attn.qkv.weight).T + array(block.attn.qkv.bias)
        B, N, _ = x.shape
        q, k, _ = qkv.reshape(B, N, 3, 3, 4).transpose(2, 0, 3, 1, 4)  # [B, heads, N, 4]
        if not isinstance(block.attn.q_norm, torch.nn.Identity):
            q, k = normalized(q, block.attn.q_norm), normalized(k, block.attn.k_norm)
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(4)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).mean(1)
        mixed = (weights + np.eye(N)) / 2 @ mixed
    return mixed


def normalized(x, norm):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return x * array(norm.weight) + array(norm.bias)


def array(tensor):
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_attention_rollout_matches_numpy_computation(kind):
    model, images = random_model(**SMALL, **KINDS[kind]), torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        before = model(images)
    maps = Rollout.of(model, images[:1])(images, torch.zeros(2, dtype=int)).numpy()
    mixed, prefix = rollout_in_numpy(model, images), model.num_prefix_tokens
    num_heads = 2 if kind == "distilled" else 1  # each head reads its own token
    rows = mixed[:, :num_heads] if model.global_pool == "token" else mixed[:, 0 if kind == "mean of all" else prefix :]
    expected = rows.mean(1)[:, prefix:].reshape(2, 4, 4)
    np.testing.assert_allclose(maps, expected, rtol=1e-4)
    assert expected.max() > 1.05 * expected.min()
    assert all(block.attn.fused_attn for block in model.blocks)
    assert torch.equal(model(images), before), "the model must be unchanged"


TIMM = {  # at 64 pixels if the model supports it
    "vit_tiny_r_s16_p8_224": (Rollout, {"img_size": 64}),
    "beit_base_patch16_224": (Rollout, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "eva02_tiny_patch14_224": (Rollout, {"img_size": 56, "depth": 2}),
    "swin_tiny_patch4_window7_224": (
        GradientMaps,
        {"img_size": 64, "window_size": 4, "depths": (1, 1, 1, 1), "embed_dim": 24},
    ),
    "vit_so150m_patch16_reg4_map_256": (GradientMaps, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}),
    "test_convnext": (GradientMaps, {}),
    "test_resnet": (GradientMaps, {}),
    "test_maxvit": (GradientMaps, {"img_size": 64}),
    "cait_xxs24_224": (GradientMaps, {"img_size": 64, "depth": 2}),
    "mixer_s32_224": (GradientMaps, {"img_size": 64}),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_models_get_attention_rollout_or_gradient_maps(name):
    kind, arguments = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **arguments).eval()
    side = arguments.get("img_size", 64)
    image = torch.randn(2, 3, side, side)
    source = Rollout.of(model, image[:1]) or GradientMaps.of(model, image[:1])
    assert type(source) is kind
    maps = source(image, torch.tensor([0, 2]))
    assert maps.shape[0] == 2 and min(maps.shape[1:]) > 1 and maps.isfinite().all() and maps.min() >= 0
    assert not maps.requires_grad and all(weight.grad is None for weight in model.parameters())


def test_gradient_maps_equal_class_activation_maps_for_pooled_heads():
    """Compare with Zhou et al., https://arxiv.org/abs/1512.04150: the last features, weighted by the head's weights."""
    torch.manual_seed(0)
    model, images = timm.create_model("test_resnet", num_classes=3).eval(), torch.randn(2, 3, 224, 224)
    for weights in model.requires_grad_(False).fc.parameters():
        torch.nn.init.normal_(weights)
    classes = torch.tensor([0, 2])
    maps = GradientMaps.of(model, images[:1])(images, classes)
    features = model.forward_features(images)
    expected = torch.einsum("bchw,bc->bhw", features, model.fc.weight[classes]).relu() / 49
    assert maps.shape == (2, 7, 7)
    torch.testing.assert_close(maps, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("channels", "order"), [(6, "NCHW"), (6, "NHWC"), (4, "NCHW"), (4, "NHWC")])
def test_gradient_maps_do_not_depend_on_channel_order(channels, order):
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            places = [0, 2, 3, 1] if order == "NHWC" else [0, 1, 2, 3]
            self.stage = torch.nn.Sequential(torch.nn.Conv2d(3, channels, 1), Permute(places))
            self.head, self.output_fmt = torch.nn.Linear(channels, 5), order

        def forward(self, images):
            return self.head(self.stage(images).mean((1, 2) if order == "NHWC" else (2, 3)))

    model, images, classes = Pooled(), torch.randn(2, 3, 4, 4), torch.tensor([0, 2])
    expected = torch.einsum("bchw,bc->bhw", model.stage[0](images), model.head.weight[classes]).relu() / 16
    torch.testing.assert_close(GradientMaps(model, model.stage, channels, images.shape[2:])(images, classes), expected)


def test_attention_overlay_colors_range_from_blue_to_red():
    photo = Image.new("RGB", (8, 4), (100, 100, 100))
    low, high = (np.asarray(overlaid(photo, np.array([[0.02, 0.02, 0.05, 0.05]])))[0, x].tolist() for x in (0, 7))
    assert low[2] > low[0] and high[0] > high[2], "the first must be the lowest"
    even = np.asarray(overlaid(photo, np.full((2, 2), 3.0)))
    assert even.shape == (4, 8, 3) and (even == low).all()
    assert map_names(["a/x.jpg", "b/x.png", "x-2.jpg", "y.jpg"]) == ["x.png", "x-2.png", "x-2-2.png", "y.png"]


def test_gradient_maps_of_small_images_use_an_earlier_stage():
    model = timm.create_model("test_resnet", num_classes=3).eval()
    for side, places in ((32, 8), (64, 8), (128, 8), (224, 7)):
        image = torch.randn(1, 3, side, side)
        assert GradientMaps.of(model, image)(image, torch.tensor([0])).shape[-1] == places
