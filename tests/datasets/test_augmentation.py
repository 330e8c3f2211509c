"""Augmentation: every policy changes images, as a function of seed, epoch and image alone; mixing and erasing add up."""

import dataclasses
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional

from configs.load import load
from configs.schema import Config
from datasets import Batch, Mixed, Normalize, Piece, Preparation, dominant_class, load_image_sets
from datasets.batch_order import sample_rng
from datasets.loading.readers import TrainReader
from datasets.transforms.augment import build_augmentation, parse_policy
from datasets.transforms.mix import Erasing, Mixing
from engine.train.loss import CrossEntropy
from tests.support.configs import CPU, replaced, small_config
from tests.support.loading import folder_settings, make_folder
from tests.support.loading import order as make_order
from tests.support.refusals import refused
from utils.errors import ConfigError

POLICIES = ("original svhn rand-m9-n3-p1-mstd101 rand-m15-mmax20-tweights augmix-b1-d2 ta_wide 3a").split()

NO_POLICY = ({"COLOR_JITTER": 0.4},)


def settings(side: int = 32, channels: int = 3, **train) -> Config:
    data = {"IMAGE_SIZE": side, "IMAGE_CHANNELS": channels}
    return replaced(Config(), DATA=data, TRAIN=train)


def picture(side: int = 32, channels: int = 3) -> torch.Tensor:
    """Neither flat nor noise."""
    waves = torch.linspace(0, 6, side).sin()[:, None] * torch.linspace(0, 4, side).cos()
    shades = torch.stack([waves * scale for scale in (1.0, 0.5, -0.8)[:channels]])
    return ((shades + 1) * 100).to(torch.uint8)


def piece(count: int, first: int = 0, step: int = 0, epoch: int = 0) -> Piece:
    return Piece(epoch, np.arange(first, first + count), count, step, first, np.zeros(count, dtype=int))


# One image


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("train", [*({"AUTO_AUGMENT": each} for each in POLICIES), *NO_POLICY], ids=str)
def test_a_policy_changes_images_by_its_generator_alone_in_threads_too(train, channels):
    augment, image = build_augmentation(settings(channels=channels, **train)), picture(channels=channels)

    def augmented(number: int) -> torch.Tensor:
        changed = image.clone()
        augment(changed, random.Random(number))
        return changed

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    alone = [augmented(number) for number in range(24)]
    assert torch.equal(before[0], torch.get_rng_state()), "a draw came from the global generator"
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(augmented, range(24)))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert all(each.dtype is torch.uint8 and each.shape == image.shape for each in alone)
    changed = [each for each in alone if not torch.equal(each, image)]
    assert len(changed) > 8 and any(not torch.equal(changed[0], each) for each in changed)


def test_an_image_is_augmented_anew_in_each_epoch(tmp_path):
    reader = TrainReader(load_image_sets(folder_settings(make_folder(tmp_path)))[0], folder_settings(tmp_path))
    first, second, again = (reader[piece(2, epoch=epoch)].images for epoch in (0, 1, 0))
    assert torch.equal(first, again)
    assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_paddlevits_switches_and_names_mean_what_they_mean_there(tmp_path):
    def policy(*lines: str):
        file = tmp_path / "x.yaml"
        file.write_text(f"TRAIN: {{{', '.join(lines)}}}")
        return parse_policy(load(["-cfg", str(file)]).config.TRAIN)

    assert policy("AUTO_AUGMENT: True").name == "original"
    assert policy("AUTO_AUGMENT: False") is policy("AUTO_AUGMENT: None") is policy() is None
    both = policy("AUTO_AUGMENT: True", "RAND_AUGMENT: True", "RAND_AUGMENT_LAYERS: 3", "RAND_AUGMENT_MAGNITUDE: 7")
    assert both.numbers == policy("AUTO_AUGMENT: rand-m7-n3-mstd0.5-inc1").numbers and both.name == "rand"
    augmix = policy("AUTO_AUGMENT: augmix-m5-w4-d2")
    assert augmix.name == "augmix" and augmix.numbers | {"m": 5, "w": 4, "d": 2} == augmix.numbers


def test_colour_jitter_is_left_out_beside_every_policy_but_3_augment():
    for policy, jitters in ((None, True), ("3a", True), ("rand-m9-t3a", True), ("rand-m9", False), ("ta_wide", False)):
        augment = build_augmentation(settings(AUTO_AUGMENT=policy, COLOR_JITTER=0.3))
        drawn = [[each.name for each in augment.draw(random.Random(seed)).operations] for seed in range(30)]
        assert all({"brightness", "contrast", "color"} <= set(each[-3:]) for each in drawn) == jitters
    assert build_augmentation(settings()) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("orignal", "'orignal' original"),
        ("rand-m9-tweight", "'tweight' weights 3aw"),
        ("rand-m9-foo4", "'foo4' mstd mmax"),
        ("rand-m", "'m'"),
        ("rand-m1001", "m 1000"),
        ("rand-n0", "n 100"),
        ("rand-n1000000000", "n 100"),
        ("rand-n15-t3aw", "n 14"),
        ("rand-n2.5", "'n2.5'"),
        ("augmix-w1000000000", "w 100"),
        ("augmix-d1000000000", "d 100"),
        ("augmix-a1000000000", "a 0.01 1000"),
        ("rand-n1e9", "'n1e9'"),
        ("original-m9", "'m9' original"),
        ("original-tweights", "'tweights' original"),
        ("svhn-mstd0.5", "'mstd0.5' svhn"),
    ],
)
def test_a_mistake_in_a_policys_name_says_what_there_is(text, names):
    with refused(ConfigError, "TRAIN.AUTO_AUGMENT", *names.split()):
        parse_policy(settings(AUTO_AUGMENT=text).TRAIN)


# Order


@pytest.mark.parametrize("num_repeats", [2, 3, 4])
def test_repeated_augmentation_shows_each_image_of_a_window_so_often_each_time_anew(num_repeats):
    order = dataclasses.replace(make_order(100, 12, drop_last=False), num_repeats=num_repeats)
    assert order.steps_per_epoch == 9
    seen = []
    for step in range(9):
        (piece,) = order.pieces(step, 0)
        counts = np.unique(piece.indices, return_counts=True)[1]
        assert len(piece.indices) == order.window_size(step)
        assert counts.max() <= num_repeats and (step == 8 or counts.min() == num_repeats)
        assert len(set(zip(piece.indices, piece.repeats, strict=True))) == len(piece.indices)
        pairs = set(zip(piece.indices[0::2], piece.indices[1::2], strict=True))
        assert step == 8 or (len(pairs) >= 4 and all(one != other for one, other in pairs))
        seen += set(piece.indices.tolist())
    assert len(seen) == len(set(seen)) == math.ceil(100 / num_repeats)
    draws = {sample_rng(0, 0, 7, repeat=repeat).random() for repeat in range(num_repeats)}
    assert len(draws) == num_repeats and sample_rng(0, 0, 7).random() in draws


# Batches


def mixed(images, targets, config, **where):
    mixing = Mixing(config)
    table = torch.tensor(mixing.rows(piece(len(images), **where)))
    return mixing(images, table, images.dtype), mixing.targets(targets, table)


def erase(erasing, images, of_it):
    return erasing(images, torch.tensor(erasing.rows(of_it)))


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", [{"MIXUP_ALPHA": 0.8}, {"CUTMIX_ALPHA": 1.0}, {"CUTMIX_MINMAX": (0.2, 0.8)}], ids=str)
def test_an_image_holds_as_much_of_its_partner_as_its_target_says(mode, kind):
    """Images of one number each, so that the mean of a mixed one tells the shares."""
    config = settings(16, MIXUP_MODE=mode, **kind)
    shares = []
    for step in range(6):
        values = torch.arange(8, dtype=torch.float64)
        images, targets = values[:, None, None, None].expand(8, 3, 16, 16).clone(), torch.arange(8)
        images, targets = mixed(images, targets, config, step=step)
        assert targets.first.tolist() == list(range(8)) and targets.second.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
        means = targets.share * values + (1 - targets.share) * values[targets.second]
        torch.testing.assert_close(images.mean((1, 2, 3)), means, rtol=0, atol=1e-6)
        is_cut = (images == images.round()).all()
        assert is_cut != ("MIXUP_ALPHA" in kind)
        shares.append(targets.share)
    num_draws = {"batch": 1, "pair": 4, "elem": 8}[mode]
    assert num_draws - 1 <= max(len(each.unique()) for each in shares) <= num_draws  # two boxes may be alike
    assert len(torch.cat(shares).unique()) > 3 * num_draws
    assert torch.equal(shares[0], mixed(images, torch.arange(8), config)[1].share)


def test_probabilities_of_mixing_and_of_the_kinds_are_kept():
    """Pairs of a white and a black image: mixup makes them grey, cutmix does not."""
    for prob, switch in ((0.3, 0.5), (1.0, 0.2)):
        config = settings(
            8, MIXUP_ALPHA=0.8, CUTMIX_ALPHA=1.0, MIXUP_PROB=prob, MIXUP_SWITCH_PROB=switch, MIXUP_MODE="pair"
        )
        values = torch.arange(2.0).repeat(1000)
        images, targets = values[:, None, None, None].expand(-1, 3, 8, 8).clone(), values.long()
        images, targets = mixed(images, targets, config)
        is_mixed = (images != values[:, None, None, None]).flatten(1).any(1)
        is_grey = (images != images.round()).flatten(1).any(1)
        assert abs(is_mixed.float().mean() - prob) < 0.05
        assert abs(is_grey.sum() / is_mixed.sum() - (1 - switch)) < 0.05


def test_after_its_last_epoch_nothing_is_mixed():
    config, images = (
        settings(8, MIXUP_ALPHA=0.8, MIXUP_OFF_EPOCH=2),
        torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8),
    )
    normalize = Normalize(config.DATA)

    def prepared(epoch):
        return Preparation(config, normalize)(Batch(images, torch.arange(4), 4, [], piece(4, epoch=epoch)))

    assert isinstance(prepared(epoch=1)[1], Mixed) and not torch.equal(prepared(epoch=1)[0], normalize(images))
    assert torch.equal(prepared(epoch=2)[0], normalize(images)) and torch.equal(prepared(epoch=2)[1], torch.arange(4))


@pytest.mark.parametrize("num_classes", [2, 10])
def test_the_loss_of_mixed_images_is_that_of_targets_written_out_with_smoothing(num_classes):
    torch.manual_seed(0)
    logits = torch.randn(6, num_classes, dtype=torch.float64)
    first, second, share = torch.arange(6) % num_classes, torch.arange(6).flip(0) % num_classes, torch.rand(6)
    one_hot = [functional.one_hot(each, num_classes).double() for each in (first, second)]
    soft = torch.lerp(one_hot[1], one_hot[0], share[:, None].double()) * 0.9 + 0.1 / num_classes
    torch.testing.assert_close(soft.sum(1), torch.ones(6, dtype=torch.float64))
    loss = CrossEntropy(settings(SMOOTHING=0.1).TRAIN)
    torch.testing.assert_close(loss(logits, Mixed(first, second, share)), functional.cross_entropy(logits, soft))
    alone = Mixed(first, second, torch.ones(6))
    torch.testing.assert_close(loss(logits, alone), loss(logits, first))
    assert torch.equal(dominant_class(Mixed(first, second, share)), soft.argmax(1)) and dominant_class(first) is first


def test_erased_boxes_have_the_areas_and_shapes_of_the_paper():
    side = 100
    erasing = Erasing(settings(side, RANDOM_ERASE_PROB=1.0), CPU)
    boxes = np.array([erasing.boxes(random.Random(number))[0] for number in range(2000)])
    left, top, width, height = boxes.T
    area, ratio = width * height / side**2, np.log(width / height)
    assert (left >= 0).all() and (top >= 0).all() and (left + width <= side).all() and (top + height <= side).all()
    assert 0.015 < area.min() < 0.03 and 0.32 < area.max() < 0.345 and 0.16 < area.mean() < 0.19
    assert -1.3 < ratio.min() < -1 and 1 < ratio.max() < 1.3 and abs(ratio.mean()) < 0.05
    three = Erasing(settings(side, RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_COUNT=3), CPU)
    counts = [len(three.boxes(random.Random(number))) for number in range(300)]
    assert {counts.count(each) > 60 for each in (1, 2, 3)} == {True} and len(set(counts)) == 3


@pytest.mark.parametrize("mode", ["pixel", "rand", "const"])
def test_so_many_images_are_erased_and_by_what_is_asked_for(mode):
    erasing = Erasing(settings(16, RANDOM_ERASE_PROB=0.25, RANDOM_ERASE_MODE=mode), CPU)
    images = torch.full((800, 3, 16, 16), 9.0)
    images = erase(erasing, images, piece(800))
    erased = [image[:, (image[0] != 9.0)] for image in images if (image != 9.0).any()]
    assert 160 < len(erased) < 240
    num_values = np.median([len(each[0].unique()) / each.shape[1] for each in erased])
    filled = torch.cat([each.flatten() for each in erased])
    assert (filled == 0).all() if mode == "const" else 0.8 < filled.std() < 1.2
    assert num_values == 1 if mode == "pixel" else num_values < 0.2
    again = torch.full((400, 3, 16, 16), 9.0)
    assert torch.equal(erase(erasing, again, piece(400, first=400)), images[400:])


def test_each_repeat_of_an_image_is_erased_in_its_own_way():
    erasing = Erasing(settings(16, RANDOM_ERASE_PROB=1.0), CPU)
    pieces = piece(8), piece(8)._replace(repeats=np.ones(8, dtype=int))
    first, second = (erase(erasing, torch.full((8, 3, 16, 16), 9.0), each) for each in pieces)
    assert not any(torch.equal(*pair) for pair in zip(first, second, strict=True))


# Settings


def test_paddlevits_deit_settings_take_effect(tmp_path):
    file = tmp_path / "deit.yaml"
    file.write_text(
        "TRAIN: {MIXUP_ALPHA: 0.8, MIXUP_PROB: 1.0, MIXUP_SWITCH_PROB: 0.5, MIXUP_MODE: 'batch', CUTMIX_ALPHA: 1.0, "
        "CUTMIX_MINMAX: None, COLOR_JITTER: 0.4, RANDOM_ERASE_PROB: 0.25, RANDOM_ERASE_MODE: 'pixel', "
        "RANDOM_ERASE_COUNT: 1, RANDOM_ERASE_SPLIT: False}"
    )
    loaded = load(["-cfg", str(file)])
    assert loaded.config.TRAIN.mixes and not Config().TRAIN.mixes
    assert [note.partition(" is ignored")[0] for note in loaded.notes] == [f"{file}: TRAIN.RANDOM_ERASE_SPLIT"]


def test_an_odd_batch_and_a_range_that_is_none_are_refused(tmp_path):
    with refused(ConfigError, "DATA.BATCH_SIZE, 7", "TRAIN.CUTMIX_ALPHA, 1.0"):
        small_config(tmp_path, "DATA.BATCH_SIZE=7", "TRAIN.CUTMIX_ALPHA=1")
    with refused(ConfigError, "TRAIN.CUTMIX_MINMAX"):
        small_config(tmp_path, "TRAIN.CUTMIX_MINMAX=[0.8, 0.2]")
    assert small_config(tmp_path, "DATA.BATCH_SIZE=7", "TRAIN.CUTMIX_ALPHA=1", "EVAL=true").START.EVAL
