"""The grids of patches of images at their own aspect ratio: their sizes, and how a batch stores them."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.order import Piece
from models.native_aspect import patch_size_of
from utils.seed import keyed_rng
from utils.text import counted

GRID_BYTES = 4  # the last row starts with height and width of the grid, 2 bytes each, little endian


def lengths_of(data: Data) -> Sequence[int]:
    """Return the numbers of patches from which an update draws one."""
    return data.TRAIN_TOKENS or (data.TOKENS,)


def length_of(config: Config, step: int) -> int:
    """Return the number of patches per image in an update. It is the same in every process and micro-batch."""
    lengths = lengths_of(config.DATA)
    return lengths[int(keyed_rng("tokens", config.SEED, step).random() * len(lengths))]


def length_of_piece(config: Config, piece: Piece) -> int:
    """Return the number of patches per image in a piece of training or evaluation."""
    return config.DATA.TOKENS if piece.repeats is None else length_of(config, piece.step)


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


def image_bytes(config: Config) -> int:
    """Return the bytes per image in the batches with the most patches, including the row with the grid."""
    data = config.DATA
    return (max((data.TOKENS, *data.TRAIN_TOKENS)) + 1) * patch_size_of(config) ** 2 * data.IMAGE_CHANNELS


# --- the shapes of the images of a data set ---


WIDE = 2  # an image is wide or tall if its longer side is more than this many times its shorter side
MOST = 2_000  # maximum number of sizes that -check computes; it samples larger data sets


def describe_shapes(config: Config, sides: np.ndarray, is_training: bool) -> str:
    """Return the text of -check's row about shapes. `sides`: height and width of each image, int [N, 2]."""
    if not len(sides):
        return "no image could be read"
    patch, length = patch_size_of(config), max(lengths_of(config.DATA)) if is_training else config.DATA.TOKENS
    chosen = sides[np.linspace(0, len(sides) - 1, min(MOST, len(sides))).astype(int)]
    sizes = np.array([size_of(height, width, patch, length) for height, width in chosen.tolist()])
    padding = 1 - (sizes.prod(axis=1) / (patch * patch * length)).mean()
    ratios = sides.max(axis=1) / sides.min(axis=1)
    # A square crop keeps the shorter side.
    lost = 1 - (1 / ratios).mean()
    height, width = sizes[np.argsort(chosen.prod(axis=1, dtype=np.int64), kind="stable")[len(chosen) // 2]].tolist()
    return (
        f"{(ratios > WIDE).mean():.1%} of the images are wider or taller than {WIDE}:1 (the most extreme is "
        f"{ratios.max():.3g}:1); a square crop would cut off {lost:.1%} of the average image; with at most "
        f"{counted(length, 'patch')} of {patch} x {patch}, the median image becomes {width} x {height}, and {padding:.1%} "
        "of the patches are padding"
    )
