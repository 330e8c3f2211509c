"""The first layer: where it is a convolution, autocast rounds the images whether or not they come rounded."""

import pytest
import timm
import torch

from configs.schema import Config
from models import build_model
from models.parts import starts_with_convolution
from tests.support.configs import replaced

SMALL = {"PATCH_SIZE": 4, "EMBED_DIM": 16, "DEPTH": 1, "NUM_HEADS": 2}
ONE_OF_EACH_KIND = "test_vit test_resnet test_byobnet test_convnext test_efficientnet test_maxvit test_nfnet".split()


@pytest.mark.parametrize("name", ["ours", *ONE_OF_EACH_KIND])
def test_autocast_computes_the_same_from_images_that_are_rounded_already(name):
    ours = replaced(Config(), DATA={"IMAGE_SIZE": 8}, MODEL=SMALL)
    model = (build_model(ours, 10) if name == "ours" else timm.create_model(name)).eval()
    images = torch.randn(2, 3, *[8 if name == "ours" else 160] * 2)
    assert starts_with_convolution(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(images), model(images.bfloat16()))


def test_images_that_take_two_ways_are_not_rounded_before():
    assert not starts_with_convolution(timm.create_model("crossvit_9_240"))
