"""torch.compile of the model or of its blocks gives the same gradients."""

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from models import build_model
from models.compilation import compile_model
from models.transforms import choose_transforms
from models.transforms.shared_drop_path import SharedDropPath
from tests.support.compiling import compile_with, graphs_of_two_epochs
from tests.support.configs import CPU, small_config
from utils.errors import ConfigError


def compiled_gradients(tmp_path, monkeypatch, scope: str | None):
    """The gradients of a small ViT, and how many graphs were compiled for it."""
    compile_with(monkeypatch, "aot_eager")
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = small_config(tmp_path, "MODEL.DEPTH=4")
    model = build_model(config, 10)
    choose_transforms(config, CPU, None, training=True).apply(model)
    names = list(model.state_dict())
    if scope:
        compile_model(model, small_config(tmp_path, f"COMPILE_SCOPE={scope}"))
    model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).sum().backward()
    assert list(model.state_dict()) == names
    monkeypatch.undo()
    return {name: p.grad for name, p in model.named_parameters()}, torch._dynamo.utils.counters["stats"][
        "unique_graphs"
    ]


def test_blocks_alike_are_compiled_once_and_compute_the_same(tmp_path, monkeypatch):
    import torch._dynamo.utils

    plain, none = compiled_gradients(tmp_path, monkeypatch, None)
    whole, _ = compiled_gradients(tmp_path, monkeypatch, "model")
    blocks, graphs = compiled_gradients(tmp_path, monkeypatch, "blocks")
    assert none == 0 and graphs == 1
    torch.testing.assert_close(whole, plain)
    torch.testing.assert_close(blocks, plain)


COUNTED = {
    "the model": (["COMPILE_SCOPE=model"], [2, 1, 0, 0, 0, 0]),
    # The first block drops no path: it is of another kind than the others.
    "blocks": (
        ["COMPILE_SCOPE=blocks", "PRECISION.RESIDUAL=half", "TRAIN.GRAD_CHECKPOINTING=true"],
        [4, 2, 0, 0, 0, 0],
    ),
    "copies in half": (["COMPILE_SCOPE=blocks", "PRECISION.MODE=naive"], [4, 2, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", COUNTED)
def test_nothing_is_compiled_twice_and_nothing_is_left_uncompiled(tmp_path, monkeypatch, case):
    options, expected = COUNTED[case]
    common = ["AMP=true", "COMPILE=true", "MODEL.DEPTH=12", "MODEL.DROPPATH=0.1", "TRAIN.MODEL_EMA=true"]
    config = small_config(tmp_path, *common, "DATA.DROP_LAST=false", *options)
    assert graphs_of_two_epochs(config, monkeypatch) == expected


def test_drop_path_with_its_rate_as_a_tensor_drops_as_many_and_keeps_the_mean(tmp_path):
    model = nn.Sequential(DropPath(0.25), DropPath(0.25, scale_by_keep=False))
    SharedDropPath().apply(model)
    ones = torch.ones(10_000, 2, 3)
    scaled, plain = (module(ones) for module in model)
    for dropped in (scaled, plain):
        assert dropped.amax((1, 2)).equal(dropped.amin((1, 2)))  # whole images
        assert abs((dropped[:, 0, 0] == 0).float().mean() - 0.25) < 0.02
    assert scaled.max() == pytest.approx(1 / 0.75) and plain.max() == 1
    assert model.eval()(ones).equal(ones)
    SharedDropPath().revert(model)
    assert all(type(module) is DropPath for module in model)


def test_compiling_blocks_of_a_model_without_any_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="COMPILE_SCOPE is blocks.*COMPILE_SCOPE model"):
        compile_model(nn.Linear(1, 1), small_config(tmp_path, "COMPILE_SCOPE=blocks"))
