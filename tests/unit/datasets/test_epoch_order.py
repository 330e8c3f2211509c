"""The order of an epoch is computed in blocks. It equals the older order in one array, for every set and reach."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datasets import build_train_data
from datasets.image_set import ImageSet
from datasets.index import IndexBuilder
from datasets.order import grouped_shuffled, nearby_shuffled
from datasets.pixels import Pixels
from datasets.sources.shards import SAMPLES, TARS, Shard, ShardFolder, ShardStorage, ShardTable, ShardTar, add_shards
from tests.support.configs import CPU
from tests.support.image_sets import make_set, settings, targets_only
from tests.support.opened import open_sets
from tests.support.properties import examples
from utils.distributed import Process


def big_set(num_shards: int, per_shard: int, buffer: int):
    """Return a set for tests of its order; its images are never read."""
    numbers = np.zeros(per_shard, np.int64)
    shard = Shard(numbers, numbers, numbers, [b""] * per_shard, b"")
    shards = [(ShardTar(f"{number}.tar", 0, 0), shard) for number in range(num_shards)]
    builder = IndexBuilder(SAMPLES | TARS)
    add_shards(builder, shards)
    table = ShardTable(builder.finish({}))
    storage = ShardStorage(ShardFolder(Path(), "", {}, ()), table, buffer)
    return ImageSet(storage, np.zeros(len(table), np.int32), ["one"], pixels=Pixels(3))


def draws_of(count: int, *seeds: int) -> np.ndarray:
    return np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)


def reference_of_nearby(count: int, reach: int, *seeds: int) -> np.ndarray:
    if reach >= count:
        return np.argsort(draws_of(count, *seeds), kind="stable")
    fractions = (draws_of(count, *seeds) >> np.uint64(33)).astype(np.int64)
    return np.argsort((np.arange(count) << 31) + reach * fractions, kind="stable")


def reference_of_grouped(group_of: np.ndarray, num_groups: int, reach: int, seed: int, epoch: int) -> np.ndarray:
    turn_of_group = np.argsort(np.argsort(draws_of(num_groups, seed, epoch, 1), kind="stable"))
    in_turn = np.argsort(turn_of_group[group_of], kind="stable")
    return in_turn[reference_of_nearby(len(group_of), reach, seed, epoch, 2)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 400), st.integers(0, 99))
@examples(60)
def test_epoch_orders_equal_those_of_earlier_versions(sizes, reach, seed):
    """Some groups are empty."""
    count = sum(sizes)
    everywhere = targets_only(np.zeros(count), ["one"]).epoch_order(seed, 7)
    assert everywhere.tolist() == reference_of_nearby(count, count, seed, 7).tolist()
    assert nearby_shuffled(count, reach, seed, 7).tolist() == reference_of_nearby(count, reach, seed, 7).tolist()
    grouped = grouped_shuffled(np.concatenate([[0], np.cumsum(sizes)]), reach, 3, seed)
    wanted = reference_of_grouped(np.repeat(np.arange(len(sizes)), sizes), len(sizes), reach, 3, seed)
    assert grouped.tolist() == wanted.tolist()


def test_epoch_order_of_a_shard_subset_matches_the_reference_order():
    images = big_set(20, 50, 30)
    kept = np.flatnonzero(np.random.default_rng(0).random(1000) < 0.1)
    kept = kept[(kept < 300) | (kept >= 400)]  # two tars have no images left
    wanted = reference_of_grouped(kept // 50, 20, 30, 5, 6)
    assert images.take(kept).epoch_order(5, 6).tolist() == wanted.tolist()


def test_read_position_is_announced_to_shards_before_each_window(tmp_path):
    make_set(tmp_path)
    config = settings("shards", tmp_path, IMAGE_SIZE=4, CROP_PCT=1.0, BATCH_SIZE=6, SHUFFLE_BUFFER=8, NUM_WORKERS=0)
    announced = []

    class Announced(ShardStorage):
        def will_read(self, part, share, step):
            announced.append((share.order.seed, *share.order.place(step)))

        def open_file(self, row, pixels):
            seed, epoch, position = announced[-1]
            assert row in train.epoch_order(seed, epoch)[position : position + 6]
            return super().open_file(row, pixels)

    train, _ = open_sets(config)
    train.storage.__class__ = Announced
    data = build_train_data(config, train, Process(CPU))
    for window in data.windows(3, 8):
        list(window.batches)
    assert announced == [(0, 0, 18), (0, 0, 24), (0, 1, 0), (0, 1, 6), (0, 1, 12)]
    windows = np.concatenate([data.order.window(step) for step in range(10)])
    assert windows.tolist() == np.concatenate([train.epoch_order(0, epoch) for epoch in range(2)]).tolist()
