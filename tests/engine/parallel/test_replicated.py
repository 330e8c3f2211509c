"""How DDP wraps a model."""

import pytest
import torch
from torch import nn

from engine.parallel import choose_parallel
from tests.support.configs import small_config
from utils.distributed import Process


@pytest.mark.parametrize(
    ("device", "compiled", "bucket"), [("cuda", True, 100), ("cuda", False, None), ("cpu", True, None)]
)
def test_buckets_are_larger_where_they_cut_a_compiled_graph_and_bits_may_differ(
    tmp_path, monkeypatch, device, compiled, bucket
):
    found = []
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda model, **options: found.append(options))
    process = Process(torch.device(device), world_size=2)
    parallel = choose_parallel(small_config(tmp_path, f"COMPILE={compiled}"), process, None)
    parallel.wrap(nn.Linear(1, 1), accumulates=False)
    assert [options["bucket_cap_mb"] for options in found] == [bucket]
