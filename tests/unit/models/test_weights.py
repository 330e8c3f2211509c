"""Pretrained weights: fitted to the model or refused with a reason, downloaded by timm, exported and converted."""

import json
import os
from unittest.mock import Mock

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer

from models.weights.load import load_pretrained
from tests.support.cases import cases_of, names_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import typed
from tests.support.weight_files import (
    CLASSES,
    DEPTH,
    HEADS,
    WIDTH,
    Payload,
    assert_same,
    saved,
    timm_model,
    vit,
)
from utils.errors import ConfigError


def loaded(model, content, tmp_path, **options) -> list[str]:
    """Return the lines about changes, without the first one, which names the file."""
    return load_pretrained(model, str(saved(content, tmp_path / "x.pth")), **options)[1:]


# --- fitting a model

DISTILLED = "deit_tiny_distilled_patch16_224"


def test_mismatched_head_is_dropped_and_named(tmp_path, weights):
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("head")}
    for content, names in ((weights, ("head", 10, 3)), (body, ("head",))):
        model = vit(num_classes=3)
        head = model.head.weight.clone()
        (line,) = loaded(model, content, tmp_path)
        assert_names(line, *names)
        assert torch.equal(model.head.weight, head) and torch.equal(model.norm.weight, weights["norm.weight"])


@pytest.mark.slow
def test_both_mismatched_heads_of_a_distilled_model_are_dropped(tmp_path):
    state = {"model": timm_model(DISTILLED).state_dict()}
    assert [line.split()[0] for line in loaded(timm_model(DISTILLED, 3), state, tmp_path)] == ["head", "head_dist"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_new_image_size_resizes_position_embedding_like_timm(tmp_path, weights, dtype):
    state, model = {name: tensor.to(dtype) for name, tensor in weights.items()}, vit(image_size=48)
    (line,) = loaded(model, state, tmp_path)
    assert_names(line, "pos_embed")
    old = state["pos_embed"].float()
    expected = resample_abs_pos_embed(old, new_size=[6, 6], interpolation="bicubic", antialias=True)
    assert model.pos_embed.dtype == torch.float32
    torch.testing.assert_close(model.pos_embed.data, expected, rtol=0, atol=1e-6)
    assert torch.equal(model.pos_embed[:, 0], old[:, 0])


FITTED = {
    "a grid that is not square": (
        lambda: VisionTransformer((32, 64), 8, num_classes=CLASSES, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS),
        "pos_embed",
        lambda old: resample_abs_pos_embed(old, new_size=[4, 8]),
    ),
    "another patch size": (
        lambda: vit(patch_size=16, image_size=64),
        "patch_embed.proj.weight",
        lambda old: resample_patch_embed(old, [16, 16]),
    ),
    "grey images": (lambda: vit(channels=1), "patch_embed.proj.weight", lambda old: adapt_input_conv(1, old)),
}


@pytest.mark.parametrize("case", FITTED)
def test_mismatched_tensor_is_fitted_as_in_timm(tmp_path, weights, case):
    make, name, fit = FITTED[case]
    model = make()
    (line,) = loaded(model, weights, tmp_path)
    assert_names(line, name.removesuffix(".weight"))
    assert torch.equal(model.state_dict()[name], fit(weights[name]))


def test_grey_naflexvit_starts_from_weights_of_rgb_images(tmp_path):
    """Its first layer is linear. Equal values in all three channels give the logits of the grey image."""
    size = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    rgb, grey = (timm.create_model("naflexvit_base_patch16_gap", in_chans=channels, **size) for channels in (3, 1))
    assert loaded(grey, rgb.state_dict(), tmp_path) == ["  embeds.proj adapted from 3 to 1 channel"]
    image = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(grey.eval()(image), rgb.eval()(image.expand(-1, 3, -1, -1)), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_weights_without_batch_norm_counters_load_completely(tmp_path):
    model, state = timm_model("resnet18"), timm_model("resnet18").state_dict()
    state = {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}
    assert not loaded(model, state, tmp_path) and torch.equal(model.conv1.weight, state["conv1.weight"])


@pytest.mark.filterwarnings("ignore:::timm.layers.interpolate")
def test_swin_position_bias_tables_are_resized(tmp_path):
    small = {"depths": (1,), "embed_dim": 24, "num_classes": 2}
    sizes = (timm.create_model("swin_tiny_patch4_window7_224", img_size=side, **small) for side in (56, 16))
    state, model = (each.state_dict() if number == 0 else each for number, each in enumerate(sizes))
    assert "relative_position_bias_table" in loaded(model, state, tmp_path)[0]


@pytest.mark.parametrize("other", cases_of("mistakes-of_another_architecture"))
def test_weights_of_another_architecture_are_refused_and_model_stays_unchanged(tmp_path, weights, other):
    name, _, value = other.partition("=")
    model = vit(**{name: int(value)}) if value else timm_model(name)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with refused(ConfigError, *names_of("mistakes-of_another_architecture", other)):
        loaded(model, weights, tmp_path)
    assert_same(model.state_dict(), before)


# --- the classifier of a file with class names


THEIRS = ["bird", "cat", "dog"]


def headed(weights, num_classes: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    head = {"head.weight": (num_classes, WIDTH), "head.bias": (num_classes,)}
    return weights | {name: torch.randn(shape, generator=generator) for name, shape in head.items()}


def test_head_rows_of_an_export_match_classes_by_name_and_new_classes_get_mean_row(tmp_path, weights):
    state = headed(weights)
    metadata = {"format": "pt", "class_names": json.dumps(THEIRS), "config": "no JSON"}
    save_file(state, tmp_path / "x.safetensors", metadata)
    model = vit(num_classes=3)
    _, line = load_pretrained(model, str(tmp_path / "x.safetensors"), classes=["dog", "zebra", "bird"])
    for name, own in (("head.weight", model.head.weight), ("head.bias", model.head.bias)):
        assert torch.equal(own[[0, 2]], state[name][[2, 0]])
        torch.testing.assert_close(own[1], state[name][[0, 2]].mean(0))
    assert_names(line, 2, 3, "zebra", "cat")


def test_evaluation_refuses_weights_with_a_head_of_another_size(tmp_path, weights):
    content = {"state_dict": headed(weights), "class_names": THEIRS}
    with refused(ConfigError, 3, 4, "-num_classes"):
        loaded(vit(num_classes=4), content, tmp_path, needs_head=True, classes=list("abcd"))


# --- timm's hub


def test_hub_weights_are_fetched_by_timm_and_fitted(monkeypatch, weights):
    def create_model(name, pretrained):
        assert (name, pretrained) == ("vit_tiny_patch16_224", True)
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        torch.rand(7)
        source = vit()
        source.load_state_dict(weights)
        return source

    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock())  # as if the weights were cached
    model = vit(num_classes=3, image_size=48)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lines = load_pretrained(model, "vit_tiny_patch16_224")
    assert torch.rand(1) == expected, "the global random state has changed"
    assert len(lines) == 3
    assert torch.equal(model.blocks[0].attn.qkv.weight, weights["blocks.0.attn.qkv.weight"])


def test_unreachable_hub_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=ConnectionError("no route\nand much more")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock())
    with refused(ConfigError, "vit_tiny_patch16_224", "ConnectionError", "no route", "MODEL.PRETRAINED"):
        load_pretrained(vit(), "vit_tiny_patch16_224")


def test_download_error_without_a_text_is_named_by_its_type(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=TimeoutError()))
    with refused(ConfigError, "vit_tiny_patch16_224", "(TimeoutError)", "MODEL.PRETRAINED"):
        load_pretrained(vit(), "vit_tiny_patch16_224")


def test_unreachable_hub_without_cached_weights_is_asked_once(monkeypatch):
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=AssertionError("timm would retry for a minute")))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=LocalEntryNotFoundError("not cached")))
    asked = Mock(side_effect=ConnectionError("no route"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", asked)
    with refused(ConfigError, "vit_tiny_patch16_224", "ConnectionError", "no route", "MODEL.PRETRAINED"):
        load_pretrained(vit(), "vit_tiny_patch16_224")
    assert asked.call_count == 1


@pytest.mark.parametrize("source", cases_of("mistakes-of_pretrained"))
def test_pretrained_source_without_weights_or_model_is_refused(here, weights, source):
    saved(weights, here / "vit.pth")
    with refused(ConfigError, *names_of("mistakes-of_pretrained", source)):
        load_pretrained(vit(), source)


@pytest.mark.parametrize("ending", ["yaml", "YML"])
def test_settings_file_as_weights_is_refused_with_its_flag(here, ending):
    source = here / f"mine.{ending}"
    source.write_text("BASE: configs/finetune.yaml\n")
    with refused(ConfigError, "MODEL.PRETRAINED", source, "-cfg"):
        load_pretrained(vit(), str(source))


# --- scripts/export.py


HEAD = {"head.bias": torch.ones(1)}


@pytest.mark.parametrize(
    ("content", "target", "names"),
    [
        ({"state_dict": Payload(os.system, "true"), "config": {}}, "m.safetensors", "code"),
        ({"state_dict": HEAD}, "m.pt", "m.pt .safetensors .pth"),
        ({"state_dict": HEAD}, "m.pdparams", "m.pdparams .safetensors .pth"),
        (HEAD, "best.pth", "-output best.pth"),  # onto itself
    ],
)
def test_impossible_export_is_refused_without_writing(tmp_path, content, target, names):
    path = saved(content, tmp_path / "best.pth")
    typed("scripts/export.py", path, "-output", tmp_path / target).refused(*names.split())
    assert [each.name for each in tmp_path.iterdir()] == ["best.pth"]
