"""Augmentation on the device: the pixels that the host makes of the same draws, however a batch is split."""

import random

import numpy as np
import pytest
import torch

from configs.schema import Config, Data
from datasets import Batch, Draws, Normalize, Piece, Preparation, check_device
from datasets.transforms.augment import build_augmentation
from datasets.transforms.on_device.augmentation import carry_out
from datasets.transforms.on_device.rows import OperationRows
from datasets.transforms.pixels import OPERATIONS, Operation, Plan
from datasets.types import ImageDraws
from engine.diagnose.overflow import OVERFLOW_FILE, LastUpdate, read_overflow, save_overflow
from tests.support.configs import CPU, replaced, small_config
from tests.support.loading import settings, train_data
from tests.support.pretend_device import DEVICE, on_pretend_device, waits
from tests.support.refusals import refused
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

SIDE = 20
FACTORS = (0.0, 0.1, 0.7, 1.0, 1.63, 3.0)
VALUES = {
    "posterize": (0, 0.5, 1, 3, 7, 8, 9),
    "solarize": (0, 1, 85.3, 128, 255, 256),
    "solarize_add": (0, 1, 77, 110, 128),
    **dict.fromkeys(("brightness", "contrast", "color", "sharpness"), FACTORS),
    "gaussian_blur": (0.0, 0.1, 0.7, 1.3, 2.0, 4.5),
    "rotate": (0.0, -30.0, 4.2, 28.9, 90.0, 180.0, -101.0),
    "shear_x": (0.0, 0.3, -0.3, 0.11),
    "shear_y": (0.0, 0.3, -0.3, 0.11),
    "translate_x": (0.0, 9.0, -0.5, 3.3, -7.45, 25.0),
    "translate_y": (0.0, 9.0, -0.5, 3.3, -7.45, 25.0),
}
POLICIES = ("rand-m9-mstd0.5-inc1 rand-m15-mmax20-n4-mstd1 original v0 augmix-m5-w4-d2-mstd1 augmix 3a").split()


def config_of(policy: str | None, channels: int = 3, jitter: float = 0.0, side: int = SIDE) -> Config:
    data = {"IMAGE_SIZE": side, "IMAGE_CHANNELS": channels, "IMAGENET_MEAN": (0.485, 0.456, 0.406)[:channels]}
    return replaced(Config(), DATA=data, TRAIN={"AUTO_AUGMENT": policy, "COLOR_JITTER": jitter})


def pictures(count: int, channels: int, side: int = SIDE) -> np.ndarray:
    """Noise, a slope with noise, few values, and two areas of one colour each."""
    rng = np.random.default_rng(count)
    images = rng.integers(256, size=(count, side, side, channels), dtype=np.uint8)
    slope = np.add.outer(9 * np.arange(side), 3 * np.arange(side))[:, :, None]
    images[1::4] = np.minimum(images[1::4] // 8 + slope, 255)
    images[2::4] = images[2::4] // 40 * 9 + 80
    images[3::4, : side // 3], images[3::4, side // 3 :] = images[3::4, :1, :1], images[3::4, -1:, -1:]
    return images


def on_host(augmentation, plans: list[Plan], images: np.ndarray) -> np.ndarray:
    return np.stack([augmentation.apply(plan, each) for plan, each in zip(plans, images, strict=True)])


def on_device(draws: Draws, images: np.ndarray) -> np.ndarray:
    given = torch.from_numpy(images).permute(0, 3, 1, 2)
    before = given.clone()
    changed = carry_out(given, draws, torch.from_numpy)
    assert torch.equal(given, before)  # others may use the batch again
    return changed.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_makes_the_pixels_of_the_host(name, channels):
    augmentation = build_augmentation(config_of("3a", channels))
    values = VALUES.get(name, (0.0,))
    operations = [Operation(name, value, resample) for value in values for resample in (0, 2, 3)]
    images = np.repeat(pictures(4, channels), len(operations), 0)
    plans = [Plan((each,)) for each in operations * 4]
    encode = OperationRows(augmentation, SIDE).encode
    draws = Draws.of([ImageDraws([], encode(plan, number)) for number, plan in enumerate(plans)])
    wanted = on_host(augmentation, plans, images)
    assert np.array_equal(on_device(draws, images), wanted)
    assert (wanted != images).any() or (channels == 1 and name == "color")


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(("policy", "jitter"), [(None, 0.4), ("3a", 0.3), *((each, 0.0) for each in POLICIES)])
def test_a_policy_makes_the_pixels_of_the_host_also_in_parts(policy, jitter, channels):
    augmentation, images = build_augmentation(config_of(policy, channels, jitter)), pictures(40, channels)
    plans = [augmentation.draw(random.Random(number)) for number in range(len(images))]
    rows = OperationRows(augmentation, SIDE)
    draws = Draws.of([ImageDraws([], *rows.draw(random.Random(number), number)) for number in range(len(images))])
    wanted = on_host(augmentation, plans, images)
    assert np.array_equal(on_device(draws, images), wanted)
    batch = Batch(torch.from_numpy(images), torch.zeros(40), 40, [], piece(40), draws)
    parts = [on_device(each.draws, each.images.numpy()) for each in batch.parts(13)]
    assert np.array_equal(np.concatenate(parts), wanted) and (wanted != images).mean() > 0.2


def piece(count: int) -> Piece:
    return Piece(0, np.arange(count), count, 0, 0, np.zeros(count, int))


@pytest.mark.parametrize("policy", ["rand-m9-n3-mstd0.5", "augmix"])
def test_loaders_draw_for_the_device_what_they_do_on_the_host(policy):
    train = {"AUTO_AUGMENT": policy, "RANDOM_ERASE_PROB": 0.5, "RANDOM_ERASE_COUNT": 2, "MIXUP_ALPHA": 0.8}
    prepared = {}
    for place in ("host", "device"):
        config = replaced(settings(IMAGE_SIZE=16, BATCH_SIZE=16, AUGMENT_ON=place), TRAIN=train)
        prepare, windows = Preparation(config, Normalize(config.DATA)), train_data(config).windows(0, 2)
        batches = [batch for window in windows for batch in window.batches]
        prepared[place] = [prepare(batch)[0] for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(*prepared.values(), strict=True)) and len(batches) == 2
    # Parts of a batch, and one whose boxes its workers have not drawn, as on the host without a policy.
    config = replaced(settings(IMAGE_SIZE=16, BATCH_SIZE=16), TRAIN=train | {"AUTO_AUGMENT": None, "MIXUP_ALPHA": 0.0})
    prepare, windows = Preparation(config, Normalize(config.DATA)), train_data(config).windows(0, 1)
    (batch,) = next(windows).batches
    wanted = prepare(batch._replace(draws=None))[0]
    assert torch.equal(prepare(batch)[0], wanted) and (wanted != prepare(batch._replace(piece=None))[0]).any()
    assert torch.equal(torch.cat([prepare(part)[0] for part in batch.parts(7)]), wanted)


@on_pretend_device
def test_a_device_augments_as_the_host_does_without_making_it_wait(tmp_path):
    for policy, channels in (("rand-m9-n4-p1-mstd0.5-inc1", 3), ("augmix", 1), ("augmix", 3), ("3a", 3)):
        config = config_of(policy, channels, jitter=0.3)
        rows = OperationRows(build_augmentation(config), SIDE)
        draws = Draws.of([ImageDraws([], *rows.draw(random.Random(number), number)) for number in range(24)])
        images = torch.from_numpy(pictures(24, channels)).pin_memory().permute(0, 3, 1, 2)
        batch = Batch(images, torch.zeros(24).pin_memory(), 24, [], piece(24), draws)
        prepares = [Preparation(config, Normalize(config.DATA).to(device)) for device in (CPU, DEVICE)]
        with waits() as seen:
            here, there = (prepare(batch)[0] for prepare in prepares)
        assert seen == {} and there.device.type == torch.device(DEVICE).type and torch.equal(here, there.cpu())
        assert not torch.equal(here, prepares[0](batch._replace(draws=None))[0])


def test_a_batch_that_is_saved_to_be_replayed_keeps_what_was_drawn_for_it(tmp_path):
    options = "TRAIN.AUTO_AUGMENT=augmix", "TRAIN.RANDOM_ERASE_PROB=0.5", "DATA.AUGMENT_ON=device"
    trainer = make_trainer(small_config(tmp_path, *options))
    last = LastUpdate()
    trainer.callbacks.append(last)
    update(trainer)
    save_overflow(tmp_path, 0, last, {})
    ((replayed, _),) = read_overflow(tmp_path / OVERFLOW_FILE).batches
    assert torch.equal(trainer.to_device(replayed)[0], trainer.to_device(last.batches(0).batches[-1][0])[0])
    assert not torch.equal(trainer.to_device(replayed)[0], trainer.to_device(replayed._replace(draws=None))[0])


def test_a_device_that_cannot_compute_the_operations_is_refused():
    check_device(Data(AUGMENT_ON="device"), CPU)
    check_device(Data(AUGMENT_ON="host"), torch.device("mps"))
    with refused(ConfigError, "DATA.AUGMENT_ON"):
        check_device(Data(AUGMENT_ON="device"), torch.device("mps"))
