"""Every YAML file in configs/ goes through the real command line and gives the model that its name says."""

import pytest
import torch

import engine.run
import main_single_gpu
from models import build_model
from tests.support.configs import meta_device
from tests.support.runs import ROOT

PARAMETERS = {  # published, for 1000 classes
    "vit_tiny_patch16_224": 5_717_416,
    "vit_small_patch16_224": 22_050_664,
    "vit_small_patch32_224": 22_878_952,
    "vit_base_patch16_224": 86_567_656,
    "vit_base_patch32_224": 88_224_232,
    "vit_base_patch16_384": 86_859_496,
    "vit_large_patch16_224": 304_326_632,
    "vit_large_patch32_384": 306_632_680,
    "vit_huge_patch14_224": 632_045_800,
}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_yaml_trains_its_model_by_the_command_in_its_comment(path, monkeypatch):
    """The command is the one that the file itself gives; the step runs on the meta device, where it costs nothing."""
    comment = "\n".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    (command,) = [line for line in comment.replace("\\\n", "").splitlines() if "python main_" in line]
    words = command.split("main_")[1].split()[1:]
    loaded = []
    monkeypatch.setattr(engine.run, "run", lambda settings, process: loaded.append(settings) or 0)
    assert main_single_gpu.main(words) == 0
    config = loaded[0].config
    assert not loaded[0].notes
    assert f"configs/{path.name}" in " ".join(words)
    with meta_device():
        model = build_model(config, 1000)
        images = torch.empty(2, config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE)
        logits = model(images)
        logits.sum().backward()
    assert logits.shape == (2, config.MODEL.NUM_CLASSES or 1000)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    if path.stem in PARAMETERS:
        assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[path.stem]


def test_there_are_the_15_of_paddlevit_and_ours():
    sizes = {
        f"vit_{size}_patch{patch}_{side}"
        for size in ("tiny", "small", "base", "large")
        for patch in (16, 32)
        for side in (224, 384)
    }
    paddlevits = sizes - {"vit_tiny_patch32_224", "vit_tiny_patch32_384"} | {"vit_huge_patch14_224"}
    ours = {"vit_digits", "vit_cifar10", "vit_caltech101", "resnet50_caltech256"}
    assert len(paddlevits) == 15
    assert {path.stem for path in CONFIGS} == paddlevits | ours
