"""The ways to distribute a model: a whole copy in each process (ddp), or shards (fsdp2)."""

import torch

from configs.schema import Config
from engine.parallel.ddp import BUCKET_MB, Parallel
from utils.distributed import Process


def is_sharded(config: Config, process: Process) -> bool:
    """Return whether the model is sharded. A single process does not shard."""
    return config.DIST.STRATEGY == "fsdp2" and process.world_size > 1


def choose_parallel(config: Config, process: Process, half: torch.dtype | None) -> Parallel:
    """Return the strategy for DIST.STRATEGY. `half` is the type of autocast, or None."""
    reduce = half if config.PRECISION.REDUCE == "half" and config.PRECISION.MODE != "naive" else None
    if is_sharded(config, process):
        from engine.parallel.sharding import Sharded

        return Sharded(process, half, reduce)
    return Parallel(process, reduce, BUCKET_MB if config.COMPILE and process.device.type == "cuda" else None)
