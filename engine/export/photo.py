"""A graph that takes a decoded photo of any size: resize, crop, normalization, model, temperature, probabilities."""

from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.export import Dim

from configs.schema import Config, Data, Shape
from datasets import Normalize
from datasets.image_set import ImageSet
from datasets.pixels import pillow_resizes_height_first
from datasets.pixels.decode import open_image, to_array
from datasets.pixels.kinds import pixels_of
from datasets.transforms.crop import EvalTransform
from engine.tasks import find_task
from utils.errors import ConfigError
from utils.torch_internals import RESIZE_KERNELS

MOST_BITS = 22  # torch's kernels multiply weights by at most 2**22
GREY = (19595, 38470, 7471)  # Pillow's weights of red, green and blue, in 1/65536
CUBIC = -0.5  # the parameter of Pillow's bicubic kernel


def refuse_unsupported(data: Data) -> None:
    """Raise ConfigError if the graph cannot prepare photos as the run did."""
    unsupported = {
        f"DATA.INTERPOLATION {data.INTERPOLATION}": data.INTERPOLATION not in RESIZE_KERNELS,
        "DATA.CROP_MODE border": data.CROP_MODE == "border",
        f"DATA.CROP_PCT {data.CROP_PCT:g} (above 1)": data.CROP_PCT > 1,
    }
    if reasons := [name for name, applies in unsupported.items() if applies]:
        raise ConfigError(
            f"-photo: the graph does not resize photos with {' and '.join(reasons)}; leave -photo out, and resize them "
            "before the model"
        )


class Photo(nn.Module):
    """Photos, uint8 [H, W, 3 or 4] of any size, to model inputs, uint8 values as float32 [C, *Data.shape].

    The fourth channel is the opacity. Transparent pixels get the colour that datasets/ puts behind them.

    The resize is two matrix products. As in torch's kernels, weights have 16 bits, and the result of each product is
    rounded to whole pixels, so every program computes the same pixels.
    """

    dimensions: ClassVar[dict[int, Dim]] = {
        0: Dim("height", min=1),
        1: Dim("width", min=1),
        2: Dim("channels", min=3, max=4),
    }

    def __init__(self, data: Data):
        super().__init__()
        self.transform, self.pixels = EvalTransform(data), pixels_of(data)
        self.height_may_be_first = pillow_resizes_height_first()
        self.register_buffer("background", torch.tensor(self.pixels.background, dtype=torch.float32))

    def forward(self, photo: Tensor) -> Tensor:
        sides = self._sides(photo)
        rows, columns = (self._weights(*each) for each in sides)
        # Transposed here, because torch 2.11 takes a transposed input of a branch for an alias.
        weighted = (self._coloured(photo), *rows, columns[0].T, columns[1])
        if not self.height_may_be_first:
            return width_first(*weighted)
        shrinks = [size - new for _, size, new, _ in sides]
        return torch.cond(shrinks[0] > (2 * shrinks[1]).clamp(min=0), height_first, width_first, weighted)

    def _coloured(self, photo: Tensor) -> Tensor:
        layers = photo.permute(2, 0, 1)
        # With one more layer, the slices have the same sizes for 3 and 4 channels, so torch.export can trace both.
        layers = torch.cat([layers, torch.full_like(layers[:1], 255)])
        colours, opacity = layers[:3], layers[3].float()
        is_transparent = opacity.amin((0, 1)) < 255
        # Most photos are opaque, and then need half the memory.
        pixels = torch.cond(is_transparent, on_background, on_nothing, (colours, opacity, self.background))
        if self.pixels.num_channels == 1:
            red, green, blue = pixels
            pixels = ((red * GREY[0] + green * GREY[1] + blue * GREY[2] + 32768) / 65536).floor()[None]
        return pixels

    def _sides(self, photo: Tensor) -> list[tuple[int, Tensor, Tensor, int]]:
        """Return the length of a photo as a number, as a tensor, in the resized photo and in the crop.

        The first entry is for the height, the second for the width.
        """
        sizes = [torch.full((), length, dtype=torch.int64) for length in photo.shape[:2]]
        shape = self.transform.resized
        if self.transform.mode == "squash":
            resized = [torch.full_like(each, side) for each, side in zip(sizes, shape, strict=True)]
        elif shape.height == shape.width:
            short = torch.minimum(*sizes)
            resized = [shape.height * each // short for each in sizes]
        else:
            resized = covering_size(*sizes, shape)
        return [*zip(photo.shape[:2], sizes, resized, self.transform.shape, strict=True)]

    def _weights(self, length: int, size: Tensor, new: Tensor, crop: int) -> tuple[Tensor, Tensor]:
        """Return the weights [crop, length] of the pixels along one side, times `unit`, and `unit`, a power of two."""
        weights = self._exact_weights(length, size, new, crop)
        steps = 2.0 ** torch.arange(1, MOST_BITS + 1)
        unit = 2.0 ** (weights.max() * steps < 2**15 - 0.5).sum().float()
        scaled = weights[:-1] * unit
        return (scaled.abs() + 0.5).floor() * scaled.sign(), unit

    def _exact_weights(self, length: int, size: Tensor, new: Tensor, crop: int) -> Tensor:
        """Return the weights [crop + 1, length] of the pixels along one side.

        The last row is the first pixel of the resized photo, which the crop leaves out: it may have the largest weight.
        Every integer here fits into 32 bits, because some programs have no longer ones.
        """
        scale = (size / new).clamp(min=1)
        taps = 2 * torch.arange(length) + 1
        # Twice the places of the new pixels in the photo, from its middle: whole numbers and a rest, which float32
        # keeps.
        moved = (2 * (torch.arange(crop) + start_of(new, crop)) + 1 - new) * size
        whole = torch.div(moved, new, rounding_mode="floor")
        rest = (moved - whole * new) / new
        distances = (taps - size - whole[:, None]) - rest[:, None]
        distances = torch.cat([distances, taps[None] - size / new]) / (2 * scale)
        weights = kernel(distances.abs(), self.transform.interpolation)
        return weights / weights.sum(1, keepdim=True)

    @staticmethod
    def refuse_page(config: Config) -> None:
        """Raise ConfigError if a web page cannot read these photos."""

    # --- photos that check a graph ---

    def drawn(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pixels that halfstep predict would read, and the photo, of drawn photos."""
        return ((to_array(Image.fromarray(photo), self.pixels), photo) for photo in drawn_photos())

    def photo_at(self, images: ImageSet, index: int, pixels: np.ndarray) -> np.ndarray:
        """Return an image of a set as a photo. `pixels`: what halfstep predict reads."""
        with open_image(images.file(index)[1], self.pixels) as image:
            return read_photo(image, self.pixels.applies_exif)

    def as_photo(self, pixels: np.ndarray) -> np.ndarray:
        """Return an image of one or three colours, uint8 [H, W, C], as a photo, uint8 [H, W, 3]."""
        return pixels.repeat(3 // pixels.shape[2], axis=2)


def covering_size(height: Tensor, width: Tensor, shape: Shape) -> list[Tensor]:
    """Return what covering_size of datasets/transforms/crop.py returns for a shape that is no square."""
    fits_height = height * shape.width <= width * shape.height
    new = torch.where(fits_height, shape.height, shape.width)
    old = torch.where(fits_height, height, width)
    wholes = [new * length // old for length in (height, width)]
    rests = [new * length - whole * old for length, whole in zip((height, width), wholes, strict=True)]
    # Of two numbers that are equally near, the even one.
    return [whole + (2 * rest + whole % 2 > old).long() for whole, rest in zip(wholes, rests, strict=True)]


def start_of(length: Tensor, crop: int) -> Tensor:
    """Return the start of the crop, as EvalTransform does; round() rounds a half to the even number."""
    spare = length - crop
    half = spare // 2
    return half + half % 2 * (spare % 2)


def kernel(distances: Tensor, interpolation: str) -> Tensor:
    """Return the weights of pixels at these distances, with Pillow's kernels."""
    if interpolation == "bilinear":
        return (1 - distances).clamp(min=0)
    near = ((CUBIC + 2) * distances - (CUBIC + 3)) * distances**2 + 1
    far = ((CUBIC * distances - 5 * CUBIC) * distances + 8 * CUBIC) * distances - 4 * CUBIC
    return torch.where(distances < 1, near, torch.where(distances < 2, far, 0.0))


def on_background(colours: Tensor, opacity: Tensor, background: Tensor) -> Tensor:
    """Return colours [3, H, W] with an opacity [H, W] on a background [3], as Pillow pastes them."""
    background = background[:, None, None]
    # The sums are whole numbers that float32 keeps, and no quotient ends in one half.
    sums = (colours.float() - background) * opacity + background * 255
    return (sums / 255 + 0.5).floor()


def on_nothing(colours: Tensor, opacity: Tensor, background: Tensor) -> Tensor:
    """Return opaque colours, uint8 [3, H, W], as float32."""
    return colours.float()


def rounded(sums: Tensor, unit: Tensor) -> Tensor:
    return (sums / unit + 0.5).floor().clamp(0, 255)


def width_first(pixels: Tensor, rows: Tensor, row_unit: Tensor, columns: Tensor, column_unit: Tensor) -> Tensor:
    return rounded(rows @ rounded(pixels @ columns, column_unit), row_unit)


def height_first(pixels: Tensor, rows: Tensor, row_unit: Tensor, columns: Tensor, column_unit: Tensor) -> Tensor:
    return rounded(rounded(rows @ pixels, row_unit) @ columns, column_unit)


class PhotoClassifier(nn.Module):
    """A model with its preprocessing: one photo, uint8 [H, W, 3 or 4], to its probabilities [classes].

    With `known`, it also returns how well the photo fits the validation images.
    """

    def __init__(self, model: nn.Module, config: Config, prepare: Photo, known: Callable[[], Tensor] | None):
        """`model`: a model that divides its logits by the temperature. `known`: returns the score of its last batch."""
        super().__init__()
        self.prepare, self.normalize, self.model = prepare, Normalize(config.DATA), model
        self.probabilities, self.known = find_task(config).probabilities, known

    def forward(self, photo: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.answer(self.normalize(self.prepare(photo)[None]))

    def answer(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        probabilities = self.probabilities(self.model(images)[0])
        return (probabilities, self.known()[0]) if self.known else probabilities


# Height and width of drawn photos
SHAPES = ((1, 1), (2, 300), (300, 2), (31, 47), (480, 640), (1300, 150), (150, 1300))


def drawn_photos() -> Iterator[np.ndarray]:
    """Yield noise, with noise as its opacity, ramps and thin lines. Their pixels depend most on the exact resize."""
    rng = np.random.default_rng(0)
    for height, width in SHAPES:
        ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] // [1, 2, 3]
        for pixels in (rng.integers(0, 256, (height, width, 4)), ramp % 256, ramp % 7 // 6 * 255):
            yield pixels.astype(np.uint8)


def read_photo(image: Image.Image, is_turned: bool) -> np.ndarray:
    """Return an opened image file as a photo, uint8 [H, W, 4], with the code of docs/exporting.md."""
    if is_turned:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    return np.array(image.convert("RGBA"))
