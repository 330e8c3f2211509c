"""Optimizers other than AdamW, Adam and SGD: skipped updates, resuming, waits of the host, refused settings."""

import io
from unittest.mock import Mock

import pytest
import torch
import yaml

from configs.load import load
from configs.schema import Arguments, Optimizer, Train
from engine.train.optimizers import OURS, build_optimizer, check_optimizer, numbers_per_weight
from engine.train.timm_optimizers import BY_ELEMENT
from tests.support.cases import cases_of, names_of
from tests.support.configs import small_config
from tests.support.optimizers import Learner, one_of_each_class
from tests.support.pretend_device import DEVICE, on_pretend_device
from tests.support.refusals import refused
from tests.support.run_hash import state_hash
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

# These read values on the host for each weight in every update, to decide its update. (mars only in older versions of
# timm.)
READING = ("adamp", "sgdp", "cadamp", "csgdp", "novograd", "novogradw", "novogradc", "mars", "cmars")


@pytest.mark.long
@on_pretend_device
def test_skipped_update_leaves_every_optimizer_unchanged():
    for name in one_of_each_class():
        learner, plain = Learner(name, DEVICE), Learner(name, DEVICE)
        learner.step(9, overflows=True).step(0)  # skip an update before the optimizer has any state
        after = state_hash(learner.state())
        assert state_hash(learner.step(10, overflows=True).state()) == after, name
        seen = learner.step(1).waits
        # The device itself skips an update of torch's fused optimizers. For timm's, the host reads whether to skip.
        assert name in READING or seen == ({} if name in OURS else {"item": 1}), (name, seen)
        assert state_hash(learner.state()) == state_hash(plain.step(0).step(1).state()) != after, name


def test_every_optimizer_skips_updates_and_resumes_bitwise():
    for name in one_of_each_class():
        straight, resumed = Learner(name), Learner(name)
        before = state_hash(straight.state()["weights"])
        straight.step(9, overflows=True)
        assert state_hash(straight.state()["weights"]) == before, name
        after = state_hash(straight.step(0).step(1).state())
        assert state_hash(straight.step(10, overflows=True).state()) == after, name
        assert state_hash(straight.state()["weights"]) != before, name
        file = io.BytesIO()
        torch.save(straight.state(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for parameter, weight in zip(resumed.model.parameters(), saved["weights"], strict=True):
            parameter.data.copy_(weight)
        resumed.optimizer.load_state_dict(saved["optimizer"])
        assert state_hash(straight.step(2).state()) == state_hash(resumed.step(2).state()), name


def test_shardable_optimizers_update_parts_like_whole_tensors():
    from timm.optim import list_optimizers

    for name in set(BY_ELEMENT) & set(list_optimizers()):
        weights = []
        for sizes in ([40], [24, 16]):
            draws = torch.Generator().manual_seed(0)
            parts = torch.nn.ParameterList(torch.randn(40, 36, generator=draws).split(sizes))
            optimizer = build_optimizer(Train(OPTIMIZER=Optimizer(NAME=name), BASE_LR=1e-2), parts)
            for _ in range(2):
                gradient = torch.randn(40, 36, generator=draws)
                for parameter, part in zip(parts, gradient.split(sizes), strict=True):
                    parameter.grad = part.clone()
                optimizer.step()
            weights.append(torch.cat([each.detach() for each in parts]))
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("words", cases_of("optimizers-mistakes_of_an_optimizer"))
def test_impossible_optimizer_is_refused_before_the_model_is_built(tmp_path, words):
    with refused(ConfigError, *names_of("optimizers-mistakes_of_an_optimizer", words)):
        check_optimizer(small_config(tmp_path, *(f"TRAIN.OPTIMIZER.{word}" for word in words.split())))


def test_error_for_value_rejected_by_optimizer_names_the_setting(tmp_path):
    linear, settings = torch.nn.Linear(2, 2), Optimizer(NAME="adan", KWARGS=Arguments({"betas": (0.9, 5.0, 0.9)}))
    with pytest.raises(ConfigError, match=r"TRAIN.OPTIMIZER.KWARGS.*adan.*betas"):
        build_optimizer(Train(OPTIMIZER=settings), linear)
    with pytest.raises(ConfigError, match=r"TRAIN.OPTIMIZER.KWARGS.*lamb.*betas"):  # only lamb's step checks it
        numbers_per_weight(Train(OPTIMIZER=Optimizer(NAME="lamb", KWARGS=Arguments({"betas": (0.9,)}))))


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_default_values_of_torch_are_ignored_for_timm_optimizers(tmp_path, name):
    """PaddleViT's files set all three for any optimizer."""
    values = {"NAME": name, "EPS": 1e-8, "BETAS": [0.9, 0.999], "MOMENTUM": 0.9}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"TRAIN": {"OPTIMIZER": values}}))
    found = load(["-cfg", str(file)]).config.TRAIN.OPTIMIZER
    assert (found.EPS, found.BETAS, found.MOMENTUM) == (None, (), None)
    file.write_text(yaml.safe_dump({"TRAIN": {"OPTIMIZER": values | {"EPS": 1e-3}}}))
    assert load(["-cfg", str(file)]).config.TRAIN.OPTIMIZER.EPS == 1e-3


def test_error_that_no_setting_causes_is_not_blamed_on_one(monkeypatch):
    monkeypatch.setattr("timm.optim.nadamw.NAdamW.step", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        numbers_per_weight(Train(OPTIMIZER=Optimizer(NAME="nadamw")))
