"""Geometric operations and blur of a batch of images, with the pixels that Pillow gives.

Each takes uint8 [n, H, W, C] and what was drawn for each image as float64 [n, NUM_PARAMETERS]. Coordinates must be float64: a
rounding error at the edge of a pixel would take another one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from datasets.transforms.pixels import BLUR_BITS, BLUR_PASSES, BLUR_UNIT

FIXED = 65536  # Pillow's unit of coordinates where it takes the nearest pixel

# a to f: the pixel at (x, y) shows what is at (ax + by + c, dx + ey + f).
Matrix = tuple[float, float, float, float, float, float]


def shear_x(factor: float, side: int) -> Matrix:
    return 1, factor, 0, 0, 1, 0


def shear_y(factor: float, side: int) -> Matrix:
    return 1, 0, 0, factor, 1, 0


def translate_x(pixels: float, side: int) -> Matrix:
    return 1, 0, pixels, 0, 1, 0


def translate_y(pixels: float, side: int) -> Matrix:
    return 1, 0, 0, 0, 1, pixels


def rotate(degrees: float, side: int) -> Matrix:
    """Counterclockwise around the centre."""
    angle, centre = -math.radians(degrees % 360.0), side / 2
    cosine, sine, opposite = (round(each, 15) for each in (math.cos(angle), math.sin(angle), -math.sin(angle)))
    start_x, start_y = (
        first * -centre + second * -centre + centre for first, second in ((cosine, sine), (opposite, cosine))
    )
    return cosine, sine, start_x, opposite, cosine, start_y


def in_fixed_point(matrix: Matrix) -> Matrix:
    """For `nearest`, in units of 1 / FIXED and from the middle of the first pixel."""
    a, b, c, d, e, f = matrix
    starts = c + a * 0.5 + b * 0.5, f + d * 0.5 + e * 0.5
    if not (b or d):  # Pillow takes another path there, which does not round the start
        return FIXED * a, 0, FIXED * math.floor(starts[0]), 0, FIXED * e, FIXED * math.floor(starts[1])
    return tuple(math.floor(each * FIXED + 0.5) for each in (a, b, starts[0], d, e, starts[1]))


def nearest(pixels: Tensor, parameters: Tensor) -> Tensor:
    """Parameters: those of `in_fixed_point` and the fill."""
    height, width = pixels.shape[1:3]
    fixed = parameters.long()
    across, down = (torch.arange(size, device=pixels.device) for size in (width, height))
    x, y = (
        (fixed[:, 3 * row, None, None] * across + fixed[:, 3 * row + 1, None, None] * down[:, None]
         + fixed[:, 3 * row + 2, None, None]) >> 16
        for row in range(2)
    )  # fmt: skip
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return torch.where(is_inside[..., None], pixels_at(pixels, x, y), fill_of(parameters, pixels))


def fill_of(parameters: Tensor, pixels: Tensor) -> Tensor:
    """The colour of uncovered pixels."""
    return parameters[:, None, None, 6 : 6 + pixels.shape[3]].to(pixels.dtype)


def pixels_at(pixels: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The pixels at coordinates that broadcast to [n, ..., H, W]; beyond the border those of the border."""
    count, height, width, channels = pixels.shape
    starts = torch.arange(count, device=pixels.device).view(-1, *[1] * (x.dim() - 1)) * (height * width)
    return pixels.reshape(-1, channels)[starts + y.clamp(0, height - 1) * width + x.clamp(0, width - 1)]


def interpolated(pixels: Tensor, parameters: Tensor, reach: range, mix: Callable) -> Tensor:
    """`mix` blends the neighbours at `reach` in one direction, by the distance from that at 0. Parameters: matrix and fill."""
    height, width = pixels.shape[1:3]
    matrix = parameters[:, :6, None, None].unbind(1)
    across, down = (torch.arange(size, device=pixels.device) + 0.5 for size in (width, height))
    across, down = across.double(), down.double()[:, None]
    x, y = (matrix[row] * across + matrix[row + 1] * down + matrix[row + 2] for row in (0, 3))
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = x - 0.5, y - 0.5
    left, top = x.floor(), y.floor()
    x, y = (x - left)[..., None], (y - top)[..., None]
    left, top = left.long()[:, None], top.long()[:, None]
    rows = top + torch.arange(reach.start, reach.stop, device=pixels.device)[:, None, None]  # [n, rows, H, W]
    columns = [pixels_at(pixels, left + each, rows).short() for each in reach]  # whole numbers: as exact, and smaller
    values = mix(*mix(*columns, x[:, None]).unbind(1), y).clamp_(0, 255).to(torch.uint8)
    return torch.where(is_inside[..., None], values, fill_of(parameters, pixels))


def bilinear(pixels: Tensor, parameters: Tensor) -> Tensor:
    return interpolated(pixels, parameters, range(2), lambda first, second, x: first + (second - first) * x)


def bicubic(pixels: Tensor, parameters: Tensor) -> Tensor:
    return interpolated(pixels, parameters, range(-1, 3), cubic)


def cubic(first: Tensor, second: Tensor, third: Tensor, fourth: Tensor, x: Tensor) -> Tensor:
    highest, middle = second - first - third + fourth, 2 * (first - second) + third - fourth
    return (highest * x).add_(middle).mul_(x).add_(third - first).mul_(x).add_(second)


def gaussian_blur(pixels: Tensor, parameters: Tensor) -> Tensor:
    """Parameters: those of `box_of`."""
    box = [parameters[:, number, None, None, None].long() for number in range(3)]
    for dim in (2, 1):
        for _ in range(BLUR_PASSES):
            pixels = box_mean(pixels, dim, *box)
    return pixels


def box_mean(pixels: Tensor, dim: int, radius: Tensor, weight: Tensor, beyond: Tensor) -> Tensor:
    """Mean along a side over up to `radius` pixels each way and a part of the two beyond, by sums up to each pixel."""
    last, wide = pixels.shape[dim] - 1, pixels.long()
    at = torch.arange(last + 1, device=pixels.device).view([-1 if each == dim else 1 for each in range(4)])
    left, right, sums = at - radius, at + radius, wide.cumsum(dim)

    def take(values: Tensor, index: Tensor) -> Tensor:
        return values.gather(dim, index.clamp(0, last).expand_as(values))

    total = take(sums, right) - take(sums, left) + take(wide, left)
    # The border's pixels go on outside of the image.
    total += wide.narrow(dim, 0, 1) * (-left).clamp(min=0) + wide.narrow(dim, last, 1) * (right - last).clamp(min=0)
    total = total * weight + (take(wide, left - 1) + take(wide, right + 1)) * beyond
    return ((total + BLUR_UNIT // 2) >> BLUR_BITS).to(torch.uint8)
