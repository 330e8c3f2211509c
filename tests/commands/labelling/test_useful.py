"""The photos whose labels help most, compared with scikit-learn's k-means and with a greedy choice by definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from engine.labelling import next as module
from engine.labelling.next import NUM_ROUNDS, WIDTH, far_apart, useful
from tests.support.properties import examples

NO_CLASSES = np.empty((999, 0), np.float32)


def drawn_features(seed: int, count: int, num_groups: int) -> np.ndarray:
    """Return features [count, 3] of different lengths, in groups of different sizes."""
    rng = np.random.default_rng(seed)
    owners = np.sort(rng.integers(num_groups, size=count) * rng.integers(2, size=count))
    features = 2 * rng.normal(size=(num_groups, 3))[owners] + rng.normal(size=(count, 3))
    return (features * rng.uniform(0.5, 2, (count, 1))).astype(np.float32)


def loses_a_cluster(rows: np.ndarray, centres: np.ndarray) -> bool:
    """Return whether a round of k-means leaves a cluster empty. scikit-learn then moves its centre."""
    for _ in range(NUM_ROUNDS):
        owners = ((rows[:, None] - centres) ** 2).sum(2).argmin(1)
        if len(np.unique(owners)) < len(centres):
            return True
        centres = np.stack([rows[owners == number].mean(0) for number in range(len(centres))])
    return False


@given(st.integers(0, 999), st.integers(1, 40), st.integers(1, 6))
@examples(60)
def test_photos_without_guesses_are_nearest_to_the_centres_of_k_means(seed, count, wanted):
    features = drawn_features(seed, count, 4)
    wanted = min(wanted, count)
    found = useful(features, NO_CLASSES[:count], wanted)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert len({*found.tolist()}) == wanted
    start = unit[far_apart(unit, wanted)]
    model = KMeans(wanted, init=start, n_init=1, max_iter=NUM_ROUNDS, tol=0).fit(unit)
    sizes = np.bincount(model.labels_, minlength=wanted)
    if model.n_iter_ < NUM_ROUNDS and not loses_a_cluster(unit, start):
        distances = ((unit - model.cluster_centers_[model.labels_]) ** 2).sum(1)
        for number, row in zip(np.argsort(-sizes, kind="stable"), found, strict=True):
            assert model.labels_[row] == number
            assert distances[row] == pytest.approx(distances[model.labels_ == number].min(), abs=1e-5)


@given(st.integers(0, 999), st.integers(2, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
@examples(60)
def test_each_unsure_photo_adds_most_to_the_covered_doubt(seed, count, wanted, num_unsure, at_once):
    features, wanted = drawn_features(seed, count, 4), min(wanted, count)
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(3), count).astype(np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "NUM_UNSURE", num_unsure)
        patched.setattr(module, "MOST_AT_ONCE", at_once)
        found = useful(features, probabilities, wanted).tolist()
    assert len({*found}) == len(found) == wanted
    centred = features.astype(np.float64) - features.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    doubts = 1 - (np.sort(probabilities)[:, -1] - np.sort(probabilities)[:, -2])
    for start in range(0, wanted, at_once):
        chosen, number = [], min(at_once, wanted - start)
        left = [row for row in np.argsort(-doubts, kind="stable").tolist() if row not in found[:start]]
        unsure = left[: num_unsure * number]

        def covered(rows: list[int], unsure: list[int] = unsure) -> float:
            """Return the sum over the unsure photos of doubt x similarity to the most similar of the rows."""
            similar = np.exp((unit[unsure] @ unit[rows].T - 1) / WIDTH) * doubts[rows]
            return (doubts[unsure] * similar.max(1)).sum()

        for row in found[start : start + number]:
            assert row in unsure
            best = max(covered([*chosen, each]) for each in unsure if each not in chosen)
            chosen.append(row)
            assert covered(chosen) == pytest.approx(best, abs=1e-4)


def test_equal_features_still_give_as_many_photos_as_asked():
    assert len({*useful(np.ones((6, 3), np.float32), NO_CLASSES[:6], 4).tolist()}) == 4
