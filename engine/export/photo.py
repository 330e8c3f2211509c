"""A graph that takes a decoded photo of any size: resize, crop, normalization, model, temperature, probabilities."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.export import Dim

from configs.schema import Config, Data
from configs.tables import import_named
from datasets import Normalize
from datasets.image_set import ImageSet
from datasets.pixels import pillow_resizes_height_first
from datasets.pixels.decode import open_image, to_array
from datasets.pixels.kinds import pixels_of
from datasets.pixels.rules import ImageReadError
from datasets.transforms.crop import EvalTransform
from engine.confidence.known import LIKE_ROUNDING, MOST_MOVED
from engine.confidence.stored import watch
from engine.confidence.unknown import ROUNDING, find_answered
from engine.export.files import WrongExport
from engine.export.subject import Calibrated, Subject
from engine.tasks import find_task
from engine.tasks.classes import ClassTask
from utils.errors import ConfigError
from utils.text import counted
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
    """Photos, uint8 [H, W, 3 or 4] of any size, to model inputs, uint8 values as float32 [C, side, side].

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
        shrinks = [size - new for _, size, new in sides]
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

    def _sides(self, photo: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return the length of a photo as a number, as a tensor and in the resized photo: for height and width."""
        sizes = [torch.full((), length, dtype=torch.int64) for length in photo.shape[:2]]
        side = self.transform.resized_side
        if self.transform.mode == "squash":
            resized = [torch.full_like(each, side) for each in sizes]
        else:
            short = torch.minimum(*sizes)
            resized = [side * each // short for each in sizes]
        return [*zip(photo.shape[:2], sizes, resized, strict=True)]

    def _weights(self, length: int, size: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [side, length] of the pixels along one side, times `unit`, and `unit`, a power of two."""
        weights = self._exact_weights(length, size, new)
        steps = 2.0 ** torch.arange(1, MOST_BITS + 1)
        unit = 2.0 ** (weights.max() * steps < 2**15 - 0.5).sum().float()
        scaled = weights[:-1] * unit
        return (scaled.abs() + 0.5).floor() * scaled.sign(), unit

    def _exact_weights(self, length: int, size: Tensor, new: Tensor) -> Tensor:
        """Return the weights [side + 1, length] of the pixels along one side.

        The last row is the first pixel of the resized photo, which the crop leaves out: it may have the largest weight.
        Every integer here fits into 32 bits, because some programs have no longer ones.
        """
        scale = (size / new).clamp(min=1)
        taps = 2 * torch.arange(length) + 1
        # Twice the places of the new pixels in the photo, from its middle: whole numbers and a rest, which float32
        # keeps.
        moved = (2 * (torch.arange(self.transform.side) + self._start(new)) + 1 - new) * size
        whole = torch.div(moved, new, rounding_mode="floor")
        rest = (moved - whole * new) / new
        distances = (taps - size - whole[:, None]) - rest[:, None]
        distances = torch.cat([distances, taps[None] - size / new]) / (2 * scale)
        weights = kernel(distances.abs(), self.transform.interpolation)
        return weights / weights.sum(1, keepdim=True)

    def _start(self, length: Tensor) -> Tensor:
        """Return the start of the crop, as EvalTransform does; round() rounds a half to the even number."""
        spare = length - self.transform.side
        half = spare // 2
        return half + half % 2 * (spare % 2)

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


def photo_of(config: Config) -> type[Photo]:
    """Return the class of the photos of a model with these settings."""
    return import_named("engine.export", pixels_of(config.DATA).photo)


# Height and width of drawn photos
SHAPES = ((1, 1), (2, 300), (300, 2), (31, 47), (480, 640), (1300, 150), (150, 1300))
MOST_CHANGED = 1e-3  # limit for the share of photos with another answer
SHARE = 0.95  # the share of right answers above the threshold, as with `halfstep predict -unknown 0.95`
MOST_PHOTOS = 2000  # maximum number of validation images to compare


class Difference(NamedTuple):
    """The differences between the results of a graph and of the original model for one photo."""

    probability: float  # the largest difference of a probability, or of a number in standard deviations
    is_other_answer: bool  # whether the answers differ and are not a near tie
    is_other_sign: bool  # whether the sign of `known` differs by more than rounding explains


@dataclass(frozen=True)
class PhotoSubject(Subject):
    """A model to export with its preprocessing, and the validation images that check the graph."""

    photos: ImageSet  # decoded by `read`
    runtime: Path | None  # an installed onnxruntime-web, whose files a page copies

    def __post_init__(self):
        super().__post_init__()
        refuse_unsupported(self.config.DATA)

    @cached_property
    def task(self) -> ClassTask:
        return find_task(self.config)

    @cached_property
    def preparation(self) -> Photo:
        return photo_of(self.config)(self.config.DATA)

    @property
    def dimensions(self) -> dict[int, Dim]:
        return self.preparation.dimensions

    @cached_property
    def known(self) -> Callable[[], Tensor] | None:
        """Return a function that returns how well the newest batch fits the validation images. None: no statistics."""
        return watch(self.model, self.calibration, self.saved.path)

    @property
    def names(self) -> tuple[str, ...]:
        return ("photo", self.task.answers_are, *(["known"] if self.known else []))

    @cached_property
    def graph(self) -> PhotoClassifier:
        model = Calibrated(self.model, self.temperature or 1.0)
        return PhotoClassifier(model, self.config, self.preparation, self.known).eval()

    @property
    def threshold(self) -> float:
        """Return the probability below which a photo is unknown: SHARE of the answers above are right. 0: not known."""
        curve = self.calibration.get("curve")
        if not curve:
            return 0.0
        point, _ = find_answered(curve, SHARE)
        return point.confidence - ROUNDING if point else 1.0

    @property
    def facts(self) -> dict[str, str]:
        return super().facts | {"unknown_below": json.dumps(self.threshold)}

    @property
    def example(self) -> Tensor:
        photos = (photo for _, photo in self.preparation.drawn())
        return torch.from_numpy(max(photos, key=lambda pixels: min(pixels.shape[:2])))

    def _prepared(self, pixels: np.ndarray) -> Tensor:
        """Return an image, uint8 [H, W, C], as halfstep predict prepares it."""
        image = torch.empty(self.data["input_size"], dtype=self.pixels.dtype_in_batch)
        self.preparation.transform(pixels, image)
        return self.graph.normalize(image[None])

    def check(self, run: Callable[[Tensor], Tensor]) -> str:
        """Compare the graph with the original on drawn photos and on validation images.

        Raise WrongExport if they differ.
        """
        largest = max(self._compare(run, *each).probability for each in self.preparation.drawn())
        if not largest <= self.task.most_difference:
            raise WrongExport(f"its {self.names[1]} of drawn photos differ by up to {largest:.1e}")
        differences = {
            index: self._compare(run, pixels, self.preparation.photo_at(self.photos, index, pixels))
            for index, pixels in draw(self.photos, MOST_PHOTOS)
        }
        if not differences:
            raise ConfigError(
                f"-photo: none of {counted(min(len(self.photos), MOST_PHOTOS), 'validation image')} can be read, so "
                "the graph cannot be compared with the model; repair them, or name the images with -data_path"
            )
        changed = {"another answer": [index for index, each in differences.items() if each.is_other_answer]}
        if self.known:
            changed["another sign of known"] = [index for index, each in differences.items() if each.is_other_sign]
        counts = ", ".join(f"{len(indices)} with {what}" for what, indices in changed.items())
        largest = max(each.probability for each in differences.values())
        images = counted(len(differences), "validation image")
        result = f"{images}, {counts}, largest difference of {self.names[1]} {largest:.1e}"
        for what, indices in changed.items():
            if len(indices) > MOST_CHANGED * len(differences):
                first = self.photos.table_name(indices[0])
                raise WrongExport(f"too many images, such as {first}, have {what} ({result})")
        return result

    def _compare(self, run: Callable[[Tensor], Tensor], pixels: np.ndarray, photo: np.ndarray) -> Difference:
        """Compare the graph's results for a photo with the original's for the pixels that halfstep predict reads."""
        expected, results = self.graph.answer(self._prepared(pixels)), run(torch.from_numpy(photo))
        is_other_sign = False
        if self.known:
            (expected, score), (results, other) = expected, results
            is_other_sign = bool((score < 0) != (other < 0)) and abs(score) > MOST_MOVED
            is_other_sign = is_other_sign and not self._rounding_decides(score, pixels)
        # The cost of a label that flips is twice its distance from one half.
        lost = self.task.cost(expected.numpy(), results.numpy()).max() / (1 + self.config.task.has_several_classes)
        difference = self.task.difference(expected.numpy(), results.numpy())
        return Difference(difference, bool(lost > self.task.most_difference), is_other_sign)

    def _rounding_decides(self, score: Tensor, pixels: np.ndarray) -> bool:
        """Return whether the score of an image depends on its rounding, as with few validation images, all alike."""
        image = self._prepared(pixels)
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
        _, again = self.graph.answer(image * (1 + LIKE_ROUNDING * noise))
        return not abs(again - score) <= MOST_MOVED  # true for NaN too


def drawn_photos() -> Iterator[np.ndarray]:
    """Yield noise, with noise as its opacity, ramps and thin lines. Their pixels depend most on the exact resize."""
    rng = np.random.default_rng(0)
    for height, width in SHAPES:
        ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] // [1, 2, 3]
        for pixels in (rng.integers(0, 256, (height, width, 4)), ramp % 256, ramp % 7 // 6 * 255):
            yield pixels.astype(np.uint8)


def draw(images: ImageSet, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield up to `most` readable images, drawn by a seed, with their indices."""
    for index in np.random.default_rng(0).permutation(len(images))[:most].tolist():
        with contextlib.suppress(ImageReadError):
            yield index, images.read(index)


def read_photo(image: Image.Image, is_turned: bool) -> np.ndarray:
    """Return an opened image file as a photo, uint8 [H, W, 4], with the code of docs/exporting.md."""
    if is_turned:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    return np.array(image.convert("RGBA"))
