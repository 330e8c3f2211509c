"""Defines which images are the same: those with equal pixels, and near copies (saved again, resized, slightly cropped).

Near copies are found in two steps. The first compares all images as tiny pictures, and gives a few candidates for each.
The second aligns the two images of a pair and compares them area by area, so an object that only one of them shows
makes them different images.
"""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from hashlib import blake2b

import numpy as np
from PIL import Image

from datasets.bad_images import BadImages
from datasets.image_set import ImageSet
from datasets.neighbours import nearest
from datasets.passes import read_each
from datasets.pixels.rules import ImageReadError

NUM_THUMBNAILS = 1_000  # in memory; 110 KB each
# The candidates. Two tiny pictures are compared by low frequencies: WAVES of their brightness, and COLOUR_WAVES of two
# colour differences. The distance of near copies is at most SHARE of their contrast (the largest of 300 measured:
# 0.342).
SIDE = 16  # pixels of a tiny picture
EDGE = 1  # pixels of each side that are left out: a narrow frame that a cropped copy lacks would change them most
WAVES = [(down, right) for down in range(4) for right in range(4 - down)]
COLOUR_WAVES = [(0, 0), (0, 1), (1, 0)]
SHARE = 0.35
LEAST_CONTRAST = 32.0  # images with less contrast are nearly plain: they are the same only if their pixels are equal
NUM_CANDIDATES = 4  # for each image
PICTURES_AT_ONCE = 256  # tiny pictures whose features are computed at once, so that they stay in the cache
# The comparison, from the tiny pictures to the images themselves. A round: pixels on each side, steps of the alignment,
# pixels on each side of an area, and the largest difference of near copies. The difference of two areas is the
# difference of their mean colours, in units of NOISE levels (of 255) plus DETAIL times the contrast inside them,
# because saving and resizing change details most. In the last round, 99% of 300 near copies differ by at most 0.83.
# Different emoji differ by 1.3, and so do two images of a fixed camera if a disc of 6% of the width has moved. Small
# differences: in the last round, also the brightness of areas is compared, with a unit for the details of this image:
# FINE_NOISE plus FINE_DETAIL times the contrast inside the area plus WHOLE_DETAIL times the mean of these contrasts. So
# a thin crack makes two plain images different, and the changes that JPEG makes to a detailed image do not.
# BENCHMARKS.md, "Copies". Noise: a copy has the noise of its original, and another photo of the same scene has its own.
# The noise is the difference of pixels from the means of 3 x 3, in the plainest areas. It is judged only if it is even,
# unlike the edges of a drawing (its standard deviation is 1.48 times the median), and equally strong in both images.
# OTHER_NOISE: levels of it that are not shared.
TINY_ROUNDS = ((SIDE, 2, 2, 4.0),)
ROUNDS = ((32, 2, 2, 3.0), (128, 1, 6, 1.0))
FINE_NOISE, FINE_DETAIL, WHOLE_DETAIL = 2.5, 0.32, 0.21
PLAIN_SHARE, MOST_TAILED, MOST_STRONGER, OTHER_NOISE = 0.25, 1.7, 1.3, 0.53
BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)  # JPEG changes the colours more
THUMBNAIL = 192  # pixels on each side of the images that are compared, at most
NOISE, DETAIL = 15.0, 0.375
MOST_CROPPED = 0.04  # of each side
FEW_LEVELS = 8.0  # the alignment gives larger differences less weight

# Limits of the search for copies before a split. Reading takes as long as in one epoch: on two cores, 5,000 small
# images take 7 s, and 2 GiB of photos 20 s. Of the images that look alike, the most similar pairs are compared, which
# takes 5 to 30 ms for each pair.
MOST_BYTES, MOST_PAIRS = 2**31, 1_000

Group = dict[int, int]  # {image: the first image with equal pixels} of the images of a group


def search_for_copies(image_set: ImageSet) -> np.ndarray | None:
    """Return int64 [N], equal for copies of each other, or None if the set is too large.

    Copies on both sides of a split make the scores too good, so a small set is searched for them before it is divided.
    """
    count = len(image_set)
    if count < 2 or sum(image_set.storage.file_sizes(range(count))) > MOST_BYTES:
        return None
    searched = replace(image_set, pixels=image_set.look_into(False)[0])
    contents = ImageContents(count, lambda number: (searched, number))
    contents.read(say=lambda line: None)  # the run reports unreadable images
    copies = np.arange(count)
    for group in contents.groups(MOST_PAIRS):
        copies[[*group]] = min(group)
    return copies


def digest(pixels: np.ndarray, num_bytes: int = 0) -> int:
    """Return a 64-bit hash, never 0, of the shape and the bytes of an image.

    `num_bytes`: hash about as many bytes only.
    """
    flat = pixels.reshape(-1)
    flat = np.ascontiguousarray(flat[:: max(1, flat.size // num_bytes)] if num_bytes else flat)
    return int.from_bytes(blake2b(flat, digest_size=8, key=repr(pixels.shape).encode()).digest(), "little") | 1


class ImageContents:
    """The digest and a tiny picture of each image, for finding the same images. A temporary file holds the pictures."""

    def __init__(self, count: int, find: Callable[[int], tuple[ImageSet, int]]):
        """`find(number)` returns the set and the index of an image, to read it."""
        self.find, self._thumbnail = find, lru_cache(NUM_THUMBNAILS)(self._read_thumbnail)
        self._target_names = cache(ImageSet.target_names)
        self.digests = np.zeros(count, np.uint64)  # 0: unreadable
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (stays open as long as the pictures are used)
        shape = (count, SIDE, SIDE, 3)
        self._pictures = np.memmap(self._file, np.uint8, "w+", shape=shape) if count else np.zeros(shape, np.uint8)

    def name(self, number: int) -> str:
        image_set, index = self.find(number)
        return image_set.name(index)

    def target(self, number: int) -> str:
        """Return the target of an image as text."""
        image_set, index = self.find(number)
        return self._target_names(image_set)[image_set.targets[index]]

    def add(self, number: int, pixels: np.ndarray) -> None:
        self.digests[number] = digest(pixels)
        picture = self.find(number)[0].pixels.shown(pixels)
        self._pictures[number] = as_image(picture).resize((SIDE, SIDE), Image.Resampling.BOX)

    def read(self, say: Callable[[str], None] = print) -> None:
        """Read and add all images, with a progress bar. Report unreadable images as a run does."""
        bad = defaultdict(list)
        for number, error in read_each(range(len(self.digests)), self._read, "reading images"):
            if error:
                part, index = self.find(number)
                bad[part].append(index)
        for part, indices in bad.items():
            BadImages(part, 1.0, say).note(indices)

    def _read(self, number: int) -> None:
        part, index = self.find(number)
        self.add(number, part.read(index))

    def groups(self, most_pairs: int | None = None) -> list[Group]:
        """Return the groups of images that are the same as another image of the group.

        `most_pairs`: compare only so many pairs of images with other pixels, the most similar ones.
        """
        first_of: dict[int, int] = {}
        firsts = [first_of.setdefault(each, n) if each else n for n, each in enumerate(self.digests.tolist())]
        leader = list(firsts)  # an image of the same group

        def leader_of(number: int) -> int:
            while leader[number] != number:
                leader[number] = leader[leader[number]]  # shortens the way for the next search
                number = leader[number]
            return number

        leaders, compared = np.array([*first_of.values()], np.int64), set()
        # An image has few candidates, so one group may be found in parts. Comparing the leaders again joins the parts.
        while pairs := self._next_pairs(leaders, compared, most_pairs):
            compared.update(pairs)
            pairs = [pair for pair in pairs if self._are_alike(pair)]  # threads would wait for each other
            with ThreadPoolExecutor() as pool:
                for pair, is_near in zip(pairs, pool.map(self._are_near, pairs), strict=True):
                    if is_near:
                        one, other = sorted(map(leader_of, pair))
                        leader[other] = one
            leaders = np.unique([leader_of(number) for number in leaders.tolist()])
        groups: dict[int, Group] = defaultdict(dict)
        for number, first in enumerate(firsts):
            groups[leader_of(number)][number] = first
        return [group for group in groups.values() if len(group) > 1]

    def _next_pairs(self, numbers: np.ndarray, compared: set, most_pairs: int | None) -> list[tuple[int, int]]:
        """Return the candidates that have not been compared, sorted."""
        distances = self.candidates(numbers)
        pairs = sorted(distances.keys() - compared)
        if most_pairs is not None:
            pairs = sorted(sorted(pairs, key=distances.get)[: max(most_pairs - len(compared), 0)])
        return pairs

    def candidates(self, numbers: np.ndarray) -> dict[tuple[int, int], float]:
        """Return the pairs of images that may be near copies: the NUM_CANDIDATES nearest of each image, or a few more.

        The values are squared distances, relative to the limit.
        """
        features, contrasts = self._features(numbers)
        # If both images of a pair find each other, the limit of the later one counts. Of equally near images, the first
        # ones are candidates. The order is that of the feature that varies most.
        column = features.var(0).argmax() if len(numbers) else 0
        order = np.flatnonzero(contrasts >= LEAST_CONTRAST)
        order = order[np.argsort(features[order, column], kind="stable")]
        features, limits, numbers = features[order], SHARE * contrasts[order], numbers[order]
        rows, others, squares = nearest(features, limits, NUM_CANDIDATES + 1, "comparing images")  # one is the image
        is_pair = rows != others
        rows, others, squares = rows[is_pair], others[is_pair], squares[is_pair]
        pairs = np.sort(np.stack([numbers[rows], numbers[others]], 1), 1)
        return dict(zip(map(tuple, pairs.tolist()), (squares / limits[rows] ** 2).tolist(), strict=True))

    def _features(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the features of images, float32 [n, D], and their contrasts: the distances from plain pictures."""
        side = SIDE - 2 * EDGE
        places = np.pi * (2 * np.arange(side) + 1) / (2 * side)
        waves = np.cos(np.arange(4)[:, None] * places) * np.sqrt(2 / side)
        waves[0] /= np.sqrt(2)
        channels = [(0, *wave) for wave in WAVES] + [(colour, *wave) for colour in (1, 2) for wave in COLOUR_WAVES]
        features = np.empty((len(numbers), len(channels)), np.float32)
        contrasts = np.empty(len(numbers), np.float32)
        for start in range(0, len(numbers), PICTURES_AT_ONCE):
            block = slice(start, start + PICTURES_AT_ONCE)
            pictures = self._pictures[numbers[block], EDGE : SIDE - EDGE, EDGE : SIDE - EDGE].astype(np.float32)
            red, green, blue = np.moveaxis(pictures, 3, 0)
            planes = np.stack([(red + green + blue) / 3, red - green, blue - green])
            strengths = waves @ planes @ waves.T
            features[block] = np.stack([strengths[channel, :, down, right] for channel, down, right in channels], 1)
            differences = pictures - np.einsum("nyxc->nc", pictures)[:, None, None] / side**2
            contrasts[block] = np.sqrt((differences**2).reshape(len(pictures), -1).sum(1) / 3)
        return features, contrasts

    def _are_alike(self, pair: tuple[int, int]) -> bool:
        """Return whether the tiny pictures are near copies."""
        return are_near(*(Image.fromarray(np.array(self._pictures[number])) for number in pair), TINY_ROUNDS)

    def _are_near(self, pair: tuple[int, int]) -> bool:
        """Return whether the images are near copies. This reads them."""
        try:
            return are_near(*map(self._thumbnail, pair), ROUNDS)
        except ImageReadError:
            return False

    def _read_thumbnail(self, number: int) -> Image.Image:
        part, index = self.find(number)
        image = as_image(part.pixels.shown(part.read(index)))
        return image.resize([min(each, THUMBNAIL) for each in image.size], Image.Resampling.BILINEAR)


def as_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0]).convert("RGB")


def are_near(one: Image.Image, other: Image.Image, rounds: Sequence[tuple[int, int, int, float]]) -> bool:
    """Return whether two RGB images are near copies."""
    place = np.array([[0.0, 1.0], [0.0, 1.0]])
    for side, steps, area, limit in rounds:
        size = [min(side, *sides) for sides in zip(one.size, other.size, strict=True)]
        for _ in range(steps):
            place = better_place(place, *(part.mean(2) for part in common_parts(one, other, place, size)))
        parts = common_parts(one, other, place, size)
        if largest_difference(*parts, area) > limit:
            return False
    return rounds is TINY_ROUNDS or not (largest_fine_difference(*parts, area) > 1 or have_other_noise(*parts))


def common_parts(one: Image.Image, other: Image.Image, place: np.ndarray, size: Sequence[int]) -> list[np.ndarray]:
    """Return the part that both images show as float32 [H, W, 3] of this size.

    `place`: [(start, scale) of x, (start, scale) of y]. Both images are 1 wide and high, and the point p of `other` is
    the point start + scale * p of `one`.
    """
    start, scale = place.T
    box = np.array([np.maximum(0, -start / scale), np.minimum(1, (1 - start) / scale)])
    boxes = (np.clip(start + scale * box, 0, 1), box)
    return [
        np.asarray(image.resize(size, Image.Resampling.BILINEAR, (part * image.size).ravel().tolist()), np.float32)
        for image, part in zip((one, other), boxes, strict=True)
    ]


def better_place(place: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the place after a Gauss-Newton step that makes these common parts, float32 [H, W], more alike."""
    height, width = one.shape
    down, right = np.gradient((one + other) / 2)
    down, right = down * height, right * width
    y, x = (np.arange(height)[:, None] + 0.5) / height, (np.arange(width) + 0.5) / width
    slopes = np.stack([right, right * x, down, down * y], -1).reshape(-1, 4)
    missing = (other - one).ravel()
    weighted = slopes / np.maximum(np.abs(missing), FEW_LEVELS)[:, None]
    squares = weighted.T @ slopes
    squares += np.eye(4) * (1e-3 * np.trace(squares) / 4 + 1e-9)  # plain images have no slopes
    starts, scales = (place + np.linalg.solve(squares, weighted.T @ missing).reshape(2, 2)).T
    starts, ends = np.clip([starts, starts + scales - 1], -MOST_CROPPED, MOST_CROPPED)
    return np.stack([starts, 1 + ends - starts], 1)


def largest_difference(one: np.ndarray, other: np.ndarray, area: int) -> float:
    """Return the largest difference between areas of two images, float32 [H, W, 3]. ROUNDS describes it."""
    differences, details = compare_areas(one, other, area)
    return float((differences.max(2) / (NOISE + DETAIL * details.max(2))).max())


def largest_fine_difference(one: np.ndarray, other: np.ndarray, area: int) -> float:
    """Return the largest difference in brightness between areas of two images. FINE_NOISE describes it."""
    differences, details = compare_areas(one @ BRIGHTNESS, other @ BRIGHTNESS, area)
    return float((differences / (FINE_NOISE + FINE_DETAIL * details + WHOLE_DETAIL * details.mean())).max())


def have_other_noise(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two images have equally strong noise, but not the same noise. OTHER_NOISE describes it."""
    greys = [each @ BRIGHTNESS for each in (one, other)]
    if min(greys[0].shape) < SIDE:
        return False
    _, details = compare_areas(*greys, 5)
    plain = details <= np.quantile(details, PLAIN_SHARE)
    noises = [(each[2:-2, 2:-2] - means_of_areas(each[1:-1, 1:-1], 3))[plain] for each in greys]
    strengths = [float(each.std()) for each in noises]
    medians = [float(np.median(np.abs(each))) for each in noises]
    if any(MOST_TAILED * median <= each for median, each in zip(medians, strengths, strict=True)):
        return False
    weaker, stronger = sorted(strengths)
    return stronger < MOST_STRONGER * weaker and (1 - np.corrcoef(*noises)[0, 1]) * weaker > OTHER_NOISE


def compare_areas(one: np.ndarray, other: np.ndarray, area: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences between the means of all areas, and the contrasts inside the areas."""
    means = [means_of_areas(each, area) for each in (one, other)]
    # The smaller contrast counts, because an object that only one image shows has none in the other.
    spreads = [means_of_areas(each**2, area) - mean**2 for each, mean in zip((one, other), means, strict=True)]
    return np.abs(means[0] - means[1]), np.sqrt(np.maximum(np.minimum(*spreads), 0))


def means_of_areas(pixels: np.ndarray, area: int) -> np.ndarray:
    """Return the means of all areas of area x area pixels."""
    height, width = (min(area, each) for each in pixels.shape[:2])
    sums = np.pad(pixels.cumsum(0, np.float64).cumsum(1), [(1, 0), (1, 0), (0, 0)][: pixels.ndim])
    sums = sums[height:] - sums[:-height]
    return (sums[:, width:] - sums[:, :-width]) / (height * width)
