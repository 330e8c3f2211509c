"""Which weights are decayed and at which rates the layers learn: as timm makes it."""

import dataclasses

import pytest
import torch

from engine.train.optimizers import parameter_groups, set_rates
from tests.support.configs import meta_device, small_config

MODELS = ["vit_base_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny", "xcit_nano_12_p16_224"]


def on_meta(name: str) -> torch.nn.Module:
    import timm

    with meta_device():
        return timm.create_model(name)


def described(model: torch.nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    """{name: weight decay and factor of the rate}"""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("name", MODELS)
def test_groups_equal_timms_parameter_by_parameter(tmp_path, name):
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    model, train = on_meta(name), small_config(tmp_path).TRAIN
    options = {"no_weight_decay_list": model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()}
    options |= {"weight_decay": train.WEIGHT_DECAY}
    own = dict(model.named_parameters())
    plain = described(model, parameter_groups(train, model, own))
    assert plain == described(model, param_groups_weight_decay(model, **options))
    train = dataclasses.replace(train, LAYER_DECAY=0.65)
    decayed = described(model, parameter_groups(train, model, own))
    assert decayed == described(model, param_groups_layer_decay(model, layer_decay=0.65, **options))
    assert decayed.keys() == plain.keys() == own.keys()
    assert len({scale for _, scale in decayed.values()}) > 5


def test_the_rate_of_a_group_is_that_of_the_schedule_times_its_factor(tmp_path):
    model, train = on_meta("vit_base_patch16_224"), small_config(tmp_path, "TRAIN.LAYER_DECAY=0.5").TRAIN
    groups = parameter_groups(train, model, dict(model.named_parameters()))
    set_rates(groups, 1e-3)
    rates = {rate: parameter for group in groups for rate, parameter in [(group["lr"], group["params"][0])]}
    assert max(rates) == 1e-3 and rates[1e-3].shape == model.head.weight.shape[: rates[1e-3].ndim]
    assert min(rates) == pytest.approx(1e-3 * 0.5**13)  # the patch embedding, below 12 blocks and the classifier


def test_each_process_is_given_its_own_part_of_each_parameter(tmp_path):
    model = on_meta("vit_base_patch16_224")
    own = {name: torch.nn.Parameter(torch.zeros(1)) for name, _ in model.named_parameters()}
    model.patch_embed.requires_grad_(False)
    groups = parameter_groups(small_config(tmp_path, "TRAIN.LAYER_DECAY=0.5").TRAIN, model, own)
    given = {id(parameter) for group in groups for parameter in group["params"]}
    assert given == {id(each) for name, each in own.items() if not name.startswith("patch_embed")}
