"""PRECISION.MODE float8, with torchao's emulation on other hardware: the affected layers, and the accuracy."""

import copy
import sys

import pytest
import torch
from torch import nn

import models.transforms.float8
from configs.values import flatten
from datasets import Normalize, build_preparation
from engine.open_model import config_of
from engine.precision import Precision
from models import build_model
from models.transforms import choose_transforms
from models.transforms.float8 import check_float8
from tests.support.configs import CPU, small_config
from tests.support.refusals import refused
from tests.support.runs import typed
from tests.support.trainers import cosines_to_float32, make_trainer, update
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda")
# In all blocks except the last, fc1 has 1056 outputs, which is enough for float8.
FLOAT8 = ("AMP=true", "PRECISION.MODE=float8", "MODEL.MLP_RATIO=66", "MODEL.DEPTH=3")


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path, *FLOAT8)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Let runs on this machine compute in float8 too."""
    monkeypatch.setattr(models.transforms.float8, "check_float8", lambda device: None)


def prepared(config, num_classes=10) -> tuple[nn.Module, Precision, list[str]]:
    torch.manual_seed(0)
    model, precision = build_model(config, num_classes), Precision(config, CPU)
    return model, precision, choose_transforms(config, CPU, precision.half).apply(model)


def in_float8(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_unsupported_float8_device_is_refused_before_reading_data(tmp_path, small_yaml, monkeypatch):
    monkeypatch.setattr(models.transforms.float8, "check_float8", check_float8)
    monkeypatch.setitem(sys.modules, "torchao", None)  # the device is reported first, because it cannot be installed
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "output"), "-dataset", "imagefolder"]
    options = ["DATA.DATA_PATH=nowhere", "DEVICE=cpu", "PRECISION.MODE=float8"]
    ended = typed("main_single_gpu.py", *flags, "-amp", "-opts", *options).refused("PRECISION.MODE", "cpu", "8.9")
    assert "nowhere" not in ended.stderr and not (tmp_path / "output").exists()


@pytest.mark.parametrize(("capability", "has_torchao"), [((8, 6), True), ((8, 9), True), ((8, 9), False)])
def test_float8_is_refused_on_old_gpu_or_without_torchao(monkeypatch, capability, has_torchao):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Old")
    if not has_torchao:
        monkeypatch.setitem(sys.modules, "torchao", None)
        monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    if has_torchao and capability == (8, 9):
        check_float8(CUDA)
    else:
        with refused(ConfigError, "PRECISION.MODE", "NVIDIA Old" if has_torchao else "pip install torchao"):
            check_float8(CUDA)


@pytest.mark.parametrize(("ratio", "mlp"), [(4, ["fc1"]), (6, ["fc1", "fc2"])])
def test_only_large_linear_layers_compute_in_float8(tmp_path, ratio, mlp):
    """In ViT-Base: qkv (2304 outputs) and fc1 (3072).

    Not proj and fc2 (768), not a last block for only the class token,
    and not a classifier of any size. At a ratio of 6, fc2 has 4608 inputs."""
    options = (
        "AMP=true",
        "PRECISION.MODE=float8",
        "MODEL.EMBED_DIM=768",
        "MODEL.NUM_HEADS=12",
        f"MODEL.MLP_RATIO={ratio}",
    )
    model, _, lines = prepared(small_config(tmp_path, *options), num_classes=2048)
    assert in_float8(model) == ["blocks.0.attn.qkv", *(f"blocks.0.mlp.{name}" for name in mlp)]
    assert lines == [f"{1 + len(mlp)} of 9 Linear layers compute in float8"]


@pytest.mark.parametrize("which", ["BLACK", "WHITE"])
def test_layer_in_a_precision_list_is_not_converted_to_float8(tmp_path, which):
    model, _, lines = prepared(small_config(tmp_path, *FLOAT8, f"PRECISION.CUSTOM_{which}_LIST=[blocks.0.mlp]"))
    assert in_float8(model) == ["blocks.1.mlp.fc1"] and lines[-1].startswith("1 of 13")


@pytest.mark.parametrize("option", ["MODEL.MLP_RATIO=64", "PRECISION.CUSTOM_BLACK_LIST=[Linear]"])
def test_float8_is_refused_for_model_without_convertible_layers(tmp_path, option):
    with refused(ConfigError, "PRECISION.MODE", "float8", 13):
        prepared(small_config(tmp_path, *FLOAT8, option))


@pytest.mark.long
def test_float8_model_keeps_float32_weights_and_compiles_without_breaks(config):
    model, precision, _ = prepared(config)
    torch.manual_seed(0)
    plain, images, exact = build_model(config, 10), torch.randn(3, 1, 8, 8), copy.deepcopy(model)
    for (name, mine), (plain_name, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name and mine.dtype is torch.float32 and torch.equal(mine, theirs)
    transforms = choose_transforms(config, CPU, precision.half)
    transforms.revert(exact)
    torch.testing.assert_close(exact(images), plain(images))
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    with precision.autocast():
        assert (model(images) - plain(images)).abs().max() > 1e-4
        torch.testing.assert_close(compiled(images), model(images))
    transforms.apply(exact)
    assert in_float8(exact) == in_float8(model) != []


@pytest.mark.long
def test_float8_training_stays_near_float32_and_resumes_exactly(tmp_path):
    config = small_config(tmp_path, *FLOAT8, "TRAIN.WARMUP_EPOCHS=0", "TRAIN.MODEL_EMA=true")
    trainer, losses = make_trainer(config), []
    while trainer.step < 24:
        if trainer.step == 12:
            state = copy.deepcopy(trainer.state_dict())
        losses.append(update(trainer).report().loss)
    assert sum(losses[-6:]) < sum(losses[:6]) and trainer.report().skipped == 0
    cosines = cosines_to_float32(trainer)
    assert 0.9 < cosines["blocks.0.mlp.fc1.weight"] < 0.9999 < cosines["head.weight"]
    again = make_trainer(config)
    again.load_state_dict(state)
    update(again, 12)
    for mine, theirs in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_doctor_and_predict_use_bfloat16_for_float8_runs(config):
    from engine.doctor.overflow import Batches, make_case, precision_of

    state = {"config": flatten(config), "amp_scaler": {"dtype": "torch.bfloat16", "scale": 1.0}}
    images = {"mean": [0.5], "std": [0.5], "input_size": [1, 8, 8], "crop_pct": 0.875, "crop_mode": "center"}
    images["interpolation"] = "bicubic"
    predicting = Precision(config_of({**state, "data": images}), CPU)
    model, own, _ = prepared(config)
    choose_transforms(config, CPU, own.half).revert(model)
    prepare = build_preparation(config, Normalize(config.DATA))
    case = make_case(precision_of(config, state, None)[0], model, prepare, Batches(0, 0, []), 1.0, None)
    for precision in (predicting, case.precision):
        assert precision.half is torch.bfloat16 and not precision.is_float8
    assert not in_float8(case.model)
