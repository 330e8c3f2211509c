"""Checks that a training step fits into free memory."""

import torch
from torch import nn

from configs.schema import Config
from engine.memory.estimate import MORE, estimate, fixed_bytes, trained_bytes
from engine.parallel.fsdp import gathered_blocks
from engine.parallel.strategy import is_sharded
from engine.precision.policy import Precision
from utils.distributed import Process
from utils.findings import OK, WARN, WRONG, Finding
from utils.text import counted, format_bytes

NEAR, FAR = 0.9, 1.5  # fractions of free memory; the need is only estimated


def check_memory(config: Config, model: nn.Module, precision: Precision, free: int, process: Process) -> Finding:
    """Compare one process's step with `free` bytes. Moves the model to its device."""
    num_sharing = process.local_size if process.device.type == "cpu" else 1  # processes that share this memory
    fixed = fixed_bytes(config, model, precision)
    if is_sharded(config, process):
        # Besides its shards a process holds two whole blocks, the current and the next one, with their gradients.
        largest = max(sum(each.nbytes for each in block.parameters()) for block in gathered_blocks(model))
        fixed = fixed // process.world_size + 4 * largest
        if config.TRAIN.ACCUM_ITER > 1:  # gradients are reduced and scattered only after the last micro-batch
            fixed += trained_bytes(model)
    advice = "lower -batch_size and raise -accum_iter alike" + (", or use -amp" if precision.half is None else "")
    if num_sharing * fixed > FAR * free:
        return _finding(f"{format_bytes(num_sharing * fixed)} without activations", num_sharing * fixed, free, advice)
    try:
        need = estimate(config, model, precision, fixed)
    except torch.OutOfMemoryError:
        return Finding(
            "memory", f"{format_bytes(free)} are too little for a batch of {counted(MORE, 'image')}", WRONG, advice
        )
    batch_size = config.DATA.BATCH_SIZE
    total = num_sharing * (need.fixed + batch_size * need.per_image)
    images = f"{format_bytes(batch_size * need.per_image)} for {counted(batch_size, 'image')}"
    parts = f"{format_bytes(need.fixed)} of weights, gradients and optimizer, {images}"
    fitting = need.fitting(NEAR * free / num_sharing)
    remedy = f"{advice}; there is room for about {counted(fitting, 'image')}" if fitting else advice
    shared = f", in each of {num_sharing} processes" if num_sharing > 1 else ""
    return _finding(f"about {format_bytes(total)} ({parts}{shared})", total, free, remedy)


def _finding(needs: str, need: float, free: int, remedy: str) -> Finding:
    verdict = WRONG if need > FAR * free else WARN if need > NEAR * free else OK
    return Finding("memory", f"{needs} of {format_bytes(free)} free", verdict, "" if verdict == OK else remedy)
