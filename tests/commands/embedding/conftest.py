"""Fixtures: weights in a folder as on the Hugging Face hub, drawn photos, and a run on the digits."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.commands.conftest import digits  # noqa: F401
from tests.support.configs import CONVOLUTIONS, beginning_with_weights
from tests.support.image_sets import draw_patches
from tests.support.runs import run, run_folder

ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}


def make_hub(folder, num_classes=3, name="vit_tiny_patch16_224", seed=0, **config):
    """Write a small model of timm in the format of the hub to a folder. Return the model."""
    torch.manual_seed(seed)
    arguments = ARGUMENTS if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=num_classes, **arguments).eval()
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    known = {
        "input_size": [3, 32, 32],
        "mean": [0.4] * 3,
        "std": [0.2] * 3,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    content = {"architecture": name, "num_classes": num_classes, "model_args": arguments, "pretrained_cfg": known}
    (folder / "config.json").write_text(json.dumps(content | config))
    return model


def make_photos(folder, count=10):
    """Draw photos 0.png, 1.png ... The photos from 5 on are in a subfolder."""
    for number in range(count):
        draw_patches(folder / ("more" if number >= 5 else "") / f"{number}.png", number)
    return folder


@pytest.fixture
def hub(here):
    """Return the folder of a small ViT in the current folder."""
    make_hub(here / "hub")
    return "hub"


@pytest.fixture
def photos(here):
    """Return the folder of ten photos in the current folder."""
    return str(make_photos(here / "photos").relative_to(here))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the folder of a run with the CONVOLUTIONS settings, which began with weights of a file."""
    output = tmp_path_factory.mktemp("trained")
    (output / "settings.yaml").write_text(CONVOLUTIONS)
    settings = beginning_with_weights(output / "settings.yaml")
    words = ["-cfg", str(settings), "-output", str(output / "runs")]
    run("main_single_gpu.py", *words, faults={"judge_no_labels": []}).done()
    return run_folder(output / "runs")
