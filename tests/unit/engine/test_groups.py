"""Intervals and paired tests of images that come in groups."""

import itertools

import numpy as np
import pytest

from engine.evaluation.groups import GroupTest, accuracy_interval, groups_of, standard_error
from engine.evaluation.image_test import ErrorTest
from engine.evaluation.scores import wilson_interval
from engine.tasks.number_figures import measure_errors
from tests.support.image_sets import draw_patches, load

NUM_RUNS = 400
ALIKE = 0.3  # the correlation of the answers to two images of a person


def simulate(rng: np.random.Generator, num_groups: int, accuracy: float) -> tuple[np.ndarray, np.ndarray]:
    """Return right answers and groups of images of persons, each of whom has an accuracy of his own."""
    rates = rng.beta(accuracy * (1 - ALIKE) / ALIKE, (1 - accuracy) * (1 - ALIKE) / ALIKE, num_groups)
    groups = np.repeat(np.arange(num_groups), rng.integers(10, 30, num_groups))
    return rng.random(len(groups)) < rates[groups], groups


@pytest.mark.parametrize("num_groups", [7, 10, 20])
def test_interval_of_groups_has_the_accuracy_of_new_groups(num_groups):
    rng, found, by_images = np.random.default_rng(num_groups), [], []
    for accuracy in (0.5, 0.8):
        for _ in range(NUM_RUNS):
            are_right, groups = simulate(rng, num_groups, accuracy)
            _, low, high = accuracy_interval(are_right, groups)
            found.append(low <= 100 * accuracy <= high)
            low, high = wilson_interval(100 * are_right.mean(), len(are_right))
            by_images.append(low <= 100 * accuracy <= high)
    assert 0.93 <= np.mean(found) <= 0.98
    assert np.mean(by_images) < 0.7


def test_interval_of_equal_images_is_the_interval_of_one_each():
    rng = np.random.default_rng(0)
    are_right = rng.random(40) < 0.8
    _, *alone = accuracy_interval(are_right, np.arange(40))
    _, *doubled = accuracy_interval(np.repeat(are_right, 2), np.repeat(np.arange(40), 2))
    assert doubled == pytest.approx(alone, abs=0.5)
    assert alone == pytest.approx(wilson_interval(100 * are_right.mean(), 40), abs=1)


def test_few_groups_have_no_interval():
    are_right, groups = np.ones(40, bool), np.repeat(np.arange(4), 10)
    assert accuracy_interval(are_right, groups) == (4, None, None)
    low, high = accuracy_interval(are_right, np.repeat(np.arange(8), 5))[1:]
    assert low < 75 and high == pytest.approx(100)  # eight persons without a mistake do not show that a ninth has none


def test_standard_error_of_single_images_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=30)
    usual = values.std(ddof=1) / np.sqrt(30)
    assert standard_error(values, None) == pytest.approx(usual)
    assert standard_error(values, np.arange(30)) == pytest.approx(usual)


def test_paired_test_tries_all_signs_of_the_groups():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(7), 6)
    differences = rng.integers(-1, 2, 42) + (groups < 3)
    sums = np.bincount(groups, differences)
    totals = [abs(sums @ np.array(signs)) for signs in itertools.product((-1, 1), repeat=7)]
    test = GroupTest(differences.astype(float), groups, is_accuracy=True)
    assert test.p == np.mean(np.array(totals) >= abs(sums.sum()))
    assert GroupTest(np.ones(30), np.repeat(np.arange(3), 10), is_accuracy=True).p == 0.25
    assert GroupTest(np.ones(30), np.repeat(np.arange(3), 10), is_accuracy=True).interval is None


def test_paired_test_of_many_groups_draws_signs():
    rng = np.random.default_rng(0)
    errors = rng.normal(0.1, 1, 60)
    test = GroupTest(errors, np.arange(60), is_accuracy=False)
    assert test.p == ErrorTest(errors).p
    assert test.interval == pytest.approx(ErrorTest(errors).interval)


def test_intervals_of_numbers_count_groups():
    rng, hits = np.random.default_rng(0), []
    for _ in range(NUM_RUNS):
        groups = np.repeat(np.arange(12), 10)
        errors = rng.normal(size=12)[groups] + 0.3 * rng.normal(size=120)
        _, low, high = measure_errors(np.arange(120.0), np.arange(120.0) + errors, 0.0, groups)["mae"]
        hits.append(low <= np.sqrt(2 / np.pi * (1 + 0.3**2)) <= high)
    assert 0.9 <= np.mean(hits) <= 0.99
    few = measure_errors(np.arange(40.0), np.arange(40.0) ** 1.1, 0.0, np.repeat(np.arange(4), 10))
    assert all(np.isnan(figure.low) for figure in few.values())


def test_images_are_grouped_by_setting_and_by_copies(tmp_path):
    for photo in range(40):
        draw_patches(tmp_path / f"{photo:02d}.png", seed=photo, size=(48, 48))
        draw_patches(tmp_path / f"{photo:02d}b.png", seed=photo, size=(48, 48))
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    rows = [f"{name},{'ant' if name[1] < '5' else 'bee'},{name[0]}" for name in names]
    (tmp_path / "a.csv").write_text("\n".join(["image_path,target,person", *rows, ""]))
    val = load("csv", tmp_path / "a.csv", VAL_FRACTION=0.5)[1]
    assert len(np.unique(groups_of(val))) == len(val) // 2
    val = load("csv", tmp_path / "a.csv", VAL_FRACTION=0.5, GROUP_BY="person")[1]
    assert len(np.unique(groups_of(val))) == len(val) // 20
    assert groups_of(val.take(np.unique(groups_of(val), return_index=True)[1])) is None  # each image counts
