"""Operations on the colours of a batch of images, with the pixels that Pillow gives.

Each takes uint8 [n, H, W, C] and what was drawn for each image as float64 [n, NUM_PARAMETERS]. Float arithmetic is in Pillow's types
and order, because its results are truncated.
"""

import torch
from torch import Tensor

from datasets.transforms.pixels import GREY

SOLARIZED_FROM = 128  # solarize_add leaves brighter pixels as they are
SMOOTH_CENTRE, SMOOTH_TOTAL = 5, 13  # Pillow's SMOOTH kernel: ones around this weight, and its sum


def column(parameters: Tensor, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """One parameter of each image, [n, 1, 1, 1]."""
    return parameters[:, number, None, None, None].to(dtype)


def blend(start: Tensor, end: Tensor, factor: Tensor) -> Tensor:
    """A blend from start (factor 0) to end (1) and beyond, truncated."""
    start = start.float()
    return (start + factor * (end.float() - start)).clamp_(0, 255).to(torch.uint8)


def divided(values: Tensor, divisor: float) -> Tensor:
    """Rounded once: a GPU multiplies by the reciprocal of a number, but divides by a tensor."""
    return values / torch.full_like(values, divisor)


def grey(pixels: Tensor) -> Tensor:
    """uint8 [n, H, W, 1]."""
    if pixels.shape[3] == 1:
        return pixels
    channels = zip(GREY, pixels.int().split(1, 3), strict=True)
    return ((sum(part * channel for part, channel in channels) + 0x8000) >> 16).to(torch.uint8)


def mask_of(bits: float) -> tuple[float, ...]:
    """A mask of the highest bits; the parameter of posterize."""
    return (256 - 2 ** (8 - min(max(int(bits), 0), 8)),)


def invert(pixels: Tensor, parameters: Tensor) -> Tensor:
    return 255 - pixels


def posterize(pixels: Tensor, parameters: Tensor) -> Tensor:
    """The parameter is that of `mask_of`."""
    return pixels & column(parameters, dtype=torch.uint8)


def solarize(pixels: Tensor, parameters: Tensor) -> Tensor:
    return torch.where(pixels < column(parameters, dtype=torch.float64), pixels, 255 - pixels)


def solarize_add(pixels: Tensor, parameters: Tensor) -> Tensor:
    added = (pixels + column(parameters, dtype=torch.int16)).clamp_(max=255).to(torch.uint8)
    return torch.where(pixels < SOLARIZED_FROM, added, pixels)


def brightness(pixels: Tensor, parameters: Tensor) -> Tensor:
    return blend(torch.zeros_like(pixels), pixels, column(parameters))


def color(pixels: Tensor, parameters: Tensor) -> Tensor:
    return blend(grey(pixels), pixels, column(parameters))


def contrast(pixels: Tensor, parameters: Tensor) -> Tensor:
    mean = divided(grey(pixels).sum((1, 2, 3), dtype=torch.int64).double(), pixels.shape[1] * pixels.shape[2])
    return blend((mean + 0.5).floor()[:, None, None, None], pixels, column(parameters))


def sharpness(pixels: Tensor, parameters: Tensor) -> Tensor:
    """Away from a smoothed image, whose border is that of the image."""
    smoothed, wide = pixels.clone(), pixels.short()
    height, width = pixels.shape[1:3]
    if min(height, width) > 2:
        rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
        total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + (SMOOTH_CENTRE - 1) * wide[:, 1:-1, 1:-1]
        rounded = (2 * total + SMOOTH_TOTAL).div(2 * SMOOTH_TOTAL, rounding_mode="floor")
        smoothed[:, 1:-1, 1:-1] = rounded.to(torch.uint8)
    return blend(smoothed, pixels, column(parameters))


def autocontrast(pixels: Tensor, parameters: Tensor) -> Tensor:
    """Stretch each channel to 0 ... 255; one of a single value stays."""
    low, high = (find(pixels, (1, 2), keepdim=True).double() for find in (torch.amin, torch.amax))
    is_flat = high <= low
    full = torch.full_like(high, 255.0)  # a number divided by a tensor is rounded twice
    scale = torch.where(is_flat, 1.0, full / (high - low))
    offset = torch.where(is_flat, 0.0, -low * scale)
    return (pixels * scale + offset).clamp_(0, 255).to(torch.uint8)


def equalize(pixels: Tensor, parameters: Tensor) -> Tensor:
    """Spread the values of each channel evenly; one of few values stays."""
    count, height, width, channels = pixels.shape
    tables = torch.arange(count * channels, device=pixels.device).view(count, 1, 1, channels)
    index = (256 * tables + pixels).flatten()
    ones = torch.ones((), dtype=torch.int64, device=pixels.device).expand(len(index))
    histogram = torch.zeros(count * channels * 256, dtype=torch.int64, device=pixels.device)
    histogram = histogram.scatter_add_(0, index, ones).view(-1, 256)
    highest = pixels.amax((1, 2)).view(-1, 1).long()
    step = (height * width - histogram.gather(1, highest)) // 255
    below = histogram.cumsum(1) - histogram
    table = (step // 2 + below) // step.clamp(min=1)
    unchanged = torch.arange(256, device=pixels.device)
    table = torch.where(step > 0, table.clamp_(max=255), unchanged).to(torch.uint8)
    return table.flatten()[index].view(pixels.shape)
