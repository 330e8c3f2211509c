"""The row `memory` of -check: a process's memory, measured on a GPU and estimated on a CPU."""

import ctypes
import os
import sys
from pathlib import Path

import torch

from configs.schema import Config
from engine.batch_size import MemoryEstimate
from engine.first_passes import fit_micro_batches, try_largest
from engine.memory import free_memory, out_of_memory
from engine.precision import amp_hint
from engine.quick_checks import WARN, WRONG, Finding
from engine.record.columns import peak_memory
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.log import Log
from utils.text import counted, format_bytes

WARN_FRACTION = 0.9  # of a device's free memory: a larger peak is a WARN
WRONG_FRACTION = 1.5  # of the host's free memory: a larger estimate is WRONG; above 1, because it may be too high
# Memory that a step takes, relative to its tensors: glibc cannot use all freed blocks again. 1.2 to 1.35 in runs of
# ViT-Small and EfficientNet-Lite0 on photos.
FRAGMENTATION = 1.2


def measure_memory(table: Log, trainer: Trainer, free: int) -> None:
    """Try the largest micro-batch on the device, and compare the peak of its memory with `free` bytes."""
    device = trainer.process.device
    fit_micro_batches(trainer, table)
    getattr(torch, device.type).reset_peak_memory_stats(device)
    if reason := try_largest(trainer):  # with COMPILE, because fit_micro_batches has not tried anything
        raise out_of_memory(trainer, None, reason)
    peak = getattr(torch, device.type).max_memory_allocated(device)
    say = table.warn if peak > WARN_FRACTION * free else table.say
    images = counted(trainer.data.order.largest_piece(0), "image")
    say(f"{format_bytes(peak)} with a batch of {images}, of {format_bytes(free)} free")


def program_memory(trainer: Trainer) -> tuple[int, int]:
    """Return the bytes of this process without its models, and the free bytes of the host once this process has ended.

    Call this after a step, which loads the libraries that compute it.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):  # glibc keeps the memory that a step has freed
        library.malloc_trim(0)
    resident = resident_memory()
    of_models = sum(each.nbytes for each in trainer.model.state_dict().values()) * (1 + trainer.config.TRAIN.MODEL_EMA)
    return max(resident - of_models, 0), free_memory(torch.device("cpu")) + resident


def resident_memory() -> int:
    """Return the memory of this process in bytes; on macOS, its peak."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_memory(torch.device("cpu"))
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_memory(config: Config, process: Process, program: int, step: MemoryEstimate, free: int) -> Finding:
    """Compare `free` bytes of the host with the estimated memory of all its processes: of program and training step."""
    num_sharing, batch_size = process.local_size, config.DATA.BATCH_SIZE
    step = MemoryEstimate(FRAGMENTATION * step.fixed, FRAGMENTATION * step.per_image)
    advice = "lower -batch_size and raise -accum_iter by the same factor" + amp_hint(config.AMP, process.device)
    total = num_sharing * (program + step.fixed + batch_size * step.per_image)
    images = f"{format_bytes(batch_size * step.per_image)} for {counted(batch_size, 'image')}"
    shared = f", in each of {num_sharing} processes" if num_sharing > 1 else ""
    fixed = f"{format_bytes(program)} of the program, {format_bytes(step.fixed)} of weights, gradients and optimizer"
    text = f"about {format_bytes(total)} ({fixed}, {images}{shared}) of {format_bytes(free)} free"
    if total <= free:
        return Finding("memory", text)
    fitting = step.fitting(free / num_sharing - program)
    remedy = f"{advice}; about {counted(fitting, 'image')} fit" if fitting else advice
    return Finding("memory", text, WRONG if total > WRONG_FRACTION * free else WARN, remedy)
