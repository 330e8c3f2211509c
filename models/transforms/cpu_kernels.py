"""Which of several ways to compute the same thing a model uses: the fastest on this device, in this type."""

import ctypes
import sys

import torch
from torch import Tensor, nn

from configs.schema import Config
from utils.errors import ConfigError


def choose_kernels(model: nn.Module, device: torch.device, half: torch.dtype | None) -> None:
    """Change how the model computes, never what. The figures behind each choice: BENCHMARKS.md, "the step on CPUs".

    Comes after everything that replaces modules of the model or adds hooks to them.
    """
    from timm.layers import Attention  # here and not above: importing timm takes seconds

    from models.transforms.attention import CpuAttention
    from models.transforms.class_token_block import shorten_last_block

    shorten_last_block(model)
    if device.type != "cpu":
        return  # GPUs have fast kernels for both, and torch keeps their memory
    keep_freed_memory()
    for module in model.modules():
        # torch's fused attention is slow on CPUs in half precision, and with dropout in any.
        if hasattr(module, "fused_attn") and (half is not None or module.attn_drop.p > 0):
            module.fused_attn = False
        if type(module) is nn.Dropout:
            module.__class__ = CpuDropout
        if type(module) is Attention:
            module.__class__ = CpuAttention


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, for its next step, where the C library is glibc.

    Else glibc gives large blocks back, and the system has to fill new ones with zeros: 7% of a ViT-Tiny step.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "mallopt"):
        return
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    # Older versions take 32 MiB at most. The first also fixes both thresholds, so it must not stand alone.
    if library.mallopt(mmap, 2**30) or library.mallopt(mmap, 2**25):
        library.mallopt(trim, 2**31 - 1)


def compile_model(model: nn.Module, config: Config) -> None:
    """In place, so that the names of the weights stay as they are."""
    for part in parts_to_compile(model, config):
        part.compile(mode=config.COMPILE_MODE)


def parts_to_compile(model: nn.Module, config: Config) -> list[nn.Module]:
    """The model, or its blocks, which are all alike, so that compiling the first serves the others."""
    if config.COMPILE_SCOPE == "model":
        return [model]
    return list(blocks_of(model, "COMPILE_SCOPE is blocks", "COMPILE_SCOPE model"))


def blocks_of(model: nn.Module, setting: str, instead: str) -> nn.Sequential | nn.ModuleList:
    """The model's blocks, for a setting that is about them; `instead`: what to use where there are none."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise ConfigError(
            f"{setting}, but this model is no plain row of transformer blocks (it has no .blocks); use {instead}"
        )
    return blocks


class CpuDropout(nn.Dropout):
    """Dropout from 16 random bits an element.

    torch draws a double for each, on one core, and so spends a third of a small ViT's step. The probability is rounded
    to a 65536th, and what is kept is scaled by exactly that.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        count, dropped = input.numel(), min(round(self.p * 2**16), 2**16 - 1)
        words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # None: up to the largest
        bits = words.view(torch.int16)[:count].view(input.shape)
        mask = torch.ge(bits, dropped - 2**15, out=torch.empty_like(input, memory_format=torch.contiguous_format))
        return input * mask.mul_(2**16 / (2**16 - dropped))
