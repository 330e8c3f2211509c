"""The micro-batches of an update: how a batch is split, and its prefetch to the device."""

from unittest import mock

import pytest
import torch

from datasets import Batch
from datasets.loading.ahead import prefetch_to_device
from tests.support.configs import small_config
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.refusals import refused
from tests.support.trainers import make_trainer
from utils.errors import ConfigError
from utils.torch_internals import TorchDispatchMode


def test_placeholder_batch_is_not_split_into_micro_batches():
    stand_in = Batch(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), 0, [])
    assert stand_in.parts(1) == [stand_in]


@pytest.mark.slow
def test_cuda_graphs_are_refused_if_processes_need_extra_micro_batches(tmp_path, monkeypatch):
    # Two micro-batches, as after halving the number of processes.
    monkeypatch.setattr("datasets.order.Order.num_micro_batches", lambda self, step: 2)
    with refused(ConfigError, "COMPILE", "reduce-overhead"):
        make_trainer(small_config(tmp_path, "COMPILE=reduce-overhead"))


@pytest.mark.slow
@on_pretend_device
def test_device_waits_for_batch_copy_before_using_the_batch():
    order, stream = [], torch.accelerator.current_stream()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.record_stream.default:
                order.append(id(args[0]))
            return func(*args, **(kwargs or {}))

    batches = [Batch(torch.full((2, 1, 1, 1), n).pin_memory(), torch.zeros(2).pin_memory(), 2, []) for n in range(3)]
    watched = mock.patch.object(type(stream), "wait_event", lambda self, event: order.append("wait"))
    with Watch(), watched, waits() as seen:
        for given, batch in zip(
            batches, prefetch_to_device((each for each in batches), torch.device(DEVICE)), strict=True
        ):
            assert order == ["wait", id(batch.images), id(batch.targets)]
            assert torch.equal(batch.images.values, given.images)
            order.clear()
    assert seen == {}
