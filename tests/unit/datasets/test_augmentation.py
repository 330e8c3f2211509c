"""Augmentation depends only on seed, epoch and image, also in threads. Random erasing has the right distribution."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from datasets import Piece
from datasets.transforms.augment import Augmentation, parse_policy
from datasets.transforms.erase_and_mix import ERASED_AREA, BatchedErasing, Erasing
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced
from tests.support.properties import examples
from tests.support.refusals import refused
from utils.errors import ConfigError

POLICIES = "original rand-m9-n3-p1-mstd101 rand-m15-mmax20-tweights augmix-d2 3a".split()


def settings(side: int = 16, **train) -> Config:
    return replaced(Config(), DATA={"IMAGE_SIZE": side}, TRAIN=train)


def piece(count: int, first: int = 0, epoch: int = 0, repeat: int = 0) -> Piece:
    return Piece(epoch, np.arange(first, first + count), count, 0, first, np.full(count, repeat))


@pytest.mark.parametrize("train", [*({"AUTO_AUGMENT": each} for each in POLICIES), {"COLOR_JITTER": 0.4}], ids=str)
def test_augmented_image_depends_only_on_its_random_generator(train):
    augment, side = Augmentation(settings(32, **train)), 32
    waves = torch.linspace(0, 6, side).sin()[:, None] * torch.linspace(0, 4, side).cos()
    image = ((torch.stack([waves, waves / 2, -0.8 * waves]) + 1) * 100).to(torch.uint8)  # neither flat nor noise

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
    changed = [each for each in alone if not torch.equal(each, image)]
    assert len(changed) > 8 and any(not torch.equal(changed[0], each) for each in changed)


def test_color_jitter_applies_only_with_3_augment_or_without_policy():
    for policy, jitters in ((None, True), ("3a", True), ("rand-m9-t3a", True), ("rand-m9", False), ("v0", False)):
        augment = Augmentation(settings(AUTO_AUGMENT=policy, COLOR_JITTER=0.3))
        drawn = [[each.name for each in augment.draw(random.Random(seed)).operations] for seed in range(30)]
        assert all({"brightness", "contrast", "color"} <= set(each[-3:]) for each in drawn) == jitters


@pytest.mark.parametrize("text", cases_of("mistakes-of_a_policy"))
def test_invalid_policy_name_error_lists_valid_options(text):
    with refused(ConfigError, *names_of("mistakes-of_a_policy", text)):
        parse_policy(settings(AUTO_AUGMENT=text).TRAIN)


def test_erased_box_areas_and_shapes_match_the_paper():
    side = 100
    erasing = Erasing(settings(side, RANDOM_ERASE_PROB=1.0), CPU)
    boxes = np.array([erasing.boxes(random.Random(number))[0] for number in range(2000)])
    left, top, width, height = boxes.T
    area, ratio = width * height / side**2, np.log(width / height)
    assert (left >= 0).all() and (top >= 0).all() and (left + width <= side).all() and (top + height <= side).all()
    assert 0.015 < area.min() < 0.03 and 0.32 < area.max() < 0.345 and 0.16 < area.mean() < 0.19
    assert -1.3 < ratio.min() < -1 and 1 < ratio.max() < 1.3 and abs(ratio.mean()) < 0.05
    three = Erasing(settings(side, RANDOM_ERASE_PROB=1.0, RANDOM_ERASE_COUNT=3), CPU)
    drawn = [three.boxes(random.Random(number)) for number in range(2000)]
    counts, total = [len(each) for each in drawn], [sum(width * height for *_, width, height in each) for each in drawn]
    assert {counts.count(each) > 400 for each in (1, 2, 3)} == {True} and len(set(counts)) == 3
    assert abs(np.mean(total) / side**2 - sum(ERASED_AREA) / 2) < 0.01, "three boxes together cover as much as one"


@given(
    st.integers(8, 40),
    st.integers(1, 6),
    st.sampled_from([1, 3]),
    st.integers(1, 4),
    st.sampled_from(["const", "rand", "pixel"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 50),
)
@examples(60)
def test_erasing_changes_only_pixels_inside_its_boxes(side, count, channels, most, mode, probability, epoch):
    train = {"RANDOM_ERASE_PROB": probability, "RANDOM_ERASE_COUNT": most, "RANDOM_ERASE_MODE": mode}
    config = replaced(settings(side, **train), DATA={"IMAGE_CHANNELS": channels})
    images = torch.full((count, channels, side, side), 9.0)  # more than any noise
    found = []
    for kind in (Erasing, BatchedErasing):
        erasing = kind(config, CPU)
        table = torch.tensor(erasing.rows(piece(count, epoch=epoch)))
        found.append(erasing(images.clone(), table))
    assert torch.equal(*found)
    for image, boxes in zip(found[0], table.tolist(), strict=True):
        is_inside = torch.zeros(side, side, dtype=torch.bool)
        for left, top, width, height, *_ in (drawn := [box for box in boxes if box[2]]):
            assert 0 <= left <= left + width <= side and 0 <= top <= top + height <= side
            is_inside[top : top + height, left : left + width] = True
        assert ((image != 9) == is_inside).all()
        assert probability == 0.5 or bool(drawn) == bool(probability)
        last = image[:, top : top + height, left : left + width] if drawn else torch.zeros(1, 1, 1)
        assert {"const": not last.any(), "rand": (last == last[..., :1, :1]).all()}.get(mode, True)
