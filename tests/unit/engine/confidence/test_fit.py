"""The temperature and the measures of calibration, compared with scipy and with definitions written out."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

from engine.confidence import temperature as module
from engine.confidence.temperature import Likelihood, confidence_curve, expected_error, fit_temperature, reliability
from engine.tasks.labels import OfLabels

PRIOR_VARIANCE = 0.25
CLASSES, LABELS = Likelihood(), OfLabels()


def draw(num_images: int, num_classes: int, temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and labels for which `temperature` is the true temperature."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(num_images, num_classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)  # a draw from the softmax of each row
    return (temperature * logits).astype(np.float32), labels


def posterior(log_temperature: float, logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean negative log posterior, in float64."""
    scaled = logits.astype(np.float64) / math.exp(log_temperature)
    if targets.ndim == 1:
        losses = -log_softmax(scaled, 1)[np.arange(len(targets)), targets]
    else:
        losses = -(targets * np.log(expit(scaled)) + ~targets * np.log(expit(-scaled)))[:, 0]
    return losses.mean() + log_temperature**2 / (2 * PRIOR_VARIANCE * len(targets))


def best_by_scipy(logits: np.ndarray, targets: np.ndarray) -> float:
    found = minimize_scalar(posterior, (-0.5, 0.5), args=(logits, targets), tol=1e-12)
    return math.exp(found.x)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.5])
@pytest.mark.parametrize("size", [(10, 2), (400, 7), (3000, 100)], ids=str)
def test_fitted_temperature_equals_scipys_minimum(size, temperature):
    logits, labels = draw(*size, temperature)
    assert fit_temperature(logits, labels, CLASSES) == pytest.approx([best_by_scipy(logits, labels)], abs=1e-6)


def test_fit_in_parts_equals_fit_on_all_images(monkeypatch):
    logits, labels = draw(2000, 10, 1.7)
    whole = fit_temperature(logits, labels, CLASSES)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 70)
    assert fit_temperature(logits, labels, CLASSES) == pytest.approx(whole, abs=1e-7)


def test_several_labels_each_get_scipys_temperature():
    logits, _ = draw(500, 4, 1.0)
    rng = np.random.default_rng(1)
    targets = rng.random(logits.shape) < expit(logits / [0.5, 1.0, 2.0, 4.0])
    targets[:, 3] = False  # a label that no validation image has
    found = fit_temperature(logits, targets, LABELS)
    for number, temperature in enumerate(found):
        column = slice(number, number + 1)
        assert temperature == pytest.approx(best_by_scipy(logits[:, column], targets[:, column]), abs=1e-6)


@pytest.mark.parametrize("num_images", [10, 300])
def test_temperature_stays_moderate_if_all_images_are_right(num_images):
    labels = np.arange(num_images) % 3
    logits = np.where(np.arange(3) == labels[:, None], 6.0, 0.0).astype(np.float32)
    (found,) = fit_temperature(logits, labels, CLASSES)
    assert found == pytest.approx(best_by_scipy(logits, labels), abs=1e-6) and 0.4 < found < 1


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "bound"), [(1e-4, module.LOWEST), (1e4, module.HIGHEST)])
def test_fit_never_leaves_its_bounds(scale, bound):
    logits, labels = draw(50_000, 3, 1.0)
    assert fit_temperature(scale * logits, labels, CLASSES) == pytest.approx([bound], rel=1e-4)


def test_measures_equal_their_definitions():
    logits, labels = draw(300, 5, 0.4)
    shares = softmax(logits.astype(np.float64) / 1.7, axis=1)
    measured = CLASSES.measure(logits, labels, np.array([1.7]))
    assert measured.confidences == pytest.approx(shares.max(1))
    assert (measured.are_right == (shares.argmax(1) == labels)).all()
    assert measured.losses.mean() == pytest.approx(-np.log(shares[np.arange(300), labels]).mean())
    bins = reliability(measured)
    places = np.minimum((shares.max(1) * 15).astype(int), 14)
    gaps = [abs((shares.max(1) - (shares.argmax(1) == labels))[places == each].sum()) for each in np.unique(places)]
    assert expected_error(bins) == pytest.approx(sum(gaps) / 300) and sum(count for *_, count in bins) == 300


def test_measures_of_several_labels_cover_all_image_label_pairs():
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(size=(40, 3)).astype(np.float32), rng.random((40, 3)) < 0.3
    temperature = np.array([0.5, 1.0, 2.0])
    shares = expit(logits / temperature)
    measured = LABELS.measure(logits, targets, temperature)
    assert measured.confidences == pytest.approx(shares.ravel()) and (measured.are_right == targets.ravel()).all()
    assert measured.losses.mean() == pytest.approx(-np.log(np.where(targets, shares, 1 - shares)).mean())


def test_certain_predictions_have_finite_losses():
    logits = np.array([[200.0, -200.0], [-200.0, 200.0]], np.float32)
    assert CLASSES.measure(logits, np.array([0, 0]), np.ones(1)).losses == pytest.approx([0, 400])
    assert LABELS.measure(logits, logits < 0, np.ones(1)).losses.mean() == pytest.approx(200)


@pytest.mark.parametrize("num_images", [1000, 1001, 5000])
def test_curve_counts_right_images_at_each_confidence(num_images):
    logits, labels = draw(num_images, 4, 1.0)
    logits[:20] = logits[0]  # images with equal confidence count together
    measured = CLASSES.measure(logits, labels, np.ones(1))
    curve = confidence_curve(measured)
    assert len(curve) == min(len(set(measured.confidences)), 1000) and curve == sorted(curve, reverse=True)
    for confidence, number, right in curve:
        chosen = measured.confidences >= confidence
        assert (number, right) == (chosen.sum(), measured.are_right[chosen].sum())
    assert curve[-1][1] == num_images and curve[0][0] == measured.confidences.max()
