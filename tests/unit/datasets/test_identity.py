"""Which images are the same: equal pixels and near copies are, images that differ in a small object are not."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image, ImageDraw

from datasets.copies import copies_in_training
from datasets.identity import ImageContents, digest
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError


class Images:
    """Images in memory, given as arrays. None cannot be read."""

    pixels = Pixels(3)

    def __init__(self, images):
        self.images, self.num_reads = images, 0

    def read(self, index: int) -> np.ndarray:
        self.num_reads += 1
        if self.images[index] is None:
            raise ImageReadError("damaged")
        return self.images[index]


def groups_of(images: list) -> list[dict[int, int]]:
    image_set = Images([None if each is None else np.atleast_3d(np.asarray(each)) for each in images])
    contents = ImageContents(len(images), lambda number: (image_set, number))
    for number, each in enumerate(image_set.images):
        if each is not None:
            contents.add(number, each)
    return contents.groups()


def scene(seed: int, size=(320, 240), details: int = 14) -> Image.Image:
    """Draw a picture with soft patches of colour and some objects with sharp edges."""
    rng = np.random.default_rng(seed)
    patches = Image.fromarray(rng.integers(256, size=(6, 8, 3), dtype=np.uint8))
    image = patches.resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(details):
        x, y, wide, high = (rng.random(4) * [*size, size[0] / 4, size[1] / 4]).tolist()
        draw.ellipse((x, y, x + wide, y + high), fill=tuple(rng.integers(256, size=3).tolist()))
    return image


def camera(count: int, noise: float, contrast: int = 60) -> list[np.ndarray]:
    """Return images of one scene in which a disc of 6% of the width is each time at another place."""
    rng, background = np.random.default_rng(0), np.asarray(scene(0, details=0), np.float64)
    places = rng.permutation([*itertools.product(range(30, 210, 20), range(30, 290, 20))])[:count]
    images = []
    y, x = np.mgrid[:240, :320]
    for row, column in places.tolist():
        is_disc = np.hypot(y - row, x - column)[..., None] < 10
        disc = np.where(background[row, column] > 128, -contrast, contrast)
        pixels = background + is_disc * disc + rng.normal(0, noise, background.shape)
        images.append(pixels.clip(0, 255).astype(np.uint8))
    return images


def saved_again(image: Image.Image, quality: int = 50) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def cropped(image: Image.Image, left: int, top: int, right: int, bottom: int) -> Image.Image:
    return image.crop((left, top, image.width - right, image.height - bottom))


NEAR_COPIES = {
    "saved again": saved_again,
    "half size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "other shape": lambda image: image.resize((224, 224)),
    "cropped at two sides": lambda image: cropped(image, 7, 5, 0, 0),
    "cropped at four sides": lambda image: cropped(image, 5, 4, 6, 5),
    "cropped, smaller and saved again": lambda image: saved_again(cropped(image, 6, 0, 0, 5).resize((200, 150)), 80),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", NEAR_COPIES)
def test_near_copies_of_different_scenes_are_found(kind):
    scenes = [scene(seed) for seed in range(20)]
    groups = groups_of([*scenes, *map(NEAR_COPIES[kind], scenes)])
    assert [sorted(group) for group in groups] == [[number, number + 20] for number in range(20)]
    assert all(group[number] == number for group in groups for number in group), "no pixels are equal"


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "count"), [(15, 40), *(pytest.param(each, 20, marks=pytest.mark.slow) for each in (0, 5))]
)
def test_images_of_a_fixed_camera_with_a_moving_object_are_different(noise, count):
    assert groups_of(camera(count, noise)) == []


@pytest.mark.long
def test_images_of_a_fixed_camera_with_slight_noise_only_are_the_same():
    still = camera(1, 0)[0].astype(int)
    images = [still + np.random.default_rng(seed).normal(0, 3, still.shape).round().astype(int) for seed in range(12)]
    (group,) = groups_of([each.clip(0, 255).astype(np.uint8) for each in images])
    assert len(group) == 12, "more copies than an image has candidates"


@pytest.mark.long
def test_group_in_two_clusters_of_copies_is_joined():
    """The candidates of an image are the others of its cluster, because these are more similar to it."""
    whole, images = np.asarray(scene(0)), []
    for part in (whole, np.asarray(cropped(scene(0), 7, 5, 0, 0))):
        for seed in range(8):
            noise = np.random.default_rng(seed).normal(0, 2, part.shape)
            images.append((part + noise).clip(0, 255).astype(np.uint8))
    assert [len(group) for group in groups_of(images)] == [16]


def cell(crack: int | None, seed: int = 0, noise: float = 3) -> Image.Image:
    """Draw a grey cell with two dark lines, noise and a thin, faint crack at this column."""
    grey = np.full((300, 300), 180) + np.random.default_rng(seed).normal(0, noise, (300, 300))
    grey[:, :12] = grey[90:96] = grey[200:206] = 30
    if crack:
        grey[110:190, crack : crack + 3] -= 35
    return Image.fromarray(grey.clip(0, 255).astype(np.uint8))


@pytest.mark.slow
def test_plain_images_that_differ_in_a_thin_crack_are_different():
    images = [cell(crack) for crack in (None, 60, 130, 250)]
    assert groups_of(images) == []
    copies = [saved_again(each).convert("L") for each in images]
    assert [sorted(group) for group in groups_of([*images, *copies])] == [[n, n + 4] for n in range(4)]


def test_cells_that_differ_only_in_clear_noise_are_different():
    cells = [cell(None, seed, noise=5) for seed in range(2)]
    assert groups_of(cells) == []
    copies = [each.resize((150, 150)) for each in cells]
    assert [sorted(group) for group in groups_of([*cells, *copies])] == [[0, 2], [1, 3]]


@pytest.mark.slow
def test_crop_without_the_black_frame_of_its_image_is_found():
    images = []
    for seed in range(20):
        patches = Image.fromarray(np.random.default_rng(seed).integers(120, 230, size=(6, 8), dtype=np.uint8))
        images.append(Image.new("L", (300, 300)))
        images[-1].paste(patches.resize((292, 292), Image.Resampling.BICUBIC), (4, 4))
    crops = [cropped(each, 6, 6, 0, 0) for each in images]
    assert [sorted(group) for group in groups_of([*images, *crops])] == [[n, n + 20] for n in range(20)]


def test_drawings_that_differ_in_a_sign_are_different():
    images = []
    for sign in "0123456789":
        key = Image.new("RGB", (128, 128), "white")
        ImageDraw.Draw(key).rounded_rectangle((4, 4, 124, 124), 12, fill=(70, 120, 150))
        ImageDraw.Draw(key).text((45, 30), sign, fill="white", font_size=60)
        images.append(key)
    assert groups_of(images) == []


def test_other_colour_is_another_image():
    image = np.asarray(scene(3))
    assert groups_of([image, image[:, :, ::-1]]) == []


def test_equal_pixels_are_told_from_near_copies():
    image, grey = scene(1), scene(2).convert("L")
    groups = groups_of([image, grey, saved_again(image), image, grey])
    assert groups == [{0: 0, 2: 2, 3: 0}, {1: 1, 4: 1}]


def test_plain_images_are_the_same_only_with_equal_pixels():
    images = [np.full((40, 40, 3), level, np.uint8) for level in (0, 1, 255, 0)]
    assert groups_of(images) == [{0: 0, 3: 0}]


def test_unreadable_images_are_in_no_group():
    assert groups_of([None, scene(1), None, scene(1)]) == [{1: 1, 3: 1}]
    assert groups_of([]) == groups_of([None, None]) == []


def test_few_images_are_read_again_to_compare_them():
    image_set = Images([np.asarray(scene(seed)) for seed in range(60)] + [np.asarray(saved_again(scene(0)))])
    contents = ImageContents(61, lambda number: (image_set, number))
    contents.read()
    image_set.num_reads = 0
    assert [sorted(group) for group in contents.groups()] == [[0, 60]]
    assert image_set.num_reads < 10


def test_digest_depends_on_shape_and_every_pixel():
    image = np.zeros((6, 8, 3), np.uint8)
    other = image.copy()
    other[1, 1, 1] = 1
    assert digest(image) == digest(image.copy()) == digest(np.asfortranarray(image))
    assert len({digest(image), digest(other), digest(image.reshape(8, 6, 3)), digest(image[:, :, :1])}) == 4


def test_copy_in_training_is_an_equal_image_if_there_is_one():
    assert copies_in_training({0: 0, 1: 1, 5: 1, 6: 6}, lambda number: number >= 5) == [(5, 1), (6, 0)]
