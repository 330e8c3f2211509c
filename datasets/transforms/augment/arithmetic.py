"""Operations that are a few lines of arithmetic, with Pillow's and timm's pixels.

Pillow holds Python's lock in all of them, so that loader threads would wait for each other, and takes longer in most: these
take 0.3 of its time for brightness, 0.5 to 0.7 for a blur, 0.9 for colour. Each gets the pixels as float32 [H, W, C], whole
numbers from 0 to 255, which it may write to, and returns such.
"""

import math

import numpy as np
import torch
from torch import Tensor

GREY = (19595, 38470, 7471)  # parts of red, green and blue in 65536; float32 holds these sums without rounding
BLUR_PASSES = 3
BLUR_BITS = 24  # of the weights of a box
BLUR_UNIT = 2**BLUR_BITS


def brightness(pixels: Tensor, factor: float) -> Tensor:
    return pixels.mul_(factor).clamp_(0, 255).floor_()


def contrast(pixels: Tensor, factor: float) -> Tensor:
    grey = _grey(pixels) if pixels.shape[2] > 1 else pixels
    mean = math.floor(grey.sum(dtype=torch.float64).item() / grey.numel() + 0.5)
    return pixels.sub_(mean).mul_(factor).add_(mean).clamp_(0, 255).floor_()


def color(pixels: Tensor, factor: float) -> Tensor:
    if pixels.shape[2] == 1:
        return pixels
    # Written out: torch takes twice as long to broadcast over three neighbouring numbers.
    grey = torch.from_numpy(np.repeat(_grey(pixels).numpy(), 3)).view_as(pixels)
    if factor == 0:
        return grey
    return pixels.sub_(grey).mul_(factor).add_(grey).clamp_(0, 255).floor_()


def solarize(pixels: Tensor, threshold: float) -> Tensor:
    values = pixels.numpy().astype(np.uint8)
    all_bits = (values >= threshold).view(np.uint8) * np.uint8(255)
    return torch.from_numpy(values ^ all_bits).float()  # torch.where takes 20 times as long


def gaussian_blur(pixels: Tensor, radius: float) -> Tensor:
    """Pillow's: the mean over a box, three times along each side, in integers."""
    blurred = pixels.numpy()
    for side in (1, 0):
        blurred = _box_means(blurred, side, *box_of(radius))
    return torch.from_numpy(blurred.astype(np.float32))


def box_of(radius: float) -> tuple[int, int, int]:
    """The box whose repeated mean is Pillow's Gaussian blur: its radius, the weight of its pixels, of the two beyond."""
    one = np.float32(1)
    variance = np.float32(radius) * np.float32(radius) / np.float32(BLUR_PASSES)
    length = np.float32(math.sqrt(12.0 * float(variance) + 1.0))
    whole = np.float32(math.floor((float(length) - 1.0) / 2.0))
    part = (2 * whole + one) * (whole * (whole + one) - 3 * variance)
    part /= 6 * (variance - (whole + one) * (whole + one))
    wide = whole + part
    weight = int(np.float32(BLUR_UNIT) / (wide * 2 + one))
    reach = int(wide)
    return reach, weight, (BLUR_UNIT - (2 * reach + 1) * weight) // 2


def _box_means(pixels: np.ndarray, side: int, reach: int, weight: int, beyond: int) -> np.ndarray:
    """The border's pixels go on outside of the image."""
    margin, length = reach + 1, pixels.shape[side]
    shape = [size + 2 * margin * (number == side) for number, size in enumerate(pixels.shape)]
    padded = np.empty(shape, np.uint32)
    line = padded.swapaxes(0, side)  # the same memory, with the side in front
    line[margin : margin + length] = pixels.swapaxes(0, side)
    for _ in range(BLUR_PASSES):
        line[:margin], line[margin + length :] = line[margin], line[margin + length - 1]
        shifted = [line[start : start + length] for start in range(2 * margin + 1)]
        total = shifted[1].copy(order="K")
        for each in shifted[2:-1]:
            total += each
        total *= np.uint32(weight)
        total += (shifted[0] + shifted[-1]) * np.uint32(beyond)
        total += np.uint32(BLUR_UNIT // 2)
        total >>= np.uint32(BLUR_BITS)
        line[margin : margin + length] = total
    return line[margin : margin + length].swapaxes(0, side)


def _grey(pixels: Tensor) -> Tensor:
    """[H * W] of RGB."""
    return torch.mv(pixels.view(-1, 3), torch.tensor(GREY, dtype=torch.float32)).add_(0x8000).mul_(1 / 0x10000).floor_()
