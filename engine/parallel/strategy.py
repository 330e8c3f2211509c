"""Chooses the strategy for DIST.STRATEGY, and refuses settings it does not support."""

import torch

from configs.schema import AUTO, Config
from engine.parallel.fsdp import Sharded
from engine.parallel.replicated import Parallel, Replicated
from utils.distributed import Process
from utils.errors import ConfigError

# torch.compile cuts its graph at every bucket: 13 pieces of a ViT-Base with torch's 25 MiB. On CUDA only, because among
# more than two processes the size decides about the last bit of an average.
BUCKET_MB = 100


def check_strategy(config: Config) -> None:
    """Refuse settings that fsdp2 does not support."""
    if config.DIST.STRATEGY != "fsdp2":
        return
    precision = config.PRECISION
    unfit = {
        f"DATA.BATCH_SIZE is {AUTO}": config.DATA.BATCH_SIZE == AUTO
        and "a number; -check estimates how many images fit",
        f"PRECISION.MODE is {precision.MODE}": config.AMP
        and precision.MODE != "autocast"
        and "PRECISION.MODE autocast",
        # Weights are gathered block by block, and a CUDA graph would read them where they were when it was recorded.
        f"COMPILE is {config.COMPILE}": config.COMPILE not in (False, "blocks") and "COMPILE blocks",
        "PRECISION.SHADOW_STEPS is set": precision.SHADOW_STEPS and "none, or DIST.STRATEGY ddp",
        "PRECISION.EXPLAIN is true": config.START.EXPLAIN and "-explain_precision with DIST.STRATEGY ddp",
    }
    for what, remedy in unfit.items():
        if remedy:
            raise ConfigError(f"DIST.STRATEGY is fsdp2 and {what}, which do not go together; use {remedy}")


def is_sharded(config: Config, process: Process) -> bool:
    """A single process does not shard."""
    return config.DIST.STRATEGY == "fsdp2" and process.world_size > 1


def choose_parallel(config: Config, process: Process, half: torch.dtype | None) -> Parallel:
    """The strategy for DIST.STRATEGY; `half`: autocast's type."""
    reduce = half if config.PRECISION.REDUCE == "half" and config.PRECISION.MODE != "naive" else None
    if is_sharded(config, process):
        return Sharded(process, half, reduce)
    if process.world_size == 1:
        return Parallel(process)
    return Replicated(process, reduce, BUCKET_MB if config.COMPILE and process.device.type == "cuda" else None)
