"""Operations of augmentation policies: how each draws its value, and how drawn operations change an image.

The draws are those of timm's policies and of torchvision's TrivialAugment. Drawn operations are plain data, and are
applied with timm or with equivalent arithmetic. Pillow holds the GIL in all operations, so loader threads would wait
for each other, and most of its operations are slower. The arithmetic here takes 0.3 of Pillow's time for brightness,
0.5 to 0.7 for a blur, 0.9 for colour. Each arithmetic function gets and returns float32 [H, W, C] with whole numbers
from 0 to 255, and may change its input.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MAX_MAGNITUDE = 10.0  # timm's largest magnitude by default; the smallest is 0
GEOMETRIC = frozenset("rotate shear_x shear_y translate_x translate_y".split())


class Operation(NamedTuple):
    """A drawn operation with its value.

    The value of brightness, contrast, color and sharpness is a factor; of posterize the number of bits to keep; of
    solarize a threshold; of solarize_add a number to add; of gaussian_blur a radius in pixels; of rotate degrees
    counter-clockwise; of shear_x, shear_y, translate_x and translate_y pixels (x + value, or x + value * y, is shown
    at x). Others have none.
    """

    name: str
    value: float = 0.0
    resample: int = 0  # Pillow's interpolation number for rotate, shear and translate


class DrawnOperations(NamedTuple):
    """The operations drawn for an image: AugMix's chains, if any, and then `operations` one after another."""

    operations: tuple[Operation, ...] = ()
    chains: tuple[tuple[Operation, ...], ...] = ()  # each starts from the image
    weights: tuple[float, ...] = ()  # the weight of each chain
    blend: float = 0.0  # the weight of the chains' sum when it is blended with the image


# --- drawing ---


class Options(NamedTuple):
    """The options that all operations of a policy share."""

    resamples: tuple[int, ...]  # Pillow's interpolation numbers; one is drawn for each rotation or shift
    shifts: Mapping[str, float]  # pixels of a translate_x and a translate_y with magnitude 10
    deviation: float  # standard deviation of a magnitude; infinite: uniform from 0 to the magnitude
    highest: float = MAX_MAGNITUDE  # the upper limit of magnitudes


def choose(items: Sequence, rng: Random):
    return items[int(rng.random() * len(items))] if len(items) > 1 else items[0]


class RandomOperation(NamedTuple):
    """An operation, by timm's name, with its probability and magnitude."""

    name: str
    probability: float
    magnitude: float
    options: Options

    def draw(self, rng: Random) -> tuple[Operation, ...]:
        """Return the operation with a random value as a tuple, or () with probability 1 - `probability`."""
        if self.probability < 1 and rng.random() > self.probability:
            return ()
        # As in timm, a level is drawn even for an operation without a value.
        level, options = self.magnitude, self.options
        if options.deviation == math.inf:
            level *= rng.random()
        elif options.deviation > 0:
            level = rng.gauss(level, options.deviation)
        level = max(0.0, min(level, options.highest))
        operation = timm_operation(self.name, level / MAX_MAGNITUDE, rng)
        name, value, _ = operation
        if name not in GEOMETRIC:
            return (operation,)
        if name.startswith("translate"):
            value *= options.shifts[name]
        return (Operation(name, value, choose(options.resamples, rng)),)


def negate(value: float, rng: Random) -> float:
    """Return the value or its negative, with equal probability."""
    return -value if rng.random() > 0.5 else value


# A case for each operation is easier to compare with timm than several functions.
def timm_operation(name: str, share: float, rng: Random) -> Operation:  # noqa: C901
    """Return timm's operation of this name, with its value for the magnitude 10 * `share`."""
    match name:
        case "AutoContrast" | "Equalize" | "Invert":
            return Operation(name.lower())
        case "Rotate":
            return Operation("rotate", negate(share * 30.0, rng))
        case "ShearX":
            return Operation("shear_x", negate(share * 0.3, rng))
        case "ShearY":
            return Operation("shear_y", negate(share * 0.3, rng))
        case "TranslateXRel":
            return Operation("translate_x", negate(share, rng))
        case "TranslateYRel":
            return Operation("translate_y", negate(share, rng))
        case "Posterize":
            return Operation("posterize", int(share * 4))
        case "PosterizeIncreasing":
            return Operation("posterize", 4 - int(share * 4))
        case "PosterizeOriginal":
            return Operation("posterize", int(share * 4) + 4)
        case "Solarize":
            return Operation("solarize", min(256, int(share * 256)))
        case "SolarizeIncreasing":
            return Operation("solarize", 256 - min(256, int(share * 256)))
        case "SolarizeAdd":
            return Operation("solarize_add", min(128, int(share * 110)))
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return Operation(name.lower(), share * 1.8 + 0.1)
        case "ColorIncreasing" | "ContrastIncreasing" | "BrightnessIncreasing" | "SharpnessIncreasing":
            return Operation(name.removesuffix("Increasing").lower(), max(0.1, 1.0 + negate(share * 0.9, rng)))
        case "Desaturate":
            return Operation("color", 1.0 - min(1.0, 0.5 + 0.5 * share))
        case "GaussianBlur":
            return Operation("gaussian_blur", min(2.0, 0.1 + 1.9 * share))
        case "GaussianBlurRand":
            return Operation("gaussian_blur", rng.uniform(0.1, 2.0 * min(1.0, share)))
    raise AssertionError(f"{name} is no operation of timm")


class OneOfMany(NamedTuple):
    """An operation of TrivialAugment, with a value that is drawn from a list."""

    name: str
    values: Sequence[float]
    is_signed: bool
    resamples: tuple[int, ...]

    def draw(self, rng: Random) -> tuple[Operation, ...]:
        value = choose(self.values, rng)
        if self.is_signed:
            value = negate(value, rng)
        if self.name in ("brightness", "contrast", "color", "sharpness"):
            value += 1.0
        return (Operation(self.name, value, choose(self.resamples, rng) if self.name in GEOMETRIC else 0),)


def trivial_augment(resamples: tuple[int, ...]) -> list[list[OneOfMany]]:
    """Return the 14 operations of torchvision's TrivialAugmentWide as sequences.

    The first leaves the image unchanged.
    """

    def up_to(limit: float) -> list[float]:
        return torch.linspace(0.0, limit, 31).tolist()  # in float32, as in torchvision

    # Shifts are negative, because positive values move the image right or down in torchvision, but left or up here.
    shifts = [-int(value) for value in up_to(32.0)]
    signed = {
        **dict.fromkeys(("shear_x", "shear_y"), up_to(0.99)),
        **dict.fromkeys(("translate_x", "translate_y"), shifts),
        "rotate": up_to(135.0),
        **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), up_to(0.99)),
    }
    unsigned = {
        "posterize": [8 - round(level / 5) for level in range(31)],
        "solarize": up_to(255.0)[::-1],
        **dict.fromkeys(("autocontrast", "equalize"), [0.0]),
    }
    tables = [(signed, True), (unsigned, False)]
    return [[], *([OneOfMany(name, values[name], sign, resamples)] for values, sign in tables for name in values)]


# --- applying ---


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
    shape = [*pixels.shape]
    shape[side] += 2 * margin
    padded = np.empty(shape, np.uint32)
    line = padded.swapaxes(0, side)  # the same memory, with the side in front
    line[margin : margin + length] = pixels.swapaxes(0, side)
    for _ in range(BLUR_PASSES):
        line[:margin], line[margin + length :] = line[margin], line[margin + length - 1]
        shifted = [line[start : start + length] for start in range(2 * margin + 1)]
        total = shifted[1].copy(order="K")
        for pixels_beside in shifted[2:-1]:
            total += pixels_beside
        total *= np.uint32(weight)
        total += (shifted[0] + shifted[-1]) * np.uint32(beyond)
        total += np.uint32(BLUR_UNIT // 2)
        total >>= np.uint32(BLUR_BITS)
        line[margin : margin + length] = total
    return line[margin : margin + length].swapaxes(0, side)


def _grey(pixels: Tensor) -> Tensor:
    """Return the grey values [H * W] of an RGB image."""
    return torch.mv(pixels.view(-1, 3), torch.tensor(GREY, dtype=torch.float32)).add_(0x8000).mul_(1 / 0x10000).floor_()


ARITHMETIC = {
    "brightness": brightness,
    "contrast": contrast,
    "color": color,
    "solarize": solarize,
    "gaussian_blur": gaussian_blur,
}
Fill = int | tuple[int, ...]  # the colour of pixels that a rotation or shift uncovers


def apply_operations(drawn: DrawnOperations, pixels: np.ndarray, fill: Fill) -> np.ndarray:
    """Return uint8 [H, W, C] after the operations. `pixels` stays unchanged, and may itself be the result."""
    if drawn.chains:
        changed = (_in_turn(chain, pixels, fill) for chain in drawn.chains)
        weighted = zip(np.float32(drawn.weights), changed, strict=True)
        total = np.clip(sum(weight * each.astype(np.float32) for weight, each in weighted), 0, 255).astype(np.uint8)
        pixels = np.array(Image.blend(_to_image(pixels), _to_image(total), drawn.blend)).reshape(pixels.shape)
    return _in_turn(drawn.operations, pixels, fill)


def _to_image(pixels: np.ndarray) -> Image.Image:
    """Return uint8 [H, W, C] as a Pillow image."""
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])


def _in_turn(operations: tuple[Operation, ...], pixels: np.ndarray, fill: Fill) -> np.ndarray:
    shape = pixels.shape
    for is_arithmetic, group in itertools.groupby(operations, lambda operation: operation.name in ARITHMETIC):
        if is_arithmetic:
            numbers = torch.from_numpy(pixels).float()
            for name, value, _ in group:
                numbers = ARITHMETIC[name](numbers, value)
            pixels = numbers.numpy().astype(np.uint8)  # numpy takes a quarter of torch's time for this
        else:
            image = _to_image(pixels)
            for operation in group:
                image = _by_pillow(image, operation, fill)
            pixels = np.array(image).reshape(shape)
    return pixels


# As above, there is a case for each operation.
def _by_pillow(image: Image.Image, operation: Operation, fill: Fill) -> Image.Image:  # noqa: C901
    """Return the image after an operation that is not in ARITHMETIC."""
    from timm.data import auto_augment as timm  # imported here: the import takes a second, and most runs do not need it

    name, value, resample = operation
    match name:
        case "autocontrast":
            return timm.auto_contrast(image)
        case "equalize":
            return timm.equalize(image)
        case "invert":
            return timm.invert(image)
        case "posterize":
            # timm's strongest posterize keeps no bits, which is black. Pillow 13 refuses 0 bits; older versions do not.
            return timm.posterize(image, int(value)) if value >= 1 else Image.new(image.mode, image.size)
        case "solarize_add":
            return timm.solarize_add(image, value)
        case "sharpness":
            return timm.sharpness(image, value)
        case "rotate":
            return timm.rotate(image, value, resample=resample, fillcolor=fill)
        case "shear_x":
            return timm.shear_x(image, value, resample=resample, fillcolor=fill)
        case "shear_y":
            return timm.shear_y(image, value, resample=resample, fillcolor=fill)
        case "translate_x":
            return timm.translate_x_abs(image, value, resample=resample, fillcolor=fill)
        case "translate_y":
            return timm.translate_y_abs(image, value, resample=resample, fillcolor=fill)
    raise AssertionError(f"{name} is no operation")
