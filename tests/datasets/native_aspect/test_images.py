"""The contents of batches of patches: crops, shifts, mixing, erasing, lengths, and their agreement with timm."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from timm.data.naflex_transforms import RandomResizedCropToSequence, ResizeToSequence

from configs.load import load
from datasets import build_eval_data, build_normalize, build_preparation, build_train_data
from datasets.native_aspect.batches import EvalSequenceTransform, PatchMixing, SequenceTransform, blank_batch
from datasets.native_aspect.grids import grids_of, length_of, new_batch, pictures_of
from datasets.transforms.augment import Augmentation
from datasets.transforms.operations import DrawnOperations, Operation
from tests.datasets.native_aspect.photos import GREY, SHAPES, noise, piece_of, settings
from tests.support.configs import CPU, replaced
from tests.support.loading import first_batch
from tests.support.opened import open_sets
from tests.support.runs import rows
from utils.distributed import Process

LENGTHS = (1, 7, 24, 196, 576)


def picture(kind: str, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Return black and white lines, dots of random brightness, or a checkerboard of single pixels."""
    pixels = np.full((height, width, channels), 255, np.uint8)
    if kind == "lines":
        pixels[::7], pixels[:, ::5] = 0, 0
    elif kind == "checker":
        pixels[np.add.outer(np.arange(height), np.arange(width)) % 2 == 0] = 0
    else:
        pixels[:] = np.random.default_rng([width, height]).integers(2, size=(height, width, 1)) * 255
    return pixels


def as_image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])


# Sizes and pixels


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1), (500, 1), (1, 500), (3000, 2000), (4, 4)], ids=str)
def test_image_gets_the_largest_size_that_fits_the_length(folder, shape, length):
    width, height = shape
    for patch in (8, 16):
        batch = new_batch(1, length, patch, 3)
        EvalSequenceTransform(settings(folder), patch)(np.zeros((height, width, 3), np.uint8), batch[0])
        sides, grid = np.array([height, width]), grids_of(batch)[0]
        assert (grid >= 1).all() and grid.prod() <= length
        # The grid is the image at some scale, rounded up to whole patches, so it is stretched by less than one patch.
        largest = (patch * grid / sides).min()
        assert (np.ceil(largest * sides / patch - 1e-6) == grid).all()
        # At any larger scale, there would be too many patches. timm enlarges images at most 100 times.
        assert largest > 100 or np.ceil(1.0001 * largest * sides / patch).prod() > length
        resized = ResizeToSequence(patch, length)(Image.new("RGB", shape))
        assert (patch * grid == (resized.height, resized.width)).all()


@pytest.mark.parametrize(("length", "channels"), [(7, 3), (24, 3), (64, 3), (24, 1)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("kind", ["lines", "checker", "noise"])
def test_pixels_of_a_training_crop_equal_timms(folder, monkeypatch, kind, interpolation, length, channels):
    """Pillow resizes some sizes along the height first, and clips bicubic overshoot between the two passes."""
    resizing = "DATA.INTERPOLATION=nearest", f"DATA.TRAIN_INTERPOLATION={interpolation}"
    config = settings(folder, "DATA.HFLIP=0", *resizing, *(GREY if channels == 1 else ()))
    theirs = RandomResizedCropToSequence(8, length, scale=(0.3, 1.0), interpolation=interpolation)
    ours = SequenceTransform(config, 8)
    for seed, (width, height) in enumerate([*SHAPES, (90, 280), (60, 190)]):
        pixels = picture(kind, width, height, channels)
        random.seed(seed)
        params = theirs.scale, theirs.ratio
        (top, left, rows_of, columns), size, _ = theirs.get_params(
            torch.empty(1, height, width), *params, max_seq_len=length, patch_h=8, patch_w=8
        )
        random.seed(seed)
        expected = np.asarray(theirs(as_image(pixels))).reshape(*size, channels)
        monkeypatch.setattr(
            "datasets.native_aspect.batches.crop_box", lambda *_, box=(left, top, columns, rows_of): box
        )
        batch = new_batch(1, length, 8, channels)
        ours(pixels, random.Random(0), batch[0])
        (found,) = pictures_of(batch)
        assert found.shape == expected.shape
        # Bilinear crops use torch's kernel, and the others use Pillow's.
        limit = 2 if interpolation == "bilinear" else 0
        assert np.abs(found.astype(int) - expected).max() <= limit, (width, height)


# Shifts of policies


@pytest.mark.parametrize("size", [(64, 784), (784, 64), (112, 448), (224, 224)], ids=str)
@pytest.mark.parametrize("policy", ["rand-m10-n1-p1", "augmix-m10-w1-d1"])
def test_policy_shifts_an_image_by_fractions_of_its_own_sides(folder, policy, size):
    """The largest shift is 0.45 of a side, as in timm."""
    config = settings(folder, f"TRAIN.AUTO_AUGMENT={policy}", "DATA.IMAGE_SIZE=32")
    augment = SequenceTransform(config, 16).augment
    drawn = [augment.draw(random.Random(seed)) for seed in range(300)]
    operations = [operation for each in drawn for chain in (each.operations, *each.chains) for operation in chain]
    shifts = {each.name: each for each in operations if each.name.startswith("translate")}
    pixels = np.array(noise(*size))
    for name in ("translate_x", "translate_y"):
        fraction = shifts[name].value / 32  # drawn for a square of DATA.IMAGE_SIZE
        if policy.startswith("rand"):
            assert abs(fraction) == pytest.approx(0.45)
        shift = {"translate_x": auto_augment.translate_x_rel, "translate_y": auto_augment.translate_y_rel}[name]
        options = {"fillcolor": augment.fill, "resample": shifts[name].resample}
        expected = np.asarray(shift(Image.fromarray(pixels), fraction, **options))
        alone = DrawnOperations((shifts[name],))
        chained = DrawnOperations(chains=((shifts[name],),), weights=(1.0,), blend=1.0)
        for each in (alone, chained):
            assert np.abs(augment.apply(each, pixels).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix", "3a", "ta_wide"])
def test_square_image_is_augmented_like_an_image_of_a_plain_run(folder, policy):
    config = settings(folder, f"TRAIN.AUTO_AUGMENT={policy}", "TRAIN.COLOR_JITTER=0.4", "DATA.IMAGE_SIZE=224")
    ours = SequenceTransform(config, 16).augment
    plain = Augmentation(replaced(config, DATA={"TOKENS": None}))
    pixels = np.array(noise(224, 224))
    for seed in range(20):
        found, expected = (each.apply(each.draw(random.Random(seed)), pixels) for each in (ours, plain))
        assert np.array_equal(found, expected)


def test_shifts_of_trivial_augment_are_in_pixels_for_any_size(folder):
    augment = SequenceTransform(settings(folder, "TRAIN.AUTO_AUGMENT=ta_wide"), 16).augment
    pixels = np.array(noise(300, 30))
    found = augment.apply(DrawnOperations((Operation("translate_x", -20.0, 0),)), pixels)
    assert np.array_equal(found[:, 20:], pixels[:, :-20])


# Lengths


def test_evaluation_uses_tokens_and_training_uses_train_tokens(folder):
    config = settings(folder, "DATA.TRAIN_TOKENS=[12]")
    _, val = open_sets(config)
    batches = list(build_eval_data(config, val, Process(CPU)))
    assert {each.images.shape[1] for each in batches} == {24 + 1}
    assert max(grids_of(each.images).prod(axis=1).max() for each in batches) > 12
    assert grids_of(first_batch(config).images).prod(axis=1).max() <= 12


def test_lengths_of_updates_are_drawn_from_seed_and_step(folder):
    drawn_from = "DATA.TRAIN_TOKENS=[12,24,40]"
    config = settings(folder, drawn_from)
    drawn = [length_of(config, step) for step in range(300)]
    assert set(drawn) == {12, 24, 40} and np.bincount(drawn)[[12, 24, 40]].min() > 70
    assert drawn != [length_of(settings(folder, drawn_from, "SEED=1"), step) for step in range(300)]
    assert {length_of(settings(folder), step) for step in range(20)} == {24}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_workers_read_the_same_batches_of_the_drawn_lengths(folder, workers):
    config = settings(folder, "DATA.TRAIN_TOKENS=[12,24,40]", "TRAIN.MIXUP_ALPHA=1", "TRAIN.RANDOM_ERASE_PROB=1")
    train_set, found = open_sets(config)[0], []
    for data in ({}, {"NUM_WORKERS": 2, "WORKERS": workers}):
        windows = build_train_data(replaced(config, DATA=data), train_set, Process(CPU)).windows(0, 4)
        batches = [(window.step, next(window.batches)) for window in windows]
        assert all(batch.images.shape[1] == length_of(config, step) + 1 for step, batch in batches)
        found.append([tuple(each.copy() for each in (batch.images.numpy(), batch.boxes)) for _, batch in batches])
    for one, other in zip(*found, strict=True):
        assert all(np.array_equal(*each) for each in zip(one, other, strict=True))


def test_blank_batch_has_no_padding(folder):
    config = settings(folder)
    for length in (35, 24, 7):
        batch = blank_batch(config, 3, length)
        assert batch.shape == (3, length + 1, 192)
        assert build_normalize(config.DATA)(batch)["patch_valid"].all()


def test_generated_images_have_the_drawn_length_in_training(folder):
    words = "-dataset synthetic -num_classes 3 -opts DATA.SYNTHETIC_SIZE=32 DATA.TRAIN_TOKENS=[4,12]".split()
    config = load(["-cfg", str(folder / "native.yaml"), *words]).config
    train, val = open_sets(config)
    windows = build_train_data(config, train, Process(CPU)).windows(0, 12)
    found = [next(window.batches).images.shape[1] - 1 for window in windows]
    assert found == [length_of(config, step) for step in range(12)] and set(found) == {4, 12}
    assert {each.images.shape[1] for each in build_eval_data(config, val, Process(CPU))} == {24 + 1}


@pytest.mark.slow
def test_check_reports_each_part_with_its_own_length(start, tmp_path):
    found = rows(start(tmp_path, "CHECK=true", "DATA.TRAIN_TOKENS=[6]").done().stdout)
    assert "at most 6 patches of 8 x 8" in found["training shapes"][1]
    assert "at most 24 patches of 8 x 8" in found["validation shapes"][1]


# Mixing and erasing


def mixes_of(folder, *options: str, count: int = 8) -> list:
    config = settings(folder, "TRAIN.MIXUP_ALPHA=1", "TRAIN.CUTMIX_ALPHA=1", *options)
    return PatchMixing(config, 8).draw(piece_of(count), np.full((count, 2), 4))


@pytest.mark.parametrize("probability", [0, 1])
def test_switch_probability_chooses_cutmix_over_mixup(folder, probability):
    options = [f"TRAIN.MIXUP_SWITCH_PROB={probability}", "TRAIN.MIXUP_GROUP=2"]
    assert {each.weight == 0 for each in mixes_of(folder, *options)} == {probability == 1}


@pytest.mark.parametrize(("group", "draws"), [("2", 4), ("4", 2), ("null", 1)])
def test_images_of_a_mixing_group_share_their_weight(folder, group, draws):
    weights = [each.weight for each in mixes_of(folder, f"TRAIN.MIXUP_GROUP={group}", "TRAIN.MIXUP_SWITCH_PROB=0")]
    size = len(weights) // draws
    assert len(set(weights)) == draws
    assert weights == [weights[position // size * size] for position in range(len(weights))]


def test_images_are_mixed_before_patches_are_erased(folder):
    options = "TRAIN.MIXUP_ALPHA=1 TRAIN.RANDOM_ERASE_PROB=1 TRAIN.RANDOM_ERASE_MODE=const DATA.HFLIP=0".split()
    config = settings(folder, *options)
    batch, normalize = first_batch(config), build_normalize(config.DATA)
    images, targets = build_preparation(config, normalize)(batch)
    mixed = normalize(batch.images)["patches"]
    changed = (images["patches"] != mixed).any(2)
    assert changed.any(1).all() and 0 < targets.share.min() < 0.9
    # If patches were erased before mixing, they would show the partner.
    assert not images["patches"][changed].any()
