"""The memory of a device: how much is free, how much a step needs, and what to do if it runs out."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from configs.checks import CUDA_GRAPH_MODES
from configs.schema import Config
from datasets.order import Order
from engine.precision import amp_hint
from engine.record.next_steps import resume_command
from engine.train.trainer import Trainer
from utils.errors import OUT_OF_MEMORY, ConfigError
from utils.host import free_host_memory
from utils.text import counted


def shortage(error: Exception) -> str | None:
    """Return the out-of-memory message in one line, or None for any other error."""
    message = str(error).strip() or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or any(each in message for each in OUT_OF_MEMORY):
        return message.splitlines()[0]
    return None


def raises_when_full(device: torch.device) -> bool:
    """Return whether the device raises an error when its memory is full. A host kills the process instead."""
    return device.type != "cpu"


def reports_memory(device: torch.device) -> bool:
    """Return whether torch reports the free memory and the peak memory of this kind of device."""
    return device.type in ("cuda", "xpu")


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on its device."""
    return getattr(torch, device.type).mem_get_info(device)[0] if reports_memory(device) else free_host_memory()


def release(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def too_large(config: Config, device: torch.device, reason: str) -> ConfigError:
    """Return the error for images or a model that are too large even for the smallest batch. `reason`: why."""
    return ConfigError(
        f"DATA.IMAGE_SIZE is {config.DATA.IMAGE_SIZE}: {reason}; lower it, choose a smaller model "
        f"(MODEL.NAME is {config.MODEL.NAME})"
        f"{amp_hint(config.AMP, device)}, or stop other programs that use the memory"
    )


def smaller_batch(order: Order) -> int:
    """Return the next smaller micro-batch that divides an update without a remainder, or 0 if there is none."""
    per_process = order.global_batch // order.world_size
    sizes = range(order.largest_piece(0) - 1, 0, -1)
    return next((size for size in sizes if per_process % size == 0 and size % order.unit == 0), 0)


def flags_for(order: Order, size: int) -> list[str]:
    """Return the flags of a run with micro-batches of this size and the same images per update."""
    return ["-batch_size", f"{size}", "-accum_iter", f"{order.global_batch // order.world_size // size}"]


@contextlib.contextmanager
def naming_remedy(trainer: Trainer, folder: Path | None) -> Iterator[None]:
    """Turn an out-of-memory error of an update into a ConfigError with the command that continues the run."""
    try:
        yield
    except RuntimeError as error:
        reason = shortage(error)
        if not reason:
            raise
        raise out_of_memory(trainer, folder, reason) from error


def out_of_memory(trainer: Trainer, folder: Path | None, reason: str) -> ConfigError:
    """Return the error for an update that does not fit. `folder`: of the run, if it may have a checkpoint."""
    config, process, order = trainer.config, trainer.process, trainer.data.order
    who = f"process {process.rank} ran out of memory" if process.world_size > 1 else "out of memory"
    what = f"{who} at step {trainer.step} with micro-batches of {counted(order.largest_piece(0), 'image')} ({reason})"
    size = smaller_batch(order)
    if not size:
        return too_large(config, process.device, what)
    flags = flags_for(order, size)
    if config.COMPILE in CUDA_GRAPH_MODES:  # CUDA graphs cannot accumulate gradients
        flags += ["-compile", "-opts", "RESUME.ALLOW_CHANGED=[COMPILE]"]
    has_save = folder is not None and (folder / "last.pth").exists()
    how = resume_command(process, folder, flags) if has_save else f"the same command with {' '.join(flags)}"
    return ConfigError(f"DATA.BATCH_SIZE: {what}; to continue with smaller micro-batches and the same updates: {how}")
