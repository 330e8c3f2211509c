"""Carries out a plan on a Pillow image (RGB or L), with timm's operations."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from datasets.transforms.augment.plan import Operation, Plan

MAX_REACH = 11  # pixels to each side: timm blurs with a kernel of 23 x 23

Fill = int | tuple[int, ...]  # the colour of pixels that a rotation or shift uncovers


def carry_out(plan: Plan, image: Image.Image, fill: Fill) -> Image.Image:
    """The image changed as planned, which may be the same object; `image` keeps its pixels."""
    if plan.chains:
        image = _mix(plan, image, fill)
    return _in_turn(plan.operations, image, fill)


def _in_turn(operations: tuple[Operation, ...], image: Image.Image, fill: Fill) -> Image.Image:
    functions = _functions()
    for name, value, resample in operations:
        image = functions[name](image, value, resample=resample, fillcolor=fill)
    return image


def _mix(plan: Plan, image: Image.Image, fill: Fill) -> Image.Image:
    changed = (_in_turn(chain, image, fill) for chain in plan.chains)
    if plan.blend is None:
        mixed = image
        for weight, each in zip(plan.weights, changed, strict=True):
            mixed = Image.blend(mixed, each, weight)
        return mixed
    weights = np.float32(plan.weights)
    total = sum(weight * np.asarray(each, np.float32) for weight, each in zip(weights, changed, strict=True))
    mixed = Image.fromarray(np.clip(total, 0, 255).astype(np.uint8))
    return Image.blend(image, mixed, plan.blend)


@functools.cache
def _functions() -> dict[str, Callable[..., Image.Image]]:
    """{name: function(image, value, resample=, fillcolor=)}, for each of plan.OPERATIONS."""
    from timm.data import auto_augment as timm  # imported here: it takes a second, and most runs do not need it

    return {
        "autocontrast": lambda image, _, **options: timm.auto_contrast(image),
        "equalize": lambda image, _, **options: timm.equalize(image),
        "invert": lambda image, _, **options: timm.invert(image),
        "posterize": _posterize,
        "solarize": timm.solarize,
        "solarize_add": timm.solarize_add,
        "brightness": timm.brightness,
        "contrast": timm.contrast,
        "color": timm.color,
        "sharpness": timm.sharpness,
        "hue": _hue,
        "gaussian_blur": timm.gaussian_blur,
        "gaussian_kernel": _gaussian_kernel,
        "rotate": timm.rotate,
        "shear_x": timm.shear_x,
        "shear_y": timm.shear_y,
        "translate_x": timm.translate_x_abs,
        "translate_y": timm.translate_y_abs,
    }


def _posterize(image: Image.Image, bits: float, **options) -> Image.Image:
    from timm.data.auto_augment import posterize

    # timm's strongest posterize keeps no bit: black. Pillow 13 refuses that, older ones gave it.
    return posterize(image, int(bits)) if bits >= 1 else Image.new(image.mode, image.size)


def _hue(image: Image.Image, value: float, **options) -> Image.Image:
    from torchvision.transforms.functional import adjust_hue

    return adjust_hue(image, value)


def _gaussian_kernel(image: Image.Image, sigma: float, **options) -> Image.Image:
    """torchvision's GaussianBlur by rows and then by columns: a third of its time, one pixel in 10,000 off by one."""
    pixels = (
        torch.from_numpy(np.asarray(image, np.float32)).reshape(image.height, image.width, -1).permute(2, 0, 1)[:, None]
    )
    reach = min(MAX_REACH, *(side - 1 for side in image.size))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    pixels = functional.pad(pixels, (reach,) * 4, mode="reflect")
    pixels = functional.conv2d(functional.conv2d(pixels, kernel[None, None, None]), kernel[None, None, :, None])
    blurred = pixels.round().to(torch.uint8)[:, 0].permute(1, 2, 0).numpy()
    return Image.fromarray(blurred if len(pixels) > 1 else blurred[:, :, 0])
