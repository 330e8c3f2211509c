"""The first layer of weights for red, green and blue, fitted to the channels of images with their files' values."""

import pytest
import torch
from timm.models import adapt_input_conv

from configs.schema import Config
from configs.values import flatten
from models import build_model
from models.weights.load import load_pretrained
from tests.support.configs import replaced
from tests.support.refusals import assert_names
from tests.support.weight_files import random_weights, saved, vit

pytestmark = pytest.mark.slow

KERNEL = "patch_embed.proj.weight"


def fitted(tmp_path, channels: int, rgb: tuple[int, ...], **facts) -> tuple[torch.Tensor, list[str]]:
    """Return the first layer's weights [D, C, P, P] after loading RGB weights, and the lines about changes."""
    config = replaced(Config(), DATA={"PIXELS": "uint16", "IMAGE_CHANNELS": channels, "RGB": rgb, "IMAGE_SIZE": 32})
    model = vit(channels=channels)
    content = {"state_dict": random_weights(), **facts} if facts else random_weights()
    lines = load_pretrained(model, str(saved(content, tmp_path / "x.pth")), settings=flatten(config))
    return model.state_dict()[KERNEL], lines[1:]


@pytest.mark.parametrize(("channels", "rgb"), [(5, (2, 1, 0)), (10, (0, 3, 9)), (10, (9, 8, 7))])
def test_named_channels_get_rgb_weights_and_others_their_mean(tmp_path, channels, rgb):
    found, (line,) = fitted(tmp_path, channels, rgb)
    kernel = random_weights()[KERNEL].double()
    expected = kernel.mean(1, keepdim=True).repeat(1, channels, 1, 1)
    expected[:, rgb] = kernel
    torch.testing.assert_close(found.double(), expected * 3 / channels, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.sum(1).double(), kernel.sum(1), rtol=1e-5, atol=1e-5)
    assert_names(line, "patch_embed.proj", 3, channels)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 12])
def test_weights_without_named_colours_are_repeated_as_timm_does(tmp_path, channels):
    found, lines = fitted(tmp_path, channels, ())
    assert torch.equal(found, adapt_input_conv(channels, random_weights()[KERNEL])) and len(lines) == (channels != 3)


def test_three_channels_in_another_order_get_the_weights_of_their_colours(tmp_path):
    found, _ = fitted(tmp_path, 3, (2, 1, 0))
    assert torch.equal(found, random_weights()[KERNEL].flip(1))


def test_weights_trained_with_the_same_order_of_colours_stay_unchanged(tmp_path):
    record = {"DATA.PIXELS": "uint16", "DATA.IMAGE_CHANNELS": 3, "DATA.RGB": [2, 1, 0]}
    found, lines = fitted(tmp_path, 3, (2, 1, 0), config=record)
    assert torch.equal(found, random_weights()[KERNEL]) and not lines


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:::timm.layers.interpolate")
@pytest.mark.parametrize("name", ["repvgg_a0", "mobileone_s0", "fastvit_t8", "crossvit_tiny_240", "tresnet_m"])
@pytest.mark.parametrize("channels", [1, 6])
def test_networks_with_several_or_unusual_first_layers_take_other_channels(tmp_path, name, channels):
    side = 240 if name == "crossvit_tiny_240" else 48  # its two sizes of patches fit few sizes of images

    def built(num_channels: int) -> tuple[torch.nn.Module, Config]:
        data = {"IMAGE_CHANNELS": num_channels, "IMAGE_SIZE": side}
        config = replaced(Config(), DATA=data, MODEL={"TYPE": "timm", "NAME": name})
        return build_model(config, num_classes=5).eval(), config

    colours, _ = built(3)
    path = saved(colours.state_dict(), tmp_path / "x.pth")
    model, config = built(channels)
    lines = load_pretrained(model, str(path), settings=flatten(config))
    images = torch.rand(2, channels, side, side)
    # Grey images count as colours; six channels as the mean of the first and last three.
    same = images.expand(-1, 3, -1, -1) if channels == 1 else images.unflatten(1, (2, 3)).mean(1)
    with torch.no_grad():
        logits, expected = model(images), colours(same)
    # Random weights make some logits as large as 1e11.
    assert (logits - expected).norm() < 1e-3 * expected.norm()
    assert_names(lines[1], 3, channels)
