"""Features of models: the classifier reads them."""

import pytest
import timm
import torch
from torch import nn

from models.features import features_of, width_of
from tests.support.refusals import refused
from utils.errors import ConfigError

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def vit(**more) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT, **more).eval()


@pytest.mark.parametrize(
    "model",
    [
        lambda: vit(),
        lambda: vit(reg_tokens=3, global_pool="avg"),
        lambda: timm.create_model("test_resnet", num_classes=5).eval(),
        lambda: timm.create_model("test_convnext", num_classes=5).eval(),
    ],
    ids=["vit", "registers", "resnet", "convnext"],
)
def test_classifier_of_features_equals_logits(model):
    model, images = model(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features, logits = features_of(model, images, with_logits=True)
        torch.testing.assert_close(logits, model(images))
        torch.testing.assert_close(model.get_classifier()(features), logits)
        alone, no_logits = features_of(model, images)
    assert no_logits is None and torch.equal(alone, features)
    assert width_of(model, 3, (32, 32)) == features.shape[1]


def test_model_without_features_is_refused_by_name():
    with refused(ConfigError, "Sequential", "forward_features"):
        width_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), 3, (2, 2))


def test_measuring_features_keeps_mode_and_statistics():
    model = timm.create_model("test_resnet", num_classes=5).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    width_of(model, 3, (32, 32))
    assert model.training and all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
