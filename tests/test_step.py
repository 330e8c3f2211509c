"""One update: the same whatever the split, without waiting for the device, and undone as a whole when it is not finite."""

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from datasets import build_train_data, load_image_sets
from engine.trainer import NonFinite, Trainer
from models import build_model
from tests.helpers import ROOT, SMALL, replaced, small_config
from utils.distributed import Process
from utils.log import Log
from utils.signals import StopSignal

CPU = torch.device("cpu")


def make_trainer(config, double=False) -> Trainer:
    train_set, _ = load_image_sets(config)
    torch.manual_seed(0)
    model = build_model(config, 10)
    data = build_train_data(config, train_set, 0, 1, CPU)
    return Trainer(config, model.double() if double else model, data, Process(CPU), Log(0), StopSignal())


def train_fp64(tmp_path, name, num_images, drop_last, batch_size, accumulate, world_size):
    """Weights after 20 updates by that many processes."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(SMALL)
    out = tmp_path / f"{name}.pth"
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    options = [f"DATA.DROP_LAST={drop_last}", f"DATA.BATCH_SIZE={batch_size}", f"TRAIN.ACCUM_ITER={accumulate}"]
    options += ["TRAIN.SMOOTHING=0.1", "TRAIN.WARMUP_EPOCHS=0"]
    arguments = [sys.executable, "-m", "tests.programs.train_fp64", settings, num_images, out, "-opts", *options]
    processes = [
        subprocess.Popen(
            [str(each) for each in arguments],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
        )
        for rank in range(world_size)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * world_size
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    "num_images, drop_last",
    [
        pytest.param(149, False, id="remainder of 21 trained"),
        pytest.param(149, True, id="remainder left out"),
        pytest.param(129, False, id="remainder of 1, fewer than processes"),
    ],
)
def test_one_batch_equals_accumulation_equals_two_processes(tmp_path, num_images, drop_last):
    whole = train_fp64(tmp_path, "whole", num_images, drop_last, 32, 1, 1)
    for name, split in {"accumulated": (16, 2, 1), "two processes": (16, 1, 2), "both": (8, 2, 2)}.items():
        other = train_fp64(tmp_path, name, num_images, drop_last, *split)
        for key, value in whole["weights"].items():
            assert value.dtype is torch.float64
            difference = (value - other["weights"][key]).abs().max().item()
            assert difference < 1e-10, f"{name}: {key} differs by {difference}"


def test_a_trained_remainder_changes_the_weights(tmp_path):
    """Else the test above would compare runs that never met one."""
    with_rest, without = (train_fp64(tmp_path, str(drop), 149, drop, 32, 1, 1) for drop in (False, True))
    assert any(not torch.equal(v, without["weights"][k]) for k, v in with_rest["weights"].items())


class CountHostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reading a number out of a tensor, or copying to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        self.count += "_local_scalar_dense" in name or "nonzero" in name or "is_nonzero" in name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("amp", ["float16", "bfloat16", None])
def test_an_update_never_makes_the_host_wait(tmp_path, amp):
    config = small_config(tmp_path, f"AMP={amp is not None}", "TRAIN.MODEL_EMA=true", "TRAIN.ACCUM_ITER=2")
    trainer = make_trainer(replaced(config, PRECISION={"DTYPE": amp}))
    windows = trainer.data.windows(0, 4)
    trainer.update(next(windows))  # the optimizer makes its state in the first
    reads = CountHostReads()
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError("tolist")), reads:
        for _ in range(2):
            trainer.update(next(windows))
    assert reads.count == 0
    with reads:
        trainer.report()
        trainer.totals.sum().item()
    assert reads.count > 0  # the counter counts


def test_a_non_finite_update_leaves_weights_running_mean_and_optimizer_alone(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.5"))
    windows = trainer.data.windows(0, 3)
    trainer.update(next(windows))
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    mean_before = {k: v.clone() for k, v in trainer.ema.model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in trainer.optimizer.state.values()]
    poison = trainer.model.norm.register_forward_hook(lambda module, args, output: output * float("nan"))
    trainer.update(next(windows))
    poison.remove()
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert all(torch.equal(v, mean_before[k]) for k, v in trainer.ema.model.state_dict().items())
    for state, saved in zip(trainer.optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg"], saved)
    report = trainer.report()
    assert report.skipped == 1 and trainer.step == 2
    trainer.update(next(windows))
    assert any(not torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    assert any(not torch.equal(v, mean_before[k]) for k, v in trainer.ema.model.state_dict().items())
    assert torch.isfinite(torch.tensor(trainer.report().mean_loss))


def test_many_skips_in_a_row_stop_the_run_with_finite_weights(tmp_path):
    config = replaced(
        small_config(tmp_path, "REPORT_FREQ=1"), PRECISION={"MAX_CONSECUTIVE_SKIPS": 5}, TRAIN={"NUM_EPOCHS": 1}
    )
    trainer = make_trainer(config)
    trainer.model.norm.register_forward_hook(lambda module, args, output: output * float("inf"))
    with pytest.raises(NonFinite, match="5 updates in a row"):
        trainer.train_epoch(trainer.data.windows(0, 44), save=lambda: None)
    assert trainer.step == 5
    assert all(torch.isfinite(p).all() for p in trainer.parameters)


def test_running_mean_follows_the_weights_by_its_decay(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.75"))
    name = "blocks.0.mlp.fc1.weight"
    before = trainer.ema.model.state_dict()[name].clone()
    trainer.update(next(trainer.data.windows(0, 1)))
    expected = 0.75 * before + 0.25 * trainer.model.state_dict()[name]
    torch.testing.assert_close(trainer.ema.model.state_dict()[name], expected)


def test_learning_rate_follows_attempted_updates(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    windows = trainer.data.windows(0, 3)
    for step in range(3):
        assert trainer.lr == trainer.schedule(step)
        trainer.update(next(windows))
        assert trainer.optimizer.param_groups[0]["lr"] == trainer.schedule(step)
