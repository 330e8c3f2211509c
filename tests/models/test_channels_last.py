"""Convolutions with channels last compute the same, and nothing of that layout gets into a checkpoint."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from configs.load import load
from models import build_model
from models.transforms import ModelTransforms, choose_transforms
from models.transforms.kernels import ChannelsLast
from tests.support.configs import CPU, small_config
from tests.support.runs import ROOT
from tests.support.trainers import make_trainer, update

OPTIONS = "DATA.DATASET=synthetic DATA.SYNTHETIC_SIZE=64 DATA.IMAGE_SIZE=16 DATA.BATCH_SIZE=16 MODEL.NAME=test_resnet"
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def benchmark_as_before(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.fixture
def config():
    options = [*OPTIONS.split(), "MODEL.NUM_CLASSES=10", "TRAIN.WARMUP_EPOCHS=0"]
    return load(["-cfg", str(ROOT / "configs/timm.yaml"), "-opts", *options]).config


def trainer_with(config, *transforms):
    with mock.patch("engine.build.choose_transforms", return_value=ModelTransforms(transforms)):
        trainer = make_trainer(config, double=True)
    layouts = []
    conv = [each for each in trainer.model.modules() if isinstance(each, nn.Conv2d)][3]
    conv.register_forward_pre_hook(lambda module, images: layouts.append(is_last(images[0])))
    return trainer, layouts


def is_last(images: torch.Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


def tensors(state: dict) -> dict[str, torch.Tensor]:
    found = {f"{key}.{name}": each for key in ("state_dict", "state_dict_ema") for name, each in state[key].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"{number}.{name}": each for name, each in moments.items()}
    return found


def test_training_comes_to_the_same_and_a_run_without_it_goes_on_from_its_state(config):
    plain, others = trainer_with(config)
    trainer, layouts = trainer_with(config, ChannelsLast())
    for each in (plain, trainer):
        update(each, 2)
    assert all(layouts) and layouts and not any(others)
    resumed, _ = trainer_with(config)
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    for each in (plain, trainer, resumed):
        update(each, 2)
    expected = tensors(plain.state_dict())
    for each in (trainer, resumed):
        for name, tensor in tensors(each.state_dict()).items():
            assert tensor.stride() == expected[name].stride(), name
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)


def test_it_is_for_gpus_and_models_whose_convolutions_overlap(config, tmp_path):
    def changed(config, device) -> bool:
        transforms = choose_transforms(config, device, None, training=True).transforms
        model = build_model(config, 10)
        cls = type(model)
        for each in transforms:
            if isinstance(each, ChannelsLast):
                each.apply(model)
        return type(model) is not cls

    vit = small_config(tmp_path)
    assert [changed(*each) for each in ((config, CUDA), (config, CPU), (vit, CUDA))] == [True, False, False]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_are_benchmarked_unless_the_run_is_deterministic(config, is_deterministic):
    model = build_model(config, 10)
    with mock.patch("torch.are_deterministic_algorithms_enabled", return_value=is_deterministic):
        ChannelsLast().apply(model)
    assert torch.backends.cudnn.benchmark is not is_deterministic


def test_reverted_the_model_is_what_it_was(config):
    model = build_model(config, 10)
    cls = type(model)
    ChannelsLast().apply(model)
    assert type(model) is not cls and isinstance(model, cls)
    ChannelsLast().revert(model)
    assert type(model) is cls
