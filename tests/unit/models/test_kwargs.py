"""MODEL.KWARGS reaches timm's constructors, and every change to a model's computation keeps timm's numbers."""

from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from configs.schema import Arguments, Model
from models import build_model
from models.kwargs import check_kwargs
from models.positions import loses_tokens
from models.transforms import choose_transforms
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import refused
from utils.errors import ConfigError

FIELDS = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 5, "embed_dim": 16, "depth": 2, "num_heads": 2}
KWARGS = [
    {"pos_embed": "none", "class_token": False, "global_pool": "avg", "reg_tokens": 4, "init_values": 0.5},
    {"qk_norm": True, "reg_tokens": 1, "act_layer": "relu", "norm_layer": "rmsnorm", "no_embed_class": True},
    {"dynamic_img_size": True, "patch_drop_rate": 0.5, "fc_norm": True},
    {"global_pool": "map", "scale_attn_norm": True, "pre_norm": True, "final_norm": False},
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("kwargs", KWARGS)
def test_model_arguments_give_logits_and_gradients_of_plain_timm_model(tmp_path, kwargs, half, training):
    given = {name: value for name, value in kwargs.items() if name != "pos_embed"}
    fields = {"POS_EMBED": kwargs.get("pos_embed", "learn"), "KWARGS": Arguments(given)}
    config = replaced(small_config(tmp_path), MODEL=fields, PRECISION={"RESIDUAL": "float32"})
    if config.MODEL.POS_EMBED == "none" and loses_tokens():  # timm 1.0.25 and earlier
        with refused(ConfigError, "MODEL.POS_EMBED", "1.0.26 or later"):
            build_model(config, 5)
        return
    torch.manual_seed(0)
    theirs, ours = VisionTransformer(**FIELDS, **kwargs), build_model(config, 5)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(theirs.state_dict())
    choose_transforms(config, CPU, half, training).apply(ours)
    images, found = torch.randn(4, 1, 8, 8), []
    for model in (theirs.train(training), ours.train(training)):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half is not None):
            logits = model(images)
        logits.float().square().sum().backward()
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    near = {"rtol": 1e-4, "atol": 1e-4} if half is None else {"rtol": 0.05, "atol": 0.5}
    torch.testing.assert_close(found[1], found[0], **near)


def test_model_whose_tokens_timm_would_lose_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("models.positions.loses_tokens", lambda: True)
    for without_tokens in (False, True):
        arguments = {"class_token": False, "global_pool": "avg"} if without_tokens else {}
        config = replaced(small_config(tmp_path), MODEL={"POS_EMBED": "none", "KWARGS": Arguments(arguments)})
        with nullcontext() if without_tokens else refused(ConfigError, "MODEL.POS_EMBED", timm.__version__, "learn"):
            build_model(config, 5)


def test_fixed_position_embeddings_match_big_vision(tmp_path):
    y, x = np.mgrid[:2, :2]
    omega = 10_000.0 ** -(np.arange(4) / 3)
    y, x = (each.flatten()[:, None] * omega for each in (y, x))
    expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    for kwargs, num_others in (({"class_token": False, "global_pool": "avg"}, 0), ({"reg_tokens": 2}, 3)):
        fields = {"POS_EMBED": "sincos2d", "KWARGS": Arguments(kwargs)}
        model = build_model(replaced(small_config(tmp_path), MODEL=fields), 5)
        others, rows = model.pos_embed[0].split([num_others, 4])
        np.testing.assert_allclose(rows, expected, atol=1e-6)
        assert not others.any() and not model.pos_embed.requires_grad


def test_model_arguments_reach_timm_models_by_name(tmp_path):
    settings = {"TYPE": "timm", "NAME": "resnet18", "PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12, "NUM_HEADS": 12}
    config = replaced(small_config(tmp_path), MODEL=settings)
    config = replaced(config, MODEL={"KWARGS": Arguments({"stem_type": "deep", "act_layer": None})})
    with torch.device("meta"):
        ours, theirs = (
            build_model(config, 5),
            timm.create_model("resnet18", in_chans=1, num_classes=5, stem_type="deep"),
        )
    assert [each.shape for each in ours.parameters()] == [each.shape for each in theirs.parameters()]
    with refused(ConfigError, "MODEL.KWARGS.stem_typ", "stem_type"):
        build_model(replaced(config, MODEL={"KWARGS": Arguments({"stem_typ": "deep"})}), 5)


ENDLESS = (
    {"reg_tokens": 10**11},
    {"init_values": 1e-5, "reg_tokens": 2},
    {"depth": 1_000, "embed_dim": 6, "num_heads": 1},
)


@pytest.mark.parametrize("kwargs", ENDLESS, ids=str)
def test_model_with_too_many_tensors_is_refused_before_exhausting_memory(tmp_path, monkeypatch, kwargs):
    monkeypatch.setattr("models.kwargs.MOST_TENSORS", 20)
    config = replaced(small_config(tmp_path), MODEL={"KWARGS": Arguments(kwargs)})
    if "depth" in kwargs:
        fields = {"TYPE": "timm", "NAME": "vit_tiny_patch16_224", "PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12}
        config = replaced(config, MODEL=fields | {"NUM_HEADS": 12})
    with refused(ConfigError, "MODEL.KWARGS", *kwargs):
        build_model(config, 5)


@pytest.mark.parametrize("kwargs", [{"depth": 10**5}, {"depths": [2, 10**30]}, {"layers": [[1001]]}], ids=str)
def test_model_with_too_many_layers_is_refused_before_building(kwargs):
    with refused(ConfigError, "MODEL.KWARGS", *kwargs, "1,000"):
        check_kwargs(Model(TYPE="timm", NAME="x", KWARGS=Arguments(kwargs)))


def test_timm_model_without_pooling_is_refused(tmp_path):
    with refused(ConfigError, "MODEL.KWARGS.global_pool"):
        build_model(replaced(small_config(tmp_path), MODEL={"KWARGS": Arguments({"global_pool": ""})}), 5)
