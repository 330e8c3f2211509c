"""Drawn operations as plain data, and functions that apply them, with timm or with equivalent arithmetic.

Pillow holds the GIL in all operations, so loader threads would wait for each other, and most of its operations are
slower. The arithmetic here takes 0.3 of Pillow's time for brightness, 0.5 to 0.7 for a blur, 0.9 for colour. Each
arithmetic function gets and returns float32 [H, W, C] with whole numbers from 0 to 255, and may change its input.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

# {name of an operation: the meaning of its value}
OPERATIONS = {
    "autocontrast": "none",
    "equalize": "none",
    "invert": "none",
    "posterize": "whole number of bits to keep; 0 or less: black; 8 or more: unchanged",
    "solarize": "threshold from 0 to 256: values from here on are inverted",
    "solarize_add": "whole number from 0 to 128 that is added to values below 128, up to 255",
    "brightness": "factor; 1: unchanged",
    "contrast": "factor; 1: unchanged, 0: the mean grey",
    "color": "factor; 1: unchanged, 0: greyscale",
    "sharpness": "factor; 1: unchanged, 0: smoothed",
    "gaussian_blur": "radius of Pillow's GaussianBlur in pixels",
    "rotate": "degrees counter-clockwise",
    "shear_x": "pixels to the side per row: x + value * y is shown at x",
    "shear_y": "pixels down per column: y + value * x is shown at y",
    "translate_x": "pixels: x + value is shown at x",
    "translate_y": "pixels: y + value is shown at y",
}


class Operation(NamedTuple):
    """A drawn operation with its value."""

    name: str  # a key of OPERATIONS
    value: float = 0.0
    resample: int = 0  # Pillow's interpolation number for rotate, shear and translate


class DrawnOperations(NamedTuple):
    """The operations drawn for an image: AugMix's chains, if any, and then `operations` one after another."""

    operations: tuple[Operation, ...] = ()
    chains: tuple[tuple[Operation, ...], ...] = ()  # each starts from the image
    weights: tuple[float, ...] = ()  # the weight of each chain
    blend: float = 0.0  # the weight of the chains' sum when it is blended with the image


GREY = (19595, 38470, 7471)  # weights of red, green and blue, in 1/65536; their sums are exact in float32
BLUR_PASSES = 3  # box blurs that Pillow applies along each side
BLUR_BITS = 24  # fractional bits of the fixed-point weights of the box blur
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
    # Repeat with numpy, because torch takes twice as long to broadcast over three neighbouring numbers.
    grey = torch.from_numpy(np.repeat(_grey(pixels).numpy(), 3)).view_as(pixels)
    if factor == 0:
        return grey
    return pixels.sub_(grey).mul_(factor).add_(grey).clamp_(0, 255).floor_()


def solarize(pixels: Tensor, threshold: float) -> Tensor:
    values = pixels.numpy().astype(np.uint8)
    all_bits = (values >= threshold).view(np.uint8) * np.uint8(255)
    return torch.from_numpy(values ^ all_bits).float()  # torch.where takes 20 times as long


def gaussian_blur(pixels: Tensor, radius: float) -> Tensor:
    """Compute Pillow's Gaussian blur: the mean over a box, three times along each side, in integers."""
    blurred = pixels.numpy()
    for side in (1, 0):
        blurred = _box_means(blurred, side, *box_of(radius))
    return torch.from_numpy(blurred.astype(np.float32))


def box_of(radius: float) -> tuple[int, int, int]:
    """Return the box of Pillow's Gaussian blur: radius, weight of a pixel inside, weight of each neighbour outside."""
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
    """Compute the mean over a box along one side. Outside of the image, the border's pixels are repeated."""
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
    """Return the grey values [H * W] of an RGB image."""
    return torch.mv(pixels.view(-1, 3), torch.tensor(GREY, dtype=torch.float32)).add_(0x8000).mul_(1 / 0x10000).floor_()


Fill = int | tuple[int, ...]  # the colour of pixels that a rotation or shift uncovers

ARITHMETIC = {each.__name__: each for each in (brightness, contrast, color, solarize, gaussian_blur)}


def apply_operations(drawn: DrawnOperations, pixels: np.ndarray, fill: Fill) -> np.ndarray:
    """Return uint8 [H, W, C] after the operations. `pixels` stays unchanged, and may itself be the result."""
    if drawn.chains:
        pixels = _mix(drawn, pixels, fill)
    return _in_turn(drawn.operations, pixels, fill)


def _to_image(pixels: np.ndarray) -> Image.Image:
    """Return uint8 [H, W, C] as a Pillow image."""
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])


def _in_turn(operations: tuple[Operation, ...], pixels: np.ndarray, fill: Fill) -> np.ndarray:
    shape = pixels.shape
    for is_arithmetic, group in itertools.groupby(operations, lambda each: each.name in ARITHMETIC):
        if is_arithmetic:
            numbers = torch.from_numpy(pixels).float()
            for name, value, _ in group:
                numbers = ARITHMETIC[name](numbers, value)
            pixels = numbers.numpy().astype(np.uint8)  # numpy takes a quarter of torch's time for this
        else:
            image = _to_image(pixels)
            for name, value, resample in group:
                image = _pillow_operations()[name](image, value, resample=resample, fillcolor=fill)
            pixels = np.array(image).reshape(shape)
    return pixels


def _mix(drawn: DrawnOperations, pixels: np.ndarray, fill: Fill) -> np.ndarray:
    changed = (_in_turn(chain, pixels, fill) for chain in drawn.chains)
    total = sum(
        weight * each.astype(np.float32) for weight, each in zip(np.float32(drawn.weights), changed, strict=True)
    )
    total = np.clip(total, 0, 255).astype(np.uint8)
    mixed = Image.blend(_to_image(pixels), _to_image(total), drawn.blend)
    return np.array(mixed).reshape(pixels.shape)


@functools.cache
def _pillow_operations() -> dict[str, Callable[..., Image.Image]]:
    """Return {name: function(image, value, resample=, fillcolor=)} for the operations that are not in ARITHMETIC."""
    from timm.data import auto_augment as timm  # imported here: the import takes a second, and most runs do not need it

    def posterize(image: Image.Image, bits: float, **options) -> Image.Image:
        # timm's strongest posterize keeps no bits, which is black. Pillow 13 refuses 0 bits; older versions do not.
        return timm.posterize(image, int(bits)) if bits >= 1 else Image.new(image.mode, image.size)

    return {
        "autocontrast": lambda image, _, **options: timm.auto_contrast(image),
        "equalize": lambda image, _, **options: timm.equalize(image),
        "invert": lambda image, _, **options: timm.invert(image),
        "posterize": posterize,
        "solarize_add": timm.solarize_add,
        "sharpness": timm.sharpness,
        "rotate": timm.rotate,
        "shear_x": timm.shear_x,
        "shear_y": timm.shear_y,
        "translate_x": timm.translate_x_abs,
        "translate_y": timm.translate_y_abs,
    }
