"""Models: building from settings, timm's messages, and frozen parameters."""

import copy
from unittest.mock import Mock

import pytest
import torch
import yaml

from configs.schema import Config, Data, Model
from models import build_model, describe_size
from models.parts import freeze
from tests.support.cases import cases_of, names_of, value_of
from tests.support.configs import meta_device
from tests.support.refusals import refused
from utils.errors import ConfigError


def config_of(image_size=32, channels=3, **model) -> Config:
    small = {"PATCH_SIZE": 8, "EMBED_DIM": 48, "DEPTH": 2, "NUM_HEADS": 4} if model.get("TYPE") != "timm" else {}
    return Config(DATA=Data(IMAGE_SIZE=image_size, IMAGE_CHANNELS=channels), MODEL=Model(**(small | model)))


def test_dropout_norms_and_activation_match_paddlevit():
    model = build_model(config_of(DROPOUT=0.1, ATTENTION_DROPOUT=0.2, DROPPATH=0.3), 10)
    block = model.blocks[-1]
    assert (model.pos_drop.p, block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p) == (0.1,) * 4
    assert block.attn.attn_drop.p == 0.2
    assert block.drop_path1.drop_prob == pytest.approx(0.3)
    assert model.head_drop.p == 0.0
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 5 and {norm.eps for norm in norms} == {1e-6}
    assert type(block.mlp.act) is torch.nn.GELU and block.mlp.act.approximate == "none"


def test_model_settings_reach_the_built_model():
    model = build_model(config_of(24, channels=1, QKV_BIAS=False, MLP_RATIO=2.0), 7)
    assert model.patch_embed.proj.weight.shape == (48, 1, 8, 8)
    assert model.pos_embed.shape == (1, 10, 48)
    assert model.blocks[0].attn.qkv.bias is None
    assert model.blocks[0].mlp.fc1.out_features == 96
    assert model(torch.zeros(2, 1, 24, 24)).shape == (2, 7)


@pytest.mark.parametrize("fields", cases_of("mistakes-of_models"))
def test_impossible_model_error_names_the_setting(fields):
    config = config_of(**yaml.safe_load(f"{{{fields}}}"))
    with refused(ConfigError, *names_of("mistakes-of_models", fields)):
        build_model(config, 10)


def test_building_a_model_never_uses_the_network(monkeypatch):
    connect = Mock(side_effect=AssertionError("the network was asked"))
    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    with refused(ConfigError, "MODEL.NAME", "hf-hub:timm/resnet18.a1_in1k"):
        build_model(config_of(TYPE="timm", NAME="hf-hub:timm/resnet18.a1_in1k"), 10)
    with torch.device("meta"):
        build_model(config_of(224, TYPE="timm", NAME="resnet18.a1_in1k"), 10)


@pytest.mark.slow
def test_timm_models_are_built_with_configured_image_size_channels_and_dropout():
    name = "swin_tiny_patch4_window7_224"
    with meta_device():
        model = build_model(config_of(256, TYPE="timm", NAME=name, DROPPATH=0.1, ATTENTION_DROPOUT=0.1), 10)
    assert model.patch_embed.img_size == (256, 256) and model.num_classes == 10
    model = build_model(config_of(50, channels=1, TYPE="timm", NAME="resnet18", DROPOUT=0.25), 10).eval()
    assert model.drop_rate == 0.25
    assert model(torch.zeros(1, 1, 50, 50)).shape == (1, 10)


@pytest.mark.slow
@pytest.mark.parametrize("model", cases_of("rates_of_timm_models"))
def test_zero_dropout_rate_stays_zero_and_unset_rate_keeps_default(model):
    config = config_of(224, **yaml.safe_load(f"{{TYPE: timm, NAME: {model}}}"))
    with meta_device():
        built = build_model(config, 10)
    rates = [getattr(each, "drop_prob", getattr(each, "p", 0)) or 0 for each in built.modules()]
    largest = max(*rates, getattr(built, "drop_rate", 0))
    assert f"{largest:g}, {describe_size(built)}" == value_of("rates_of_timm_models", model)


def trainable(*patterns: str) -> set[str]:
    model = build_model(config_of(FREEZE=patterns), 10)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_later_freeze_patterns_override_earlier_ones():
    everything = trainable()
    block = {name for name in everything if name.startswith("blocks.0.")}
    assert trainable("blocks.0") == trainable("blocks.0.*") == everything - block
    assert trainable("pos_embed", "*.bias") == {n for n in everything if n != "pos_embed" and not n.endswith(".bias")}
    assert trainable("*", "!head", "head.bias") == {"head.weight"}
    assert trainable("*", "!classifier") == {"head.weight", "head.bias"}
    assert trainable("*", "!blocks.?.norm1") == {
        f"blocks.{n}.norm1.{leaf}" for n in (0, 1) for leaf in ("weight", "bias")
    }


def running_means(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("running_mean")}


@pytest.mark.long
@pytest.mark.parametrize("wrap", ["plain", "copied", "compiled", "retyped"])
def test_frozen_batch_norm_keeps_its_statistics_in_training(wrap):
    model = build_model(config_of(32, TYPE="timm", NAME="test_resnet", FREEZE=("*", "!fc", "!layer4")), 10)
    step = model = copy.deepcopy(model) if wrap == "copied" else model.double().float() if wrap == "retyped" else model
    if wrap == "compiled":
        step = torch.compile(model, backend="eager")
    before = running_means(model)
    step.eval()
    step.train()
    step(torch.randn(2, 3, 32, 32))
    after = running_means(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("layer4.")}
    assert model.training and model.layer4[0].bn1.training and not model.bn1.training


def test_batch_norm_with_one_trained_parameter_stays_in_training_mode():
    model = build_model(config_of(32, TYPE="timm", NAME="resnet18", FREEZE=("*.weight",)), 10).train()
    assert model.bn1.training


@pytest.mark.parametrize(("pattern", "trains"), [("0", True), ("1", False)])
def test_batch_norm_without_parameters_is_frozen_only_by_name(pattern, trains):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 2))
    freeze(model, (pattern,))
    assert model.train()[1].training is trains


def test_image_size_of_a_large_network_is_checked_by_shapes_alone(monkeypatch):
    computed, convolve = [], torch.nn.Conv2d.forward
    monkeypatch.setattr(
        torch.nn.Conv2d,
        "forward",
        lambda self, images: (computed.append(images.device.type), convolve(self, images))[1],
    )
    build_model(config_of(1024, TYPE="timm", NAME="resnet10t"), 10)
    assert set(computed) == {"meta"}
