"""k-NN accuracy, compared with scikit-learn's classifier of all other images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from engine.tasks import features as evaluation
from engine.tasks.features import TEMPERATURE, knn_accuracy
from tests.support.properties import examples


@pytest.mark.slow
@given(st.integers(2, 24), st.integers(2, 4), st.integers(1, 6), st.integers(1, 9), st.integers(0, 999))
@examples(60)
def test_knn_accuracy_is_that_of_scikit_learn_without_the_image(count, classes, neighbours, at_once, seed):
    """The features have different lengths, which do not count."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(classes, size=count)
    features = (rng.normal(size=(count, 3)) + 1.5 * np.eye(4)[targets, :3]) * rng.uniform(0.1, 9, (count, 1))
    right = 0
    for image in range(count):
        others = np.arange(count) != image
        model = KNeighborsClassifier(
            min(neighbours, count - 1), metric="cosine", weights=lambda distances: np.exp((1 - distances) / TEMPERATURE)
        )
        right += model.fit(features[others], targets[others]).predict(features[[image]])[0] == targets[image]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluation, "NEIGHBOURS", neighbours)
        patched.setattr(evaluation, "ROWS_AT_ONCE", at_once)
        assert knn_accuracy(features, targets) == pytest.approx(100 * right / count)
