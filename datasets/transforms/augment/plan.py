"""What happens to one image, as plain data: drawn once from the image's generator, carried out anywhere."""

from typing import NamedTuple

# Every operation that a plan can hold, with what its value means.
OPERATIONS = {
    "autocontrast": "none",
    "equalize": "none",
    "invert": "none",
    "posterize": "bits to keep, whole; 0 or less: black; 8 or more: unchanged",
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
    """One operation on the pixels."""

    name: str  # a key of OPERATIONS
    value: float = 0.0
    resample: int = 0  # of rotate, shear and translate: Pillow's number of the interpolation


class Plan(NamedTuple):
    """AugMix's chains, if there are any, and then `operations` one after another."""

    operations: tuple[Operation, ...] = ()
    chains: tuple[tuple[Operation, ...], ...] = ()  # each starts from the image
    weights: tuple[float, ...] = ()  # one for each chain
    # The sum of the chains by their weights is blended with the image, with this weight. None: the chains are blended
    # onto the image one by one, each with its own weight.
    blend: float | None = None
