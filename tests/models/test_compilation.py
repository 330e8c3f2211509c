"""torch.compile of the model or of its blocks gives the same gradients."""

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from engine.memory.estimate import saved_bytes
from engine.precision.policy import Precision
from models import build_model
from models.compilation import compile_model
from models.transforms import choose_transforms
from models.transforms.blocks import SharedDropPath
from tests.support.compiling import compile_with, graphs_of_two_epochs
from tests.support.configs import CPU, small_config
from tests.support.planted import run_out
from tests.support.trainers import Reports, make_trainer, train
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
        compile_model(model, small_config(tmp_path, f"COMPILE={scope}"))
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
    "the model": (["COMPILE=true", "MODEL.DEPTH=4"], [2, 1, 0, 0, 0, 0]),
    # The first block drops no path: it is of another kind than the others.
    "blocks": (
        ["COMPILE=blocks", "MODEL.DEPTH=12", "PRECISION.RESIDUAL=half", "TRAIN.GRAD_CHECKPOINTING=true"],
        [4, 2, 0, 0, 0, 0],
    ),
    "copies in half": (["COMPILE=blocks", "MODEL.DEPTH=4", "PRECISION.MODE=naive"], [4, 2, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", COUNTED)
def test_nothing_is_compiled_twice_and_nothing_is_left_uncompiled(tmp_path, monkeypatch, case):
    options, expected = COUNTED[case]
    common = ["AMP=true", "MODEL.DROPPATH=0.1", "TRAIN.MODEL_EMA=true"]
    config = small_config(tmp_path, *common, "DATA.DROP_LAST=false", *options)
    assert graphs_of_two_epochs(config, monkeypatch) == expected


def test_drop_path_with_its_rate_as_a_tensor_drops_as_many_and_keeps_the_mean(tmp_path):
    model = nn.ModuleList([DropPath(0.25), DropPath(0.25, scale_by_keep=False), nn.Linear(1, 1)])
    SharedDropPath().apply(model)
    ones = torch.ones(10_000, 2, 3)
    scaled, plain = (module(ones) for module in model[:2])
    for dropped in (scaled, plain):
        assert dropped.amax((1, 2)).equal(dropped.amin((1, 2)))  # whole images
        assert abs((dropped[:, 0, 0] == 0).float().mean() - 0.25) < 0.02
    assert scaled.max() == pytest.approx(1 / 0.75) and plain.max() == 1
    assert all(module.eval()(ones).equal(ones) for module in model[:2])
    SharedDropPath().revert(model)
    assert all(type(module) is DropPath for module in model[:2])


def test_the_rate_of_drop_path_is_on_the_models_device(tmp_path):
    """Elsewhere DDP could not send it by NCCL."""
    model = build_model(small_config(tmp_path, "MODEL.DROPPATH=0.1"), 10).to("meta")
    SharedDropPath().apply(model)
    devices = [each.device.type for each in model.buffers()]
    assert devices and set(devices) == {"meta"}


def test_compiling_blocks_of_a_model_without_any_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="COMPILE is blocks.*COMPILE true"):
        compile_model(nn.Linear(1, 1), small_config(tmp_path, "COMPILE=blocks"))


LISTS = "PRECISION.CUSTOM_BLACK_LIST=[blocks.0.mlp] PRECISION.CUSTOM_WHITE_LIST=[LayerNorm]"
MODES = {  # the cases share out scopes and what else changes a forward
    "float32, checkpointed blocks": "COMPILE=blocks TRAIN.GRAD_CHECKPOINTING=true MODEL.DEPTH=3",
    "float32, halved for lack of memory": "COMPILE=true",
    "bfloat16 with lists": f"AMP=true PRECISION.DTYPE=bfloat16 COMPILE=true {LISTS}",
    "float16, residual in half": "AMP=true PRECISION.DTYPE=float16 PRECISION.RESIDUAL=half COMPILE=blocks",
    "naive": "AMP=true PRECISION.MODE=naive PRECISION.DTYPE=bfloat16 COMPILE=true",
}


@pytest.mark.parametrize("case", MODES)
def test_a_compiled_epoch_has_the_losses_of_an_eager_one(tmp_path, monkeypatch, case):
    compile_with(monkeypatch, "aot_eager")
    options = [*MODES[case].split(), "DATA.BATCH_SIZE=359", "TRAIN.WARMUP_EPOCHS=0", "REPORT_FREQ=1"]
    losses = {}
    for compiled in (True, False):
        reports = Reports()
        trainer = make_trainer(small_config(tmp_path, *options, *["COMPILE=false"][compiled:]), callbacks=[reports])
        if "memory" in case:
            run_out(trainer, fits=180, step=1)
        train(trainer)
        losses[compiled] = [report.loss for report in reports.seen]
    assert len(losses[True]) == trainer.data.steps_per_epoch
    assert losses[True] == pytest.approx(losses[False], rel=1e-5 if "float32" in case else 5e-3)


def test_what_is_not_training_compiles_no_copy(tmp_path, monkeypatch):
    """Estimates and predictions of a run that was compiled: it would take longer than they do."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: pytest.fail("compiled"))
    config = small_config(tmp_path, "AMP=true", "PRECISION.MODE=naive", "COMPILE=true")
    precision = Precision(config, CPU)
    assert saved_bytes(config, build_model(config, 10), precision, 2) > 0
