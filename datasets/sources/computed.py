"""The computed data sets, which have no files: `synthetic` and `fractals`."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from configs.schema import Config
from configs.tables import import_named
from datasets.order import Piece
from datasets.pixels import Pixels, pixels_of
from datasets.pixels.decode import to_array
from datasets.transforms.crop import BySize
from datasets.types import Batch, ImageSet

# --- synthetic: random images that are already on the device, to measure everything but data loading ---

SYNTHETIC_CLASSES = 1000  # by default


class SyntheticImages(ImageSet):
    """A set of random targets without images. SyntheticBatches makes the images."""

    in_memory = names_are_numbers = True

    def makes_batches(self, config: Config, batch_size: int, rank: int, device: torch.device) -> Callable:
        return SyntheticBatches(config, self, batch_size, rank, device)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"


class SyntheticBatches:
    """Random images for one batch, kept on the device. Every batch is a slice of them, without a copy or waiting."""

    def __init__(self, config: Config, image_set: ImageSet, batch_size: int, rank: int, device: torch.device):
        rng = np.random.default_rng([config.SEED, rank])
        count = min(batch_size, len(image_set))
        side, self.sides = config.largest_train_side, BySize(config, lambda sized: sized.DATA.IMAGE_SIZE)
        shape = (count, side, side, config.DATA.IMAGE_CHANNELS)
        if pixels_of(config.DATA).dtype_in_batch == torch.uint8:
            pixels = rng.integers(256, size=shape, dtype=np.uint8)
        else:
            pixels = rng.random(shape, dtype=np.float32)  # the limits of DATA.RANGE are 0 and 1 in a batch
        self.images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
        self.targets = image_set.meaning.batch(image_set.targets[:count], len(image_set.classes)).to(device)

    def __call__(self, pieces: Iterable[Piece]) -> Iterator[Batch]:
        for piece in pieces:
            count, side = len(piece.indices), self.sides.at(piece.epoch)
            yield Batch(self.images[:count, :, :side, :side], self.targets[:count], piece.num_samples, [], piece)


def read_synthetic(config: Config, *_: object) -> tuple[ImageSet, ImageSet]:
    """Return a training and a validation set with the same targets."""
    images = invent(config)
    return images, copy(images)


def invent(config: Config) -> ImageSet:
    """Return SYNTHETIC_SIZE random images. They are finished: their targets are class numbers or standardized numbers."""
    num_classes = config.MODEL.NUM_CLASSES or SYNTHETIC_CLASSES
    targets = np.random.default_rng(config.SEED).integers(num_classes, size=config.DATA.SYNTHETIC_SIZE)
    images = SyntheticImages(targets, [str(number) for number in range(num_classes)])
    return images.with_facts(
        meaning=import_named("datasets", config.task.targets).invent(num_classes),
        split={"rule": "none", "training": "synthetic", "validation": "synthetic"},
    )


# --- fractals: images of iterated function systems, computed when they are read ---

# A class is a system of contracting affine maps, and its images show the attractor of the system. Two of every three
# classes show lines: a fractal curve along each side of a polyline, open or closed. The third shows a cloud of points.
# Images of a class differ slightly in all numbers of the system, and in place, size, slant, thickness and colours.
# Pretraining on such classes: FractalDB (arXiv:2101.08515); bounds on the singular values: arXiv:2110.03091.
#
# An image depends only on its class and number, and is the same on every machine: it is computed from numpy's raw bits
# by sums, products and square roots of single numbers, which IEEE 754 rounds in the same way everywhere.

SIDE = 32  # pixels
FRACTAL_CLASSES = 200  # by default
SEED = 20260  # the same for all classes
MAX_POINTS = 600  # the most points of an attractor
FILLED = (0.08, 0.45)  # smallest and largest fraction of the pixels that a class may draw
ATTEMPTS = 100  # the most random systems that are tried for each class
NUMBERS = 32  # how many random numbers define a system
STYLE = 17  # how many random numbers define an image's place, size, slant, thickness and colours
CHANGE = 0.1  # how much a system's numbers may change from image to image


class System(NamedTuple):
    """The numbers from which the maps of a class are made. Each picture of the class changes them slightly."""

    num_maps: int
    num_sides: int  # number of sides of the polyline that the curve follows; 0 draws a cloud of points instead
    is_closed: bool
    numbers: np.ndarray  # float64, from -1 to 1


class Fractals(ImageSet):
    """Images of fractals. Image i shows class i modulo the number of classes."""

    in_memory = names_are_numbers = True

    def __init__(self, count: int, num_classes: int, part: int, pixels: Pixels):
        """`part`: 0 for training, 1 for validation images, which are other pictures of the same classes."""
        super().__init__(
            np.arange(count, dtype=np.int64) % num_classes, [f"fractal {each}" for each in range(num_classes)]
        )
        self.num_classes, self.part, self.pixels = num_classes, part, pixels
        self.systems: dict[int, System] = {}

    def name(self, index: int) -> str:
        return f"fractal image {self.row(index)}"

    def table_name(self, index: int) -> str:
        return f"fractals {('training', 'validation')[self.part]} image #{self.row(index)}"

    def read(self, index: int) -> np.ndarray:
        row = self.row(index)
        number = row % self.num_classes  # not the target, which DATA.CLASSES may have changed
        system = self.systems.get(number)
        if system is None:
            system = self.systems[number] = find_system(number)
        draws = random_numbers(STYLE + NUMBERS, number, 1 + self.part, row)
        return to_array(Image.fromarray(picture(system, draws)), self.pixels)


def read_fractals(config: Config, *_: object) -> tuple[ImageSet, ImageSet]:
    """Return SYNTHETIC_SIZE training images and a tenth as many validation images, at least one of each class."""
    data = config.DATA
    num_classes = config.MODEL.NUM_CLASSES or FRACTAL_CLASSES
    counts = data.SYNTHETIC_SIZE, max(data.SYNTHETIC_SIZE // 10, num_classes)
    train, val = (Fractals(count, num_classes, part, pixels_of(data)) for part, count in enumerate(counts))
    split = {"rule": "none", "training": "fractals", "validation": "fractals, other pictures"}
    return train.with_facts(split=split), val.with_facts(split=split)


def find_system(number: int) -> System:
    """Return the system of a class: the first of a random series that fills neither too few nor too many pixels."""
    for attempt in range(ATTEMPTS):
        draws = random_numbers(3 + NUMBERS, number, 0, attempt)
        first, second, third, numbers = *(draws[:3] + 1) / 2, draws[3:]
        if number % 3 == 2:
            system = System(2 + int(3 * first), 0, False, numbers)
        else:
            system = System(2 + int(2 * first), 1 + int(5 * second), third > 0.5, numbers)
        filled = (drawn(points_of(system, numbers)) > 0).mean()
        if FILLED[0] <= filled <= FILLED[1]:
            break
    return system


def points_of(system: System, numbers: np.ndarray) -> np.ndarray:
    """Return float64 [2, points]: the points of the attractor, or of the curves along the polyline."""
    if not system.num_sides:
        return attractor(cloud_maps(system.num_maps, numbers))
    curve = attractor(curve_maps(system.num_maps, numbers))
    corners = numbers[-2 * (system.num_sides + 1) :].reshape(-1, 2)
    if system.is_closed and system.num_sides > 2:
        corners = np.concatenate([corners, corners[:1]])
    sides = np.diff(corners, axis=0)
    maps = np.stack([sides[:, 0], -sides[:, 1], corners[:-1, 0], sides[:, 1], sides[:, 0], corners[:-1, 1]], axis=1)
    return applied(maps, curve)


def curve_maps(num_maps: int, numbers: np.ndarray) -> np.ndarray:
    """Return float64 [maps, 6]: maps from the segment (0, 0)-(1, 0) to the sides of a polyline with the same ends."""
    right, up, turn, shear = numbers[: 4 * num_maps].reshape(4, num_maps)
    ends = np.zeros((num_maps + 1, 2))
    ends[1:, 0] = (np.arange(num_maps) + 1 + 0.4 * right) / num_maps
    ends[1:, 1] = (0.48 if num_maps == 2 else 0.3) * up  # no piece is as long as the segment, so all maps contract
    ends[-1] = 1, 0
    along = np.diff(ends, axis=0)
    # The direction across the segment is rotated or reflected, squeezed and sheared.
    across = 0.8 * turn[:, None] * np.stack([-along[:, 1], along[:, 0]], axis=1) + 0.2 * shear[:, None] * along
    return np.stack([along[:, 0], across[:, 0], ends[:-1, 0], along[:, 1], across[:, 1], ends[:-1, 1]], axis=1)


def cloud_maps(num_maps: int, numbers: np.ndarray) -> np.ndarray:
    """Return float64 [maps, 6]: maps (rotation, scaling, rotation), scaled so that the result just fills an image."""
    draws = numbers[: 8 * num_maps].reshape(num_maps, 8)
    first, second = rotations(draws[:, 0:2]), rotations(draws[:, 2:4])
    # arXiv:2110.03091: larger + 2 x smaller singular value, summed over the maps, is (5 + maps) / 2 to (6 + maps) / 2.
    larger = 0.6 + 0.25 * draws[:, 4]
    smaller = larger * (0.55 + 0.45 * draws[:, 5])
    factor = ((5.5 + num_maps) / 2) / sum(larger + 2 * smaller)
    larger, smaller = np.minimum(larger * factor, 0.9), np.minimum(smaller * factor, 0.9)
    (cos, sin), (cos2, sin2) = first, second
    return np.stack(
        [
            cos * larger * cos2 - sin * smaller * sin2,
            -(cos * larger * sin2) - sin * smaller * cos2,
            draws[:, 6],
            sin * larger * cos2 + cos * smaller * sin2,
            cos * smaller * cos2 - sin * larger * sin2,
            draws[:, 7],
        ],
        axis=1,
    )


def rotations(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of each pair's direction, computed without functions that machines round differently."""
    length = np.sqrt(pairs[:, 0] * pairs[:, 0] + pairs[:, 1] * pairs[:, 1]) + 1e-9
    return pairs[:, 0] / length, pairs[:, 1] / length


def attractor(maps: np.ndarray) -> np.ndarray:
    """Return float64 [2, points]: the origin after each sequence of maps of one length, all near the attractor."""
    points = np.zeros((2, 1))
    while points.shape[1] * len(maps) <= MAX_POINTS:
        points = applied(maps, points)
    return points


def applied(maps: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return float64 [2, maps x points]: each point after each map."""
    x, y = points
    a, b, e, c, d, f = (column[:, None] for column in maps.T)
    return np.stack([(a * x + b * y + e).ravel(), (c * x + d * y + f).ravel()])


def drawn(points: np.ndarray, place: np.ndarray | None = None) -> np.ndarray:
    """Return int64 [SIDE, SIDE]: how many points fall into each pixel after scaling and after applying `place`."""
    low, high = points.min(axis=1), points.max(axis=1)
    middle, extent = (low + high) / 2, max(*(high - low), 1e-9)
    x, y = (points - middle[:, None]) / extent  # from -0.5 to 0.5
    if place is not None:
        a, b, e, c, d, f = place
        x, y = a * x + b * y + e, c * x + d * y + f
    column, row = (np.floor((each * 0.8 + 0.5) * SIDE).astype(np.int64) for each in (x, y))
    inside = (column >= 0) & (column < SIDE) & (row >= 0) & (row < SIDE)
    return np.bincount((row * SIDE + column)[inside], minlength=SIDE * SIDE).reshape(SIDE, SIDE)


def picture(system: System, draws: np.ndarray) -> np.ndarray:
    """Return uint8 [SIDE, SIDE, 3]: one image of the class. `draws`: float64, from -1 to 1."""
    style, changes = draws[:STYLE], draws[STYLE:]
    size = 1 + 0.25 * style[0]
    slant = 0.2 * style[1:5]
    place = [size + slant[0], slant[1], 0.12 * style[5], slant[2], size + slant[3], 0.12 * style[6]]
    counts = drawn(points_of(system, system.numbers + CHANGE * changes), np.array(place))
    ink = np.minimum(counts, 1) * 255
    for _ in range(int((style[7] + 1) * 2)):
        ink = np.minimum(2 * smoothed(ink), 255)
    paper, pen = 40 + 40 * style[8:11], 215 + 40 * style[11:14]
    if style[14] > 0:  # a grey image
        paper, pen = np.full(3, paper[0] - 40 if style[15] > 0 else paper[0]), np.full(3, pen[0])
    if style[16] > 0.5:
        paper, pen = pen, paper
    paper, pen = (np.clip(each, 0, 255).astype(np.int64) for each in (paper, pen))
    return (paper + (pen - paper) * ink[:, :, None] // 255).astype(np.uint8)


def smoothed(pixels: np.ndarray) -> np.ndarray:
    """Return the integer mean of each pixel and its neighbours, with weights 1, 2, 1 in both directions."""
    for axis in (0, 1):
        padded = np.pad(pixels, [(1, 1) if axis == each else (0, 0) for each in (0, 1)])
        before, after = (padded[:-2], padded[2:]) if axis == 0 else (padded[:, :-2], padded[:, 2:])
        pixels = before + 2 * pixels + after
    return pixels // 16


def random_numbers(count: int, *seeds: int) -> np.ndarray:
    """Return float64 from -1 to 1, computed from raw bits, because only these are equal in every version of numpy."""
    raw = np.random.PCG64(np.random.SeedSequence((SEED, *seeds, 1))).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) / 2**52 - 1
