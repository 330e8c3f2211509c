"""Features of models: the classifier reads the pooled features, and patch tokens keep the order of the patches."""

import pytest
import timm
import torch
from torch import nn

from models.features import features_of, widths_of
from tests.support.refusals import refused
from utils.errors import ConfigError

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def vit(**more) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **VIT, **more).eval()


@pytest.mark.parametrize(
    ("model", "patches", "grid"),
    [
        (lambda: vit(), 16, 4),
        (lambda: vit(reg_tokens=3, global_pool="avg"), 16, 4),
        (lambda: timm.create_model("test_resnet", num_classes=5).eval(), 1, 1),
        (lambda: timm.create_model("test_convnext", num_classes=5).eval(), 1, 1),
    ],
    ids=["vit", "registers", "resnet", "convnext"],
)
def test_classifier_of_pooled_features_equals_logits(model, patches, grid):
    model, images = model(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = features_of(model, images)
        torch.testing.assert_close(model.get_classifier()(found.pooled), model(images))
    assert found.patches.shape[:2] == (2, patches)
    assert widths_of(model, 3, 32) == (found.pooled.shape[1], found.patches.shape[2], grid)


def test_patch_token_depends_on_its_own_patch():
    model = vit()
    model.blocks = nn.Sequential()  # without attention, each token depends on one patch
    images = torch.zeros(1, 3, 32, 32)
    images[:, :, 8:16, 24:32] = 1  # row 1, column 3 of a 4 x 4 grid
    with torch.no_grad():
        changed = (features_of(model, images).patches - features_of(model, images * 0).patches).abs().amax(2)[0]
    assert changed.nonzero().tolist() == [[7]]


def test_patch_tokens_of_convolutions_are_row_by_row():
    model = timm.create_model("test_resnet", num_classes=5).eval()
    images = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    square = images[..., :64]
    with torch.no_grad():
        expected = model.forward_features(square)  # [B, D, H, W]
        found = features_of(model, square).patches
        torch.testing.assert_close(found[0, 1], expected[0, :, 0, 1])
        assert features_of(model, images).patches is None  # not a square grid


def test_model_without_features_is_refused_by_name():
    with refused(ConfigError, "Sequential", "forward_features"):
        widths_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), 3, 2)


def test_measuring_features_keeps_mode_and_statistics():
    model = timm.create_model("test_resnet", num_classes=5).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    widths_of(model, 3, 32)
    assert model.training and all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
