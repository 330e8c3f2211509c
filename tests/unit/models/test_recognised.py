"""Weights of other programs that do not name their model: their file's name or their shapes say it."""

from pathlib import Path

import pytest
import timm
import torch

from engine.settings import load_settings
from models.weights.recognised import recognise
from tests.support.refusals import refused
from utils.errors import ConfigError


def save(name: str, file: str, **arguments) -> Path:
    """Save the weights of a timm model without any metadata, and return the file."""
    torch.manual_seed(0)
    torch.save(timm.create_model(name, **arguments).state_dict(), file)
    return Path(file).absolute()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("resnet18", "resnet18-f37072fd.pth"),
        ("mobilenetv3_small_050", "my_mobilenetv3_small_050_best.pth"),
        ("mobilenetv3_small_050.lamb_in1k", "mobilenetv3_small_050.lamb_in1k.pth"),
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224-a1311bcf.pth"),
    ],
)
def test_name_of_a_file_says_its_model(here, name, file):
    known = recognise(save(name.partition(".")[0], file, num_classes=3))
    assert (known.name, known.how) == (name, "by its name")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "size"), [("resnet18", {}, 224), ("vit_tiny_patch16_224", {"img_size": 96}, 96)]
)
def test_shapes_say_model_and_image_size_if_the_name_does_not(here, name, arguments, size):
    known = recognise(save(name, "best.pth", **arguments))
    assert (known.name, known.images["DATA.IMAGE_SIZE"]) == (name, size)
    config = load_settings(["-pretrained", "best.pth", "-data_path", "photos"]).config
    assert (config.MODEL.TYPE, config.MODEL.NAME, config.DATA.IMAGE_SIZE) == ("timm", name, size)


@pytest.mark.slow
def test_wrong_name_of_a_file_does_not_decide(here):
    assert recognise(save("resnet18", "resnet34.pth")).name == "resnet18"


def test_models_with_twins_of_the_same_shapes_still_need_a_name(here):
    save("mobilenetv3_small_050", "best.pth")
    assert recognise(Path("best.pth")) is None
    with refused(ConfigError, "MODEL.NAME", "best.pth"):
        load_settings(["-pretrained", "best.pth", "-data_path", "photos"])


@pytest.mark.slow
def test_typed_model_name_wins_over_the_name_of_the_file(here):
    save("resnet18", "resnet18.pth")
    words = ["-pretrained", "resnet18.pth", "-data_path", "photos", "-opts", "MODEL.NAME=resnet34"]
    assert load_settings(words).config.MODEL.NAME == "resnet34"
