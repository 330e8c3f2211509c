"""Sizes of resized images, and the layout of a batch of patches: N patches and a row with the grid for each image."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from utils.seed import keyed_rng

GRID_BYTES = 4  # the last row starts with height and width of the grid, 2 bytes each, little endian


def lengths_of(data: Data) -> Sequence[int]:
    """Return the numbers of patches from which an update draws one."""
    return data.TRAIN_TOKENS or (data.TOKENS,)


def length_of(config: Config, step: int) -> int:
    """Return the number of patches per image in an update. It is the same in every process and micro-batch."""
    lengths = lengths_of(config.DATA)
    return lengths[int(keyed_rng("tokens", config.SEED, step).random() * len(lengths))]


@functools.lru_cache(1 << 16)
def size_of(height: int, width: int, patch: int, length: int) -> tuple[int, int]:
    """Return the height and width to which timm resizes an image so that it has at most `length` patches."""
    from timm.data.naflex_transforms import get_image_size_for_seq

    try:
        return get_image_size_for_seq((height, width), patch, length)[1]
    except ValueError:  # timm does not shrink an image to less than 1/100,000 of its side
        side = patch * length
        return (side, patch) if height > width else (patch, side)


def new_batch(count: int, length: int, patch: int, channels: int, pinned: bool = False) -> Tensor:
    """Return uninitialized memory for a batch of images with `length` patches."""
    return torch.empty((count, length + 1, patch * patch * channels), dtype=torch.uint8, pin_memory=pinned)


def pack(pixels: Tensor, patch: int, out: Tensor) -> None:
    """Write an image, uint8 [C, H, W] with channels last in memory, to `out`, uint8 [N + 1, P * P * C], in timm's order."""
    channels, rows, columns = pixels.shape[0], pixels.shape[1] // patch, pixels.shape[2] // patch
    count = rows * columns
    patches = pixels.permute(1, 2, 0).view(rows, patch, columns, patch, channels).transpose(1, 2)
    out[:count].view(rows, columns, patch, patch, channels).copy_(patches)
    out[count:].zero_()
    set_grid(out, rows, columns)


def set_grid(images: Tensor, rows: int, columns: int) -> None:
    """Write this grid to an image, uint8 [N + 1, P * P * C], or to all images of a batch."""
    head = [rows % 256, rows // 256, columns % 256, columns // 256]
    images[..., -1, :GRID_BYTES] = torch.tensor(head, dtype=torch.uint8)


def grids_of(batch: Tensor) -> np.ndarray:
    """Return the height and width of each image's grid, int64 [B, 2]. The batch must be on the host."""
    head = batch[:, -1, :GRID_BYTES].numpy().astype(np.int64)
    return head[:, 0::2] + 256 * head[:, 1::2]


def unpack(image: Tensor, grid: Sequence[int], patch: int) -> Tensor:
    """Return an image of a batch, [N, P * P * C] or with more rows, as a view [rows, P, columns, P, C]."""
    rows, columns = grid
    return image[: rows * columns].view(rows, columns, patch, patch, -1).transpose(1, 2)


def patch_of(size: int) -> tuple[int, int]:
    """Return the side and the number of channels, 1 or 3, of a patch with this many values."""
    channels = 1 if math.isqrt(size) ** 2 == size else 3
    return math.isqrt(size // channels), channels


def pictures_of(patches: Tensor, grids: Sequence[Sequence[int]] | None = None) -> list[np.ndarray]:
    """Return the images of a batch as uint8 [H, W, C]. Without `grids`, each image must have its row with the grid."""
    patch, channels = patch_of(patches.shape[2])
    grids = grids_of(patches).tolist() if grids is None else grids
    return [
        unpack(image, grid, patch).reshape(grid[0] * patch, grid[1] * patch, channels).numpy()
        for image, grid in zip(patches, grids, strict=True)
    ]
