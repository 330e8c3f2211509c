"""torch.compile of the model or of its blocks gives the same gradients."""

import pytest
import torch
from torch import nn

from models import build_model
from models.compilation import compile_model
from models.transforms import choose_transforms
from tests.support.configs import CPU, small_config
from utils.errors import ConfigError


def compiled_gradients(tmp_path, monkeypatch, scope: str | None):
    """The gradients of a small ViT, and how many graphs were compiled for it."""
    compile_any = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_any(self, backend="aot_eager", **options))
    torch._dynamo.reset()
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


def test_compiling_blocks_of_a_model_without_any_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="COMPILE_SCOPE is blocks.*COMPILE_SCOPE model"):
        compile_model(nn.Linear(1, 1), small_config(tmp_path, "COMPILE_SCOPE=blocks"))
