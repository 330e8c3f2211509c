"""Measures in about a tenth of a second how fast a device computes in half precision."""

import functools
import time

import torch

MAX_SECONDS = 0.1
ROWS, WIDTH = 512, 768  # tokens and width of a ViT-Base's Linear layer


@functools.cache
def half_speedup(device: torch.device, half: torch.dtype) -> float:
    """The speed of a Linear layer in half precision relative to float32."""
    with torch.random.fork_rng([]), torch.no_grad():
        x, weight = (torch.randn(size, WIDTH, device=device) for size in (ROWS, WIDTH))
    pairs = {dtype: (x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, half)}
    best = dict.fromkeys(pairs, float("inf"))
    start, num_rounds = time.perf_counter(), 0
    # The first round is slower: it prepares the kernels.
    while num_rounds < 2 or (num_rounds < 6 and time.perf_counter() - start < MAX_SECONDS):
        for dtype, pair in pairs.items():
            seconds = time_product(device, *pair)
            best[dtype] = seconds if num_rounds == 0 else min(best[dtype], seconds)
        num_rounds += 1
    return best[torch.float32] / best[half]


def time_product(device: torch.device, x: torch.Tensor, weight: torch.Tensor) -> float:
    synchronize(device)
    start = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
