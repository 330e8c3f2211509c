"""The linear classifier of features equals scikit-learn's, and several kinds of layers compute its logits."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional

from configs.schema import Config
from engine.features.linear import PENALTY, fit_linear, set_classifier
from engine.tasks.labels import LabelTask


def clouds(num_images: int = 90, num_features: int = 12, num_classes: int = 3, seed: int = 0):
    """Return features and classes of overlapping clouds whose scales differ."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(num_classes, size=num_images)
    centres = rng.standard_normal((num_classes, num_features))
    scales = 10 ** rng.uniform(-0.5, 0.5, num_features)
    features = (centres[classes] + rng.standard_normal((num_images, num_features))) * scales
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(classes)


def standardized(features: torch.Tensor) -> np.ndarray:
    numbers = features.double().numpy()
    return (numbers - numbers.mean(0)) / numbers.std(0)


EXACT = {"solver": "newton-cg", "tol": 1e-12, "max_iter": 10_000}


def test_classifier_equals_scikit_learns_logistic_regression():
    features, classes = clouds()
    found = fit_linear(features, classes, 3, functional.cross_entropy)
    standard = standardized(features)
    theirs = LogisticRegression(C=1 / (PENALTY * len(standard)), **EXACT).fit(standard, classes)
    ours = (features.double() @ found.weight.T + found.bias).softmax(1).numpy()
    assert np.abs(ours - theirs.predict_proba(standard)).max() < 1e-6


def test_classifier_of_several_labels_is_one_regression_for_each():
    features, classes = clouds()
    labels = functional.one_hot(classes, 3)
    labels[:, 0] |= labels[:, 1]
    found = fit_linear(features, labels, 3, LabelTask(Config()).start_loss)
    standard = standardized(features)
    for number in range(3):
        theirs = LogisticRegression(C=1 / (PENALTY * len(standard)), **EXACT).fit(standard, labels[:, number])
        ours = (features.double() @ found.weight[number] + found.bias[number]).sigmoid().numpy()
        assert np.abs(ours - theirs.predict_proba(standard)[:, 1]).max() < 1e-6


def test_constant_features_and_classes_without_images_give_finite_weights():
    features, classes = clouds()
    features[:, 3] = 7.0
    found = fit_linear(features, classes, 5, functional.cross_entropy)
    logits = features.double() @ found.weight.T + found.bias
    assert found.weight.isfinite().all() and set(logits.argmax(1).tolist()) == {0, 1, 2}
    alike = fit_linear(torch.ones(4, 6), torch.tensor([0, 1, 1, 1]), 2, functional.cross_entropy)
    assert (alike.weight == 0).all() and alike.bias.softmax(0)[1] == pytest.approx(0.75, abs=1e-5)


@pytest.mark.parametrize(
    "layers",
    [[nn.Linear(12, 3)], [nn.Conv2d(12, 3, 1)], [nn.Linear(6, 3), nn.Linear(6, 3)]],
    ids=["linear", "convolution", "two heads"],
)
def test_layers_compute_the_logits_of_the_classifier(layers):
    features, classes = clouds()
    found = fit_linear(features, classes, 3, functional.cross_entropy)
    set_classifier(layers, found)
    parts = features.split(12 // len(layers), dim=1)
    if isinstance(layers[0], nn.Conv2d):
        parts = [features[:, :, None, None]]
    logits = sum(layer(part).flatten(1) for layer, part in zip(layers, parts, strict=True)) / len(layers)
    wanted = features.double() @ found.weight.T + found.bias
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-3, atol=1e-3)
