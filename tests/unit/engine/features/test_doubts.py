"""Judgement of labels: leave-one-out predictions compared with explicit fits, expected number, and difficult sets."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

from engine.features import doubts
from engine.features.doubts import PENALTIES, components, judge_labels
from engine.features.linear import leave_one_out

pytestmark = pytest.mark.slow


def clusters(count: int, num_classes: int, distance: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features [count, 16] of overlapping classes, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % num_classes
    return (distance * rng.normal(size=(num_classes, 16))[labels] + rng.normal(size=(count, 16))), labels


def changed(labels: np.ndarray, number: int, num_classes: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    rows = rng.choice(len(labels), number, replace=False)
    found = labels.copy()
    found[rows] = (labels[rows] + rng.integers(1, num_classes, number)) % num_classes
    return found


def test_components_are_those_of_the_centred_kernel():
    features, _ = clusters(40, 4, 1.0)
    values, vectors = components(torch.from_numpy(features))
    rows = (features - features.mean(0)) / features.std(0) / 4
    lengths = np.linalg.norm(rows, axis=1)
    cosines = rows @ rows.T / np.outer(lengths, lengths)
    kernel = (2 * cosines + cosines**2) * np.sqrt(np.outer(lengths, lengths))
    centre = np.eye(40) - 1 / 40
    np.testing.assert_allclose((vectors * values) @ vectors.T, centre @ kernel @ centre, atol=1e-4)


def test_leave_one_out_equals_fits_without_the_image():
    features, labels = clusters(30, 3, 1.0)
    targets = np.eye(3)[labels]
    values, vectors = found = components(torch.from_numpy(features))
    rows = (vectors * values.sqrt()).numpy()
    for penalty, scores in zip(PENALTIES, leave_one_out(found, torch.from_numpy(targets), PENALTIES), strict=True):
        alpha = penalty * float(values.sum()) / 30
        for image in (0, 7, 29):
            others = np.arange(30) != image
            expected = Ridge(alpha).fit(rows[others], targets[others]).predict(rows[[image]])[0]
            np.testing.assert_allclose(scores[image], expected, atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 6, 30])
def test_interval_contains_the_number_of_wrong_labels(number):
    features, labels = clusters(600, 5, 1.0)
    given = changed(labels, number, 5)
    found = judge_labels(given, 5, features)
    low, estimate, high = found.expected
    assert low <= number <= high < number + 25 and low <= estimate <= high
    assert len(found.ranked) <= 1.5 * number + 1
    assert (np.diff(found.wrong[found.ranked]) <= 0).all()
    assert np.isin(np.flatnonzero(given != labels), found.ranked).sum() >= 0.8 * number
    listed = found.ranked[given[found.ranked] != labels[found.ranked]]
    assert (found.suggestions[listed] == labels[listed]).mean() > 0.9 if number else not len(listed)


@pytest.mark.long
@pytest.mark.parametrize("is_copied", [False, True])
def test_labels_of_copies_are_not_predicted_from_copies(is_copied):
    """A third of the images has a copy, with the label of the original or with mistakes of its own."""
    features, labels = clusters(600, 5, 1.0)
    rows = np.concatenate([np.arange(600), np.arange(0, 600, 3)])
    given = changed(labels, 30, 5)[rows] if is_copied else changed(labels[rows], 40, 5)
    is_wrong = given != labels[rows]
    found = judge_labels(given, 5, features[rows] * (1 + 1e-6 * np.random.default_rng(0).normal(size=(800, 1))))
    assert found.expected[0] <= is_wrong.sum() <= found.expected[2]
    assert average_precision_score(is_wrong, found.wrong) > 0.85
    assert found.num_different == 600


@pytest.mark.long
def test_order_of_the_images_does_not_change_the_number(monkeypatch):
    monkeypatch.setattr(doubts, "MOST_LANDMARKS", 50)
    features, labels = clusters(200, 4, 0.7)
    given = changed(labels, 20, 4)
    order = np.random.default_rng(0).permutation(200)
    one, other = judge_labels(given, 4, features), judge_labels(given[order], 4, features[order])
    np.testing.assert_allclose(one.expected, other.expected, atol=0.1)


def test_estimate_is_in_its_interval_if_most_labels_are_wrong():
    features, labels = clusters(60, 2, 3.0)
    low, estimate, high = judge_labels(np.where(np.arange(60) < 28, 1 - labels, labels), 2, features).expected
    assert low <= estimate <= high


@pytest.mark.long
def test_few_images_have_no_estimate():
    features, labels = clusters(40, 2, 3.0)
    assert not judge_labels(np.tile(labels, 2), 2, np.tile(features, (2, 1))).is_estimated
    features, labels = clusters(60, 2, 3.0)
    assert judge_labels(labels, 2, features).is_estimated


@pytest.mark.long
def test_ranking_is_at_least_that_of_a_logistic_regression():
    features, labels = clusters(400, 5, 0.7)
    given = changed(labels, 20, 5)
    wrong = given != labels
    shares = cross_val_predict(LogisticRegression(max_iter=1000), features, given, cv=5, method="predict_proba")
    reference = average_precision_score(wrong, -shares[np.arange(400), given])
    assert average_precision_score(wrong, judge_labels(given, 5, features).wrong) >= reference


@pytest.mark.long
def test_predictions_and_features_together_find_more():
    features, labels = clusters(400, 4, 0.6)
    given = changed(labels, 20, 4)
    logits = np.random.default_rng(2).normal(size=(400, 4)) + 2.5 * np.eye(4)[labels]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    alone = [judge_labels(given, 4, features), judge_labels(given, 4, None, shares)]
    both = judge_labels(given, 4, features, shares)
    precision = [average_precision_score(given != labels, each.wrong) for each in (*alone, both)]
    assert precision[2] > max(precision[:2])
    assert both.accuracy > max(each.accuracy for each in alone)


@pytest.mark.long
def test_predictions_for_few_images_do_not_replace_features_of_all():
    features, labels = clusters(100, 2, 1.0)
    shares = np.full((100, 2), np.nan)
    shares[:20] = 0.5
    found, alone = judge_labels(labels, 2, features, shares), judge_labels(labels, 2, features)
    assert all(np.array_equal(*each) for each in zip(found, alone, strict=True)) and found.uses_features
    few = np.where(np.arange(100)[:, None] < 10, features, np.nan)
    assert not judge_labels(labels, 2, few, shares).uses_features


def test_unreadable_images_and_single_images_are_not_judged():
    features, labels = clusters(60, 3, 1.0)
    labels = np.where(labels == 2, 3, labels)  # class 2 has no images
    labels[[4, 5]] = 4, 5
    labels[[7, 8]] = 6
    features[9] = np.nan
    features[11], labels[[10, 11]] = features[10], 7  # the only image of its class, twice
    found = judge_labels(labels, 8, features)
    assert np.flatnonzero(~found.is_judged).tolist() == [4, 5, 9, 10, 11]
    assert not found.wrong[[4, 5, 9, 10, 11]].any() and np.isfinite(found.wrong).all()
    assert not np.isin(found.suggestions[found.is_judged], [2, 4, 5, 7]).any()


@pytest.mark.slow
@pytest.mark.parametrize("features", [np.ones((40, 8)), np.zeros((40, 8)), np.eye(40)])
def test_features_that_say_nothing_make_no_label_doubtful(features):
    found = judge_labels(np.arange(40) % 2, 2, features)
    assert not found.is_doubtful.any() and np.isfinite(found.wrong).all()


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2], [0]])
def test_set_without_two_classes_to_compare_is_not_judged(labels):
    found = judge_labels(np.array(labels), 3, np.random.default_rng(0).normal(size=(len(labels), 4)))
    assert not found.is_judged.any() and found.expected == (0, 0, 0) and found.accuracy == 0


@pytest.mark.long
def test_number_of_wrong_labels_is_unknown_if_features_say_nothing_of_them():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 400)
    guesses = judge_labels(labels, 5, probabilities=rng.dirichlet(np.ones(5), 400))
    assert guesses.is_estimated and guesses.is_unknown
    assert guesses._replace(expected=(160.0, 160.0, 160.0)).is_unknown
    right = np.where(rng.random(400) < 0.95, labels, (labels + 1) % 5)
    assert not judge_labels(labels, 5, probabilities=0.9 * np.eye(5)[right] + 0.02).is_unknown
