"""Carries out a plan on the pixels of an image, with timm's operations or arithmetic that gives their pixels."""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from datasets.transforms.augment import arithmetic
from datasets.transforms.augment.plan import Operation, Plan

Fill = int | tuple[int, ...]  # the colour of pixels that a rotation or shift uncovers

ARITHMETIC = {
    name: getattr(arithmetic, name) for name in ("brightness", "contrast", "color", "solarize", "gaussian_blur")
}


def carry_out(plan: Plan, pixels: np.ndarray, fill: Fill) -> np.ndarray:
    """uint8 [H, W, C] changed as planned, which may be the same array; `pixels` stay as they are."""
    if plan.chains:
        pixels = _mix(plan, pixels, fill)
    return _in_turn(plan.operations, pixels, fill)


def _to_image(pixels: np.ndarray) -> Image.Image:
    """Of uint8 [H, W, C]."""
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])


def _in_turn(operations: tuple[Operation, ...], pixels: np.ndarray, fill: Fill) -> np.ndarray:
    shape = pixels.shape
    for is_arithmetic, group in itertools.groupby(operations, lambda each: each.name in ARITHMETIC):
        if is_arithmetic:
            numbers = torch.from_numpy(pixels).float()
            for name, value, _ in group:
                numbers = ARITHMETIC[name](numbers, value)
            pixels = numbers.numpy().astype(np.uint8)  # a quarter of torch's time
        else:
            image = _to_image(pixels)
            for name, value, resample in group:
                image = _pillow_operations()[name](image, value, resample=resample, fillcolor=fill)
            pixels = np.array(image).reshape(shape)
    return pixels


def _mix(plan: Plan, pixels: np.ndarray, fill: Fill) -> np.ndarray:
    changed = (_in_turn(chain, pixels, fill) for chain in plan.chains)
    if plan.blend is None:
        mixed = _to_image(pixels)
        for weight, each in zip(plan.weights, changed, strict=True):
            mixed = Image.blend(mixed, _to_image(each), weight)
    else:
        total = sum(
            weight * each.astype(np.float32) for weight, each in zip(np.float32(plan.weights), changed, strict=True)
        )
        total = np.clip(total, 0, 255).astype(np.uint8)
        mixed = Image.blend(_to_image(pixels), _to_image(total), plan.blend)
    return np.array(mixed).reshape(pixels.shape)


@functools.cache
def _pillow_operations() -> dict[str, Callable[..., Image.Image]]:
    """{name: function(image, value, resample=, fillcolor=)}, for the rest of plan.OPERATIONS."""
    from timm.data import auto_augment as timm  # imported here: it takes a second, and most runs do not need it

    def posterize(image: Image.Image, bits: float, **options) -> Image.Image:
        # timm's strongest posterize keeps no bit: black. Pillow 13 refuses that, older ones gave it.
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
