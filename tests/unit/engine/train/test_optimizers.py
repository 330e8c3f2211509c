"""Optimizers: their arguments, weight groups with their own rates, and resuming."""

import dataclasses

import pytest
import torch

from engine.checkpoint.compare import refuse_changes
from engine.checkpoint.resume import comparable
from engine.train.optimizers import (
    build_optimizer,
    parameter_groups,
)
from tests.support.configs import meta_device, small_config
from tests.support.trainers import make_trainer
from utils.errors import ConfigError

ARGUMENTS = {  # {words after TRAIN.OPTIMIZER: the resulting arguments of all groups}
    "NAME=sgd KWARGS.nesterov=true": {"nesterov": True, "momentum": 0.9, "fused": True},
    **{f"NAME={name} BETAS=[0.7,0.8] EPS=1e-3": {"betas": (0.7, 0.8), "eps": 1e-3} for name in ("AdamW", "Adam")},
    **{f"NAME=SGD MOMENTUM={momentum}": {"momentum": momentum} for momentum in (0.3, 0.0)},
    "NAME=Lion KWARGS.caution=true": {"caution": True, "betas": (0.9, 0.99)},
    "NAME=lion BETAS=[0.8,0.9]": {"betas": (0.8, 0.9)},
    "NAME=lamb EPS=1e-8": {"eps": 1e-8},  # the default of AdamW, not of lamb
}


@pytest.mark.parametrize(("words", "expected"), ARGUMENTS.items())
def test_optimizer_gets_its_arguments_and_defaults(tmp_path, words, expected):
    words = ["WEIGHT_DECAY=0.07", "BASE_LR=0.02", *(f"OPTIMIZER.{each}" for each in words.split())]
    optimizer = build_optimizer(
        small_config(tmp_path, *(f"TRAIN.{each}" for each in words)).TRAIN, torch.nn.Linear(2, 2)
    )
    for group, decay in zip(optimizer.param_groups, (0.07, 0.0), strict=True):
        assert (expected | {"lr": 0.02, "weight_decay": decay}).items() <= group.items()
    assert isinstance(optimizer, getattr(torch.optim, words[2].removeprefix("OPTIMIZER.NAME="), object))


def test_checkpoint_with_different_parameter_groups_is_refused(tmp_path):
    state = make_trainer(small_config(tmp_path)).state_dict()
    with pytest.raises(ConfigError, match="TRAIN.LAYER_DECAY"):
        make_trainer(small_config(tmp_path, "TRAIN.LAYER_DECAY=0.7")).load_state_dict(state)


def test_resume_refuses_another_optimizer_even_if_allowed(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    order = trainer.data.order
    split = {"rule": "folders"}
    state = trainer.state_dict() | {"config": comparable(trainer.config, order), "split": split}
    allowed = "RESUME.ALLOW_CHANGED=[TRAIN.OPTIMIZER.NAME]"
    refuse_changes(small_config(tmp_path, "TRAIN.OPTIMIZER.NAME=Adam", allowed), order, split, state, tmp_path)
    with pytest.raises(ConfigError, match="TRAIN.OPTIMIZER.NAME.*SGD"):
        refuse_changes(small_config(tmp_path, "TRAIN.OPTIMIZER.NAME=SGD", allowed), order, split, state, tmp_path)


@pytest.mark.parametrize("name", ["AdamW", "lion"])
def test_optimizer_settings_override_the_checkpoint(tmp_path, name):
    name = f"TRAIN.OPTIMIZER.NAME={name}"
    saved = make_trainer(small_config(tmp_path, name)).state_dict()
    trainer = make_trainer(small_config(tmp_path, name, "TRAIN.WEIGHT_DECAY=0.7", "TRAIN.OPTIMIZER.BETAS=[0.8,0.9]"))
    trainer.load_state_dict(saved)
    decayed = trainer.optimizer.param_groups[0]
    assert decayed["weight_decay"] == 0.7 and tuple(decayed["betas"]) == (0.8, 0.9)


MODELS = ["vit_base_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny", "xcit_nano_12_p16_224"]


def on_meta(name: str) -> torch.nn.Module:
    import timm

    with meta_device():
        return timm.create_model(name)


def described(model: torch.nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    """Return {name: (weight decay, factor of the learning rate)}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for parameter in group["params"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_parameter_groups_match_timm_for_each_parameter(tmp_path, name):
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    model, train = on_meta(name), small_config(tmp_path).TRAIN
    options = {"no_weight_decay_list": model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()}
    options |= {"weight_decay": train.WEIGHT_DECAY}
    model.get_classifier().odd = torch.nn.ParameterDict({"bias": torch.zeros(2, 3), "scale": torch.zeros(2, 3)})
    own = dict(model.named_parameters())
    plain = described(model, parameter_groups(train, model, own))
    assert plain == described(model, param_groups_weight_decay(model, **options))
    train = dataclasses.replace(train, LAYER_DECAY=0.65)
    decayed = described(model, parameter_groups(train, model, own))
    assert decayed == described(model, param_groups_layer_decay(model, layer_decay=0.65, **options))
    assert decayed.keys() == plain.keys() == own.keys()
    assert len({scale for _, scale in decayed.values()}) > 5


def test_parameter_groups_use_the_local_shard_of_parameters(tmp_path):
    model = on_meta("vit_base_patch16_224")
    own = {name: torch.nn.Parameter(torch.zeros(1)) for name, _ in model.named_parameters()}
    model.patch_embed.requires_grad_(False)
    groups = parameter_groups(small_config(tmp_path, "TRAIN.LAYER_DECAY=0.5").TRAIN, model, own)
    given = {id(parameter) for group in groups for parameter in group["params"]}
    assert given == {id(each) for name, each in own.items() if not name.startswith("patch_embed")}
