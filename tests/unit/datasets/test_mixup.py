"""Mixup and cutmix compared with timm: the distribution of the draws, the pixels, and the images that share a draw."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.data import mixup

from configs.schema import Config, Shape
from datasets import Piece
from datasets.transforms.erase_and_mix import Mixing
from tests.support.configs import replaced
from tests.support.properties import examples
from utils.seed import keyed_rng

SIDE = 96
KINDS = {
    "mixup": {"MIXUP_ALPHA": 0.8},
    "cutmix": {"CUTMIX_ALPHA": 0.5},
    "both": {"MIXUP_ALPHA": 0.2, "CUTMIX_ALPHA": 1.0, "MIXUP_PROB": 0.7, "MIXUP_SWITCH_PROB": 0.3},
    "minmax": {"MIXUP_ALPHA": 0.8, "CUTMIX_MINMAX": (0.2, 0.8), "MIXUP_PROB": 0.9},
}


def mixing(size: int | str = SIDE, **train) -> Mixing:
    return Mixing(replaced(Config(), DATA={"IMAGE_SIZE": size}, TRAIN=train))


def piece(count: int, first: int = 0, step: int = 0) -> Piece:
    return Piece(0, np.arange(first, first + count), count, step, first, np.zeros(count, dtype=int))


def timms(**train) -> mixup.Mixup:
    train = {"MIXUP_ALPHA": 0.0, "CUTMIX_ALPHA": 0.0} | train
    names = {"CUTMIX_MINMAX": "cutmix_minmax", "MIXUP_PROB": "prob", "MIXUP_SWITCH_PROB": "switch_prob"}
    given = {names.get(key, key.lower()): value for key, value in train.items()}
    return mixup.Mixup(**given, label_smoothing=0.0, num_classes=2)


def test_box_of_limited_cutmix_is_uniform_between_its_limits_and_in_its_place():
    it = mixing(**KINDS["minmax"])
    table = np.array([it.rows(piece(2, step=step))[0] for step in range(2000)])
    weights, starts, sides = table[:, 1], table[:, 2:4] / SIDE, table[:, 4:] / SIDE
    is_cut = sides[:, 0] > 0
    assert abs(is_cut.mean() - 0.45) < 0.05 and abs((weights[~is_cut] < 1).mean() - 0.45 / 0.55) < 0.05
    for found, (low, high) in ((sides[is_cut], (0.2, 0.8)), ((starts / (1 - sides))[is_cut], (0, 1))):
        assert [found.min(), found.max()] == pytest.approx([low, high], abs=0.03)
        assert abs(found.mean() - 0.5) < 0.03 and abs(found.std() - (high - low) / 12**0.5) < 0.02


@pytest.mark.parametrize("shape", [Shape(12, 12), Shape(8, 20)])
@pytest.mark.parametrize("kind", ["mixup", "cutmix", "both"])
def test_same_mixup_draws_give_timm_pixels_and_targets(kind, shape, monkeypatch):
    if kind != "mixup" and mixup.rand_bbox((1, 1, 1), lam=0.0)[1] == 0:
        pytest.skip("this timm draws boxes of an odd side one pixel smaller")
    kinds_seen = set()
    for step in range(8):
        rng = keyed_rng("mixing", 0, step, 0)
        draws = {"rand": rng.random, "beta": rng.betavariate}
        draws["randint"] = lambda low, high, size=None, rng=rng: low + int(rng.random() * (high - low))
        monkeypatch.setattr(mixup.np, "random", SimpleNamespace(**draws))
        images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(step))
        wanted, targets = timms(**KINDS[kind])(images.transpose(2, 3).clone(), torch.arange(2))  # timm: top before left
        it = mixing(shape.size, **KINDS[kind])
        table = torch.tensor(it.rows(piece(2, step=step)))
        torch.testing.assert_close(it(images, table, torch.float32), wanted.transpose(2, 3))
        torch.testing.assert_close(it.targets(torch.arange(2), table).share, targets.diagonal())
        kinds_seen.add((bool(table[0, 4]), bool(table[0, 1] < 1)))
    assert len(kinds_seen) == 3 or kind != "both", "mixed, cut and unchanged pairs must all occur"


def test_images_of_a_mixup_group_share_one_draw():
    it, whole = mixing(**KINDS["both"], MIXUP_GROUP=64), mixing(**KINDS["both"], MIXUP_GROUP=None)
    table = torch.tensor(it.rows(piece(200)))
    draws = [set(map(tuple, part[:, 1:].tolist())) for part in table.split(64)]
    assert [len(each) for each in draws] == [1] * 4 and len(set.union(*draws)) == 4
    assert torch.equal(torch.tensor(whole.rows(piece(64))), table[:64]), "the first group draws like the whole window"
    assert len(set(map(tuple, (row[1:] for row in whole.rows(piece(200)))))) == 1


def test_mixup_pair_and_element_modes_ignore_the_group_size():
    for mode, count in (("pair", 10), ("elem", 20)):
        tables = [mixing(**KINDS["mixup"], MIXUP_MODE=mode, MIXUP_GROUP=group).rows(piece(20)) for group in (4, None)]
        assert tables[0] == tables[1] and len({row[1:] for row in tables[0]}) == count


@st.composite
def mixes(draw) -> dict:
    """Draw settings that mix some or all images."""
    alpha, fraction = st.floats(0.1, 5), st.floats(0.05, 0.95)
    kinds = draw(st.sets(st.sampled_from(["MIXUP_ALPHA", "CUTMIX_ALPHA", "CUTMIX_MINMAX"]), min_size=1))
    values = {kind: draw(alpha) for kind in sorted(kinds - {"CUTMIX_MINMAX"})}
    if "CUTMIX_MINMAX" in kinds:
        values["CUTMIX_MINMAX"] = tuple(sorted((draw(fraction), draw(fraction))))
    values |= {"MIXUP_PROB": draw(st.sampled_from([1.0, 0.6])), "MIXUP_SWITCH_PROB": draw(st.floats(0, 1))}
    group = draw(st.none() | st.sampled_from([2, 4, 6]))
    return values | {"MIXUP_MODE": draw(st.sampled_from(["batch", "pair", "elem"])), "MIXUP_GROUP": group}


SHAPES = st.integers(1, 24).map(lambda side: Shape(side, side)) | st.builds(Shape, *[st.integers(1, 24)] * 2)


@pytest.mark.slow
@given(mixes(), SHAPES, st.integers(1, 11), st.integers(0, 9), st.integers(0, 5))
@examples(100)
def test_targets_have_share_of_mixed_pixels_in_every_mode(train, shape, count, step, pairs):
    it, pixels = mixing(shape.size, **train), torch.eye(count)[:, :, None, None].expand(-1, -1, *shape)
    rows = it.rows(piece(count, step=step))
    table = torch.tensor(rows)
    targets = it.targets(torch.arange(count), table)
    own, partner = (torch.eye(count)[each] for each in (targets.first, targets.second))
    share, mixed = targets.share[:, None], it(pixels, table, torch.float32)  # channel i shows image i
    assert (share >= 0).all() and (share <= 1).all()
    torch.testing.assert_close(mixed.mean((2, 3)), share * own + (1 - share) * partner, atol=1e-5, rtol=0)
    cut = min(2 * pairs, count - 1) // 2 * 2
    parts = [it.rows(piece(size, start, step)) for start, size in ((0, cut), (cut, count - cut)) if size]
    assert [row[1:] for part in parts for row in part] == [row[1:] for row in rows], "micro-batches change no draw"
    if train["MIXUP_MODE"] != "elem":
        assert [row[1:] for row in rows[: count // 2 * 2 : 2]] == [row[1:] for row in rows[1::2]]
