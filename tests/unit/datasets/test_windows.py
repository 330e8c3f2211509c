"""Drawn orders: every update gets its images once, whatever the processes, the micro-batches and the first update."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets.balance import order_of_balanced_epochs
from datasets.order import Order, Piece, grouped_shuffled
from engine.memory import flags_for, smaller_batch
from tests.support.image_sets import targets_only
from tests.support.properties import examples


@st.composite
def orders(draw, sampler: str = "any", num_repeats: int | None = None) -> Order:
    """Draw the order of a small set: plain, in tars, or balanced; with repeated images and with pairs."""
    num_images, in_pairs = draw(st.integers(1, 60)), draw(st.booleans())
    sampler = draw(st.sampled_from(["shuffle", "tars", "balanced"])) if sampler == "any" else sampler
    targets = np.array(draw(st.lists(st.integers(0, 3), min_size=num_images, max_size=num_images)))
    targets = np.unique(targets, return_inverse=True)[1]  # each class has images
    images = targets_only(targets, [f"{number}" for number in range(targets.max() + 1)])
    epoch_order = order_of_balanced_epochs(images) if sampler == "balanced" else images.epoch_order
    if sampler == "tars":
        cuts = sorted(draw(st.lists(st.integers(0, num_images), max_size=5)))
        starts, reach = np.array([0, *cuts, num_images]), draw(st.integers(1, num_images))
        epoch_order = lambda seed, epoch: grouped_shuffled(starts, reach, seed, epoch)  # noqa: E731
    found = Order(
        num_images,
        batch_size=2 * draw(st.integers(1, 3)) if in_pairs else draw(st.integers(1, 6)),
        world_size=draw(st.integers(1, 4)),
        num_accumulated=draw(st.integers(1, 3)),
        drop_last=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
        epoch_order=epoch_order,
        is_balanced=sampler == "balanced",
        in_pairs=in_pairs,
    )
    return replace(found, num_repeats=num_repeats or draw(st.integers(1, min(4, found.global_batch))))


def in_order(order: Order, step: int) -> list[Piece]:
    """Return the pieces of all processes in the order of the window."""
    of_ranks = [order.pieces(step, rank) for rank in range(order.world_size)]
    return [piece for of_micro_batch in zip(*of_ranks, strict=True) for piece in of_micro_batch]


def occurrences(order: Order, step: int) -> list[tuple[int, int]]:
    """Return (image, number of its occurrence) for the images of an update that count."""
    parts = [(each.indices[: each.num_samples], each.repeats[: each.num_samples]) for each in in_order(order, step)]
    return [pair for part in parts for pair in zip(*(each.tolist() for each in part), strict=True)]


def window_by_hand(order: Order, step: int) -> list[int]:
    """Return the images of an update. They repeat in rounds, and each round starts one image later."""
    epoch, number = divmod(step, order.steps_per_epoch)
    start = number * order.global_batch
    size = min(order.global_batch, order.num_images - start)
    first, distinct = number * -(-order.global_batch // order.num_repeats), -(-size // order.num_repeats)
    images = order.epoch_order(order.seed, epoch)[first : first + distinct].tolist()
    rounds = [images[turn % distinct :] + images[: turn % distinct] for turn in range(order.num_repeats)]
    return sum(rounds, [])[:size]


def epoch_of(order: Order, epoch: int) -> range:
    return range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)


@pytest.mark.slow
@given(orders(), st.integers(0, 3))
@examples(100)
def test_windows_are_divided_exactly_among_ranks_without_splitting_pairs(order, epoch):
    for step in epoch_of(order, epoch):
        window, pieces = order.window(step), in_order(order, step)
        num_micro_batches = -(-len(window) // (order.batch_size * order.world_size))
        assert len(window) == order.window_size(step) and order.num_micro_batches(step) == num_micro_batches
        assert len(pieces) == num_micro_batches * order.world_size and {piece.epoch for piece in pieces} == {epoch}
        assert [image for image, _ in occurrences(order, step)] == window.tolist() == window_by_hand(order, step)
        filled = [piece for piece in pieces if piece.num_samples]
        assert max(len(piece.indices) for piece in filled) <= order.largest_piece(step) <= order.batch_size
        assert all(piece.num_samples == len(piece.indices) for piece in filled)
        assert all(np.array_equal(piece.indices, window[piece.first :][: piece.num_samples]) for piece in filled)
        assert all(piece.indices.tolist() == [window[0]] for piece in pieces if not piece.num_samples)
        if order.in_pairs:
            assert all(piece.first % 2 == 0 for piece in filled)
            assert sum(piece.num_samples % 2 for piece in pieces) == len(window) % 2


def numbers_in(text: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", text))]


@given(orders(), st.integers(1, 4), st.integers(1, 5))
@examples(60)
def test_descriptions_of_an_epoch_count_its_updates_and_pieces(order, half_batch, world_size):
    """A resumed run can have pieces of two sizes."""
    sizes = [order.window_size(step) for step in epoch_of(order, 0)]
    full = [size for size in sizes if size == order.global_batch]
    of_epoch = numbers_in(order.describe_epoch().replace(f" ({order.describe_split()})", ""))
    assert of_epoch[:2] == ([len(full), order.global_batch] if full else [1, *sizes])
    rest = order.num_images % order.global_batch if full and order.num_repeats == 1 else 0
    assert of_epoch[2:] == [rest] * bool(rest)
    resumed = replace(order, batch_size=2 * half_batch, world_size=world_size, fixed_global_batch=order.global_batch)
    for each in (order, resumed):
        *of_pieces, processes, num_micro_batches = numbers_in(each.describe_split())
        if full and not order.in_pairs:
            assert of_pieces == sorted({piece.num_samples for piece in in_order(each, 0)})
            assert (processes, num_micro_batches) == (each.world_size, each.num_micro_batches(0))


@pytest.mark.slow
@given(orders(), st.data())
@examples(60)
def test_update_has_the_same_images_after_resuming_with_other_processes(order, data):
    steps = range(2 * order.steps_per_epoch)
    expected = [occurrences(order, step) for step in steps]
    batch_size = 2 * data.draw(st.integers(1, 4)) if order.in_pairs else data.draw(st.integers(1, 9))
    world_size, started_with = data.draw(st.integers(1, 5)), order.global_batch
    resumed = replace(order, batch_size=batch_size, world_size=world_size, fixed_global_batch=started_with)
    assert resumed.steps_per_epoch == order.steps_per_epoch
    for step in data.draw(st.permutations(steps)):
        assert occurrences(resumed, step) == expected[step]


@pytest.mark.slow
@given(orders(), st.integers(0, 6))
@examples(100)
def test_smaller_micro_batch_is_the_largest_that_divides_an_update(order, half):
    order = replace(
        order, batch_size=2 * half or order.batch_size, fixed_global_batch=order.global_batch * half or None
    )
    of_process, largest = order.global_batch // order.world_size, order.largest_piece(0)
    found = smaller_batch(order)
    fitting = [size for size in range(1, largest) if of_process % size == 0 and size % order.unit == 0]
    assert found == max(fitting, default=0)
    if found and order.global_batch % order.world_size == 0:
        batch_size, num_accumulated = numbers_in(" ".join(flags_for(order, found)))
        smaller = replace(order, batch_size=batch_size, num_accumulated=num_accumulated, fixed_global_batch=None)
        assert smaller.global_batch == order.global_batch and smaller.largest_piece(0) <= batch_size == found


@given(orders())
@examples(60)
def test_epoch_uses_each_image_as_often_as_promised(order):
    seen = Counter()
    for step in epoch_of(order, 1):
        found = occurrences(order, step)
        seen.update(found)
        if not order.is_balanced:
            times = Counter(image for image, _ in found).values()
            assert max(times) - min(times) <= 1 and max(times) <= order.num_repeats
            assert len(times) == -(-len(found) // order.num_repeats)
    assert set(seen.values()) == {1}, "each occurrence of an image must have random numbers of its own"
    leaves_out = order.drop_last and order.num_images >= order.global_batch
    assert seen.total() == order.num_images - (order.num_images % order.global_batch if leaves_out else 0)
    if order.num_repeats == 1 and not order.is_balanced:
        assert len({image for image, _ in seen}) == seen.total()


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 5))
@examples(60)
def test_balanced_epoch_has_equally_many_images_of_each_class(counts, seed, epoch):
    images = targets_only(np.repeat(np.arange(len(counts)), counts), [f"{number}" for number in range(len(counts))])
    drawn = order_of_balanced_epochs(images)(seed, epoch)
    places = np.bincount(images.targets[drawn], minlength=len(counts))
    assert len(drawn) == len(images) and np.ptp(places) <= 1
    times = np.bincount(drawn, minlength=len(images))
    for number in range(len(counts)):
        assert np.ptp(times[images.targets == number]) <= 1
