"""Carries out the plans of a batch on its device, step by step for all images that have the same operation there."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from configs.schema import Data
from datasets.transforms.on_device.colors import blend
from datasets.transforms.on_device.rows import KINDS
from datasets.types import CHAIN, FIRST_PARAMETER, IMAGE, KIND, LAYER, Draws
from utils.errors import ConfigError

LARGEST_STEP = 32  # images; of 224 x 224 pixels these take 0.7 GiB at most


def check_device(data: Data, device: torch.device) -> None:
    """Refuse a device without the types that the operations compute in."""
    if data.AUGMENT_ON == "device" and device.type == "mps":
        raise ConfigError("DATA.AUGMENT_ON: device needs float64, which mps does not have; set host")


def carry_out(images: Tensor, draws: Draws, copy: Callable[[np.ndarray], Tensor]) -> Tensor:
    """uint8 [B, C, H, W] on the device, changed as drawn; `copy` takes numbers there."""
    rows, num_chains = draws.rows, max(draws.weights.shape[1] - 1, 0)
    rows = rows[np.lexsort((rows[:, KIND], rows[:, LAYER], rows[:, CHAIN]))]
    table, edges = copy(rows), np.searchsorted(rows[:, CHAIN], range(num_chains + 2)).tolist()
    pixels = images.permute(0, 2, 3, 1)
    chains = (in_turn(pixels, rows[start:end], table[start:end]) for start, end in itertools.pairwise(edges[:-1]))
    if num_chains:
        pixels = mix(pixels, chains, copy(draws.weights))
    return in_turn(pixels, rows[edges[-2] :], table[edges[-2] :]).permute(0, 3, 1, 2)


def in_turn(pixels: Tensor, rows: np.ndarray, table: Tensor) -> Tensor:
    """One operation after another; `table` are the rows on the device."""
    changed, images = pixels.clone(), table[:, IMAGE].long()
    for start, end in steps(rows):
        of_it, carry = images[start:end], KINDS[int(rows[start, KIND])]
        changed.index_copy_(0, of_it, carry(changed.index_select(0, of_it), table[start:end, FIRST_PARAMETER:]))
    return changed


def steps(rows: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield from where to where sorted rows have the same layer and kind, in parts of at most LARGEST_STEP."""
    keys = rows[:, (LAYER, KIND)]
    changes = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
    for start, end in itertools.pairwise([0, *changes.tolist(), len(rows)]):
        for first in range(start, end, LARGEST_STEP):
            yield first, min(first + LARGEST_STEP, end)


def mix(pixels: Tensor, chains: Iterator[Tensor], weights: Tensor) -> Tensor:
    """AugMix, with weights [B, chains + 1]: of each chain, and of their sum against the image."""
    weights = weights.float()[:, :, None, None, None].unbind(1)
    total = torch.zeros_like(pixels, dtype=torch.float32)
    for weight, chain in zip(weights, chains, strict=False):
        total += weight * chain
    return blend(pixels, total.clamp_(0, 255).to(torch.uint8), weights[-1])
