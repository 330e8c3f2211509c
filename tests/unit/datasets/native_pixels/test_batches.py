"""Batches of images with their files' values: resizing, crops, jitter, erasing, mixing, normalization and pictures."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import Normalize, build_preparation
from datasets.pixels.kinds import pixels_of
from datasets.pixels.native.floats import Jitter, shrunk
from datasets.transforms.crop import EvalTransform, TrainTransform
from tests.support.configs import replaced
from tests.support.loading import first_batch
from tests.support.native_images import CHANNELS, config_of, draw, measured, pixels, settings
from tests.support.opened import open_sets

SIDE = 16
LIMITS = (1200, 1700, 2100, 2900, 3000, 3900, 4000, 4800, 5000, 5700)  # within the values of the images


def scaled(image: np.ndarray, limits=LIMITS) -> np.ndarray:
    """Return an image from 0 to 1 between the limits, float64 [H, W, C]."""
    low, high = np.resize(np.array(limits, float).reshape(-1, 2), (image.shape[2], 2)).T
    return np.clip((image - low) / (high - low), 0, 1)


def resized(values: np.ndarray, size: tuple[int, int], kernel: str) -> np.ndarray:
    """Resize each channel [H, W, C] with Pillow to a height and width, and return [C, H, W]."""
    channels = (Image.fromarray(each.astype(np.float32)) for each in np.moveaxis(values, 2, 0))
    return np.stack([np.array(each.resize(size[::-1], Image.Resampling[kernel.upper()])) for each in channels])


# --- resizing ---


@pytest.mark.parametrize("channels", [1, 3, CHANNELS])
@pytest.mark.parametrize("size", [(16, 16), (9, 30), (50, 71), (32, 36)], ids=["down", "narrow", "up", "same"])
@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_resize_equals_pillows_for_floats_of_each_channel(kernel, size, channels):
    image, limits = pixels(channels=channels), LIMITS[: 2 * channels]
    out = torch.full((channels, *size), torch.nan)
    pixels_of(config_of(channels, limits).DATA).resize()(image, kernel, out)
    np.testing.assert_allclose(out.numpy(), resized(scaled(image, limits), size, kernel), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_shrunk_image_has_its_type_and_rounded_values(dtype):
    image = (pixels(size=(40, 60)) % 256).astype(dtype)
    found = shrunk(image, (20, 30), "bicubic")
    expected = np.moveaxis(resized(image, (20, 30), "bicubic"), 0, 2)
    if dtype != np.float32:
        expected = np.rint(expected).clip(0)
    assert found.dtype == dtype and found.shape == (20, 30, CHANNELS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 if dtype == np.float32 else 1)
    assert (found != expected).mean() < 0.01 or dtype == np.float32


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_shrunk_edges_stay_in_the_range_of_their_type(dtype):
    """Otherwise the overshoot of bicubic at the edges of white areas would wrap around to black."""
    white = np.iinfo(dtype).max
    stripes = np.broadcast_to(np.where(np.arange(60) // 15 % 2, white, 0)[None, :, None], (40, 60, 3)).astype(dtype)
    assert resized(stripes, (20, 31), "bicubic").max() > white, "there is an overshoot"
    found = shrunk(stripes, (20, 31), "bicubic").astype(float)
    expected = np.moveaxis(resized(stripes, (20, 31), "bicubic"), 0, 2).clip(0, white)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1)


# --- crops and flips ---


def transformed(image: np.ndarray, seed: int = 0, train=None, **data) -> np.ndarray:
    """Return the training image of a seed, float32 [C, side, side]."""
    out = torch.full((image.shape[2], SIDE, SIDE), torch.nan)
    config = config_of(image.shape[2], LIMITS[: 2 * image.shape[2]], train, IMAGE_SIZE=SIDE, **data)
    TrainTransform(config)(image, random.Random(seed), out)
    return out.numpy()


def test_simple_crop_is_a_shifted_reflected_image():
    image, drawn = pixels(size=(SIDE, SIDE)), set()
    padded = np.pad(np.moveaxis(scaled(image), 2, 0), ((0, 0), (4, 4), (4, 4)), mode="reflect")
    places = {(top, left): padded[:, top : top + SIDE, left : left + SIDE] for top in range(9) for left in range(9)}
    for seed in range(30):
        found = transformed(image, seed, TRAIN_CROP="simple", HFLIP=0)
        (place,) = [place for place, part in places.items() if np.allclose(found, part, atol=1e-6)]
        drawn.add(place)
    assert len(drawn) > 20 and {row for row, _ in drawn} > {0, 8}


@pytest.mark.parametrize(("mode", "level"), [("border", 0.3), ("center", 0.0)])
def test_padding_around_a_small_image_has_the_exact_level(mode, level):
    image = pixels(size=(SIDE, 2 * SIDE))
    data = config_of(IMAGE_SIZE=SIDE, CROP_MODE=mode, CROP_PCT=1.0 if mode == "border" else 2.0, limits=LIMITS).DATA
    mean = tuple(0.3 + 0.01 * channel for channel in range(CHANNELS))
    out = torch.empty(CHANNELS, SIDE, SIDE)
    EvalTransform(replaced(config_of(), DATA=vars(data) | {"IMAGENET_MEAN": mean}).DATA)(image, out)
    levels = torch.tensor(mean if mode == "border" else (0.0,) * CHANNELS)
    assert torch.equal(out[:, 0], levels[:, None].expand(CHANNELS, SIDE)) and levels[0] == np.float32(level)
    assert out[:, SIDE // 2].std() > 0.05, "the image is in the middle"


# --- jitter ---


def jittered(image: torch.Tensor, seed: int, strength: float) -> torch.Tensor:
    changed = image.clone()
    Jitter(strength)(changed, random.Random(seed))
    return changed


def orders_of_jitter(image: np.ndarray, seed: int, strength: float) -> list[np.ndarray]:
    """Return an image with the brightness and contrast of a seed, in both orders."""
    rng = random.Random(seed)
    brightness, contrast = (rng.uniform(max(0.0, 1 - strength), 1 + strength) for _ in range(2))

    def brighten(values: np.ndarray) -> np.ndarray:
        return np.clip(values * brightness, 0, 1)

    def stretch(values: np.ndarray) -> np.ndarray:
        return np.clip(values.mean() + (values - values.mean()) * contrast, 0, 1)

    return [stretch(brighten(image)), brighten(stretch(image))]


@pytest.mark.parametrize(("channels", "strength"), [(1, 0.4), (3, 3.0), (CHANNELS, 0.4)])
def test_jitter_changes_brightness_and_contrast_in_both_orders(channels, strength):
    image, found = torch.rand(channels, SIDE, SIDE, generator=torch.Generator().manual_seed(0)), []
    for seed in range(20):
        changed = jittered(image, seed, strength)
        assert torch.equal(changed, jittered(image, seed, strength)) and 0 <= changed.min() <= changed.max() <= 1
        orders = orders_of_jitter(image.numpy(), seed, strength)
        found.append([np.allclose(changed, each, atol=1e-5) for each in orders])
        assert any(found[-1])
    assert {(True, False), (False, True)} <= {*map(tuple, found)}


def test_color_jitter_of_a_run_changes_training_images_by_its_strength():
    image = pixels()
    given = {"HFLIP": 0, "CROP_SCALE": (1, 1), "CROP_RATIO": (0.01, 100)}
    plain = transformed(image, 3, **given)
    assert not np.allclose(transformed(image, 3, {"COLOR_JITTER": 0.4}, **given), plain, atol=0.01)
    np.testing.assert_array_equal(transformed(image, 3, {"COLOR_JITTER": 0.0}, **given), plain)


# --- normalization and pictures ---

MEAN, DEVIATION = (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.6, 0.7, 0.8, 0.9)


def batch_of(count: int = 3) -> torch.Tensor:
    return torch.rand(count, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


SHOWN = {(): (0, 1, 2), (4, 2, 0): (4, 2, 0)}


@pytest.mark.parametrize("rgb", SHOWN, ids=str)
def test_pictures_show_the_channels_that_are_red_green_and_blue(rgb):
    images, data = batch_of(), config_of(IMAGENET_MEAN=MEAN, IMAGENET_STD=DEVIATION, RGB=rgb).DATA
    expected, normalize = (255 * images[:, SHOWN[rgb]]).round(), Normalize(data)
    assert (normalize.pixels(normalize(images)).float() - expected).abs().max() <= 1
    assert normalize.pixels(normalize(images)).dtype == torch.uint8
    pictures = pixels_of(data).pictures(images)
    np.testing.assert_array_equal(pictures, expected.permute(0, 2, 3, 1).numpy().astype(np.uint8))


def test_pictures_clip_overshoot_of_bicubic_resizing():
    images = batch_of() * 1.4 - 0.2
    found = Normalize(config_of().DATA)
    assert torch.equal(found.pixels(found(images)), (255 * images[:, :3].clamp(0, 1)).round().to(torch.uint8))


def test_pictures_of_raw_values_are_scaled_by_the_limits():
    image = pixels()
    data = config_of(limits=LIMITS, RGB=(4, 2, 0)).DATA
    found = pixels_of(data).shown(image.astype(np.float32))
    expected = np.rint(255 * scaled(image)[:, :, [4, 2, 0]])
    assert found.dtype == np.uint8 and np.abs(found - expected).max() <= 1


# --- compared with 8 bits ---


@pytest.mark.parametrize("channels", [1, 3])
def test_native_image_of_8_bits_has_the_usual_input(channels):
    image = np.random.default_rng(0).integers(256, size=(SIDE, SIDE, channels), dtype=np.uint8)
    same = {"IMAGE_SIZE": SIDE, "CROP_PCT": 1.0, "IMAGENET_MEAN": MEAN[:channels], "IMAGENET_STD": DEVIATION[:channels]}
    native = config_of(channels, (0, 255), PIXELS="uint8", **same).DATA
    plain = config_of(channels, (), PIXELS="8bit", **same).DATA
    inputs = []
    for data, dtype in ((native, torch.float32), (plain, torch.uint8)):
        out = torch.empty(channels, SIDE, SIDE, dtype=dtype)
        EvalTransform(data)(image, out)
        inputs.append(Normalize(data)(out[None]))
    torch.testing.assert_close(inputs[0], inputs[1], rtol=0, atol=1e-6)


# --- batches of a reader, erased and mixed ---


@pytest.fixture(scope="module")
def run_settings(tmp_path_factory):
    """Return the settings of images in files, with measured limits, mean and deviation."""
    photos = draw(tmp_path_factory.mktemp("batches") / "photos")
    return measured(settings(photos))[0]


def prepared(config, batch) -> torch.Tensor:
    return build_preparation(config, Normalize(config.DATA))(batch)[0]


def only(config, channel: int):
    """Return the settings of images that have only one of the channels."""
    data = {"IMAGE_CHANNELS": 1, "RANGE": config.DATA.RANGE[2 * channel : 2 * channel + 2]}
    names = ("IMAGENET_MEAN", "IMAGENET_STD")
    return replaced(config, DATA=data | {name: (getattr(config.DATA, name)[channel],) for name in names})


CHANGES = {
    "nothing": {},
    "boxes": {"RANDOM_ERASE_PROB": 0.7, "RANDOM_ERASE_MODE": "const", "RANDOM_ERASE_COUNT": 3},
    "mixup": {"MIXUP_ALPHA": 0.8, "MIXUP_MODE": "elem"},
    "cutmix": {"CUTMIX_ALPHA": 1.0, "MIXUP_MODE": "batch"},
    "all": {"RANDOM_ERASE_PROB": 0.7, "RANDOM_ERASE_MODE": "const", "MIXUP_ALPHA": 0.8, "CUTMIX_ALPHA": 1.0},
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_channel_is_erased_and_mixed_like_a_grey_image(run_settings, change):
    config = replaced(run_settings, TRAIN=CHANGES[change])
    batch = first_batch(config)
    assert batch.images.shape == (8, CHANNELS, SIDE, SIDE) and batch.images.dtype == torch.float32
    found, plain = prepared(config, batch), prepared(run_settings, batch)
    assert torch.equal(found, plain) is (change == "nothing")
    for channel in range(CHANNELS):
        grey = batch._replace(images=batch.images[:, channel : channel + 1])
        torch.testing.assert_close(
            found[:, channel : channel + 1], prepared(only(config, channel), grey), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("mode", ["pixel", "rand"])
def test_erased_boxes_have_noise_in_all_channels(run_settings, mode):
    config = replaced(run_settings, TRAIN={"RANDOM_ERASE_PROB": 1.0, "RANDOM_ERASE_MODE": mode})
    batch = first_batch(config)
    changed = prepared(config, batch) != prepared(run_settings, batch)
    assert changed.any((2, 3)).all() and torch.equal(changed[:, 0], changed.all(1)), "the same pixels of all channels"


def test_reader_makes_the_images_of_the_files(run_settings):
    config = replaced(run_settings, DATA={"CROP_SCALE": (1, 1), "CROP_RATIO": (1.125, 1.125), "HFLIP": 0})
    batch, train = first_batch(config), open_sets(config)[0]
    for image, index in zip(batch.images, batch.piece.indices.tolist(), strict=True):
        expected = resized(scaled(train.read(index), config.DATA.RANGE), (SIDE, SIDE), config.DATA.INTERPOLATION)
        np.testing.assert_allclose(image.numpy(), expected, rtol=0, atol=1e-5)


def test_title_of_pictures_names_channels_and_their_limits():
    config = config_of(3, limits=(0, 100, -5, 5, 7, 4095), RGB=(2, 0, 1))
    expected = "; shown: channel 2 from 7 to 4095, channel 0 from 0 to 100, channel 1 from -5 to 5"
    assert pixels_of(config.DATA).shown_as == expected
