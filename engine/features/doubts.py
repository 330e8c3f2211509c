"""Doubtful labels: how probably each label of a data set is wrong, by features of a model or by its predictions.

A ridge regression of the features predicts the label of each image from all other images. Its leave-one-out predictions
have a closed form. A model of two causes then explains the labels: a label is drawn from the probabilities of the
prediction, or, with a small probability, it was mistaken for another class. Maximum likelihood gives the number of wrong
labels, with an interval, and the probability that each label is wrong. Nothing is drawn at random.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LIKE_CONSTANT = 0.01  # as in linear.py
PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # shares of the mean variance of the kernel's components
# Images that represent all others in the kernel. More take longer; with 1,000, precisions fall by up to 0.05.
MOST_LANDMARKS = 2000
# Share of the mistakes that follow the model's confusions; the others go to any class with the same probability. Real
# mistakes are of both kinds. With 0 and similar classes, the expected numbers are a quarter too small.
CONFUSED = 0.5
DROP = 1.92  # of the log-likelihood at both ends of a 95% interval
FEWEST = 0.05  # wrong labels that count as none
MOST_WRONG = 0.4  # of all labels; if half could be wrong, features without information would make all labels doubtful
SMALLEST = 1e-6  # probability in a table, which rounds
MOST_JUDGED = 50_000  # images x classes; above it, judging labels takes more than some seconds on one core
START = -3.0  # log-odds of a wrong label at the start of a fit; at much lower values the likelihood is flat


class Doubts(NamedTuple):
    """The judgement of each label. Images that could not be judged have the probability 0."""

    wrong: np.ndarray  # float64 [N]: probability that the label is wrong
    suggestions: np.ndarray  # int64 [N]: the most probable other class
    confidences: np.ndarray  # float64 [N]: probability of the suggestion
    # bool [N]: another class is predicted, and the label is rather wrong than right if as many are wrong as may be
    is_doubtful: np.ndarray
    is_judged: np.ndarray  # bool [N]
    num_correct: int  # judged images whose label is predicted from the other images
    expected: tuple[float, float, float]  # wrong labels: lower end of the 95% interval, estimate, upper end

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, int(self.is_judged.sum()))

    @property
    def ranked(self) -> np.ndarray:
        """Return the numbers of the images with doubtful labels, the most doubtful first."""
        found = np.flatnonzero(self.is_doubtful)
        return found[np.argsort(-self.wrong[found], kind="stable")]


def judge_labels(
    labels: np.ndarray,
    num_classes: int,
    features: np.ndarray | None = None,
    probabilities: np.ndarray | None = None,
) -> Doubts:
    """Judge labels [N] by features [N, D], by probabilities [N, C] from models not trained on the image, or by both.

    A row of NaN means that an image has none. Either the images with features or those with probabilities are judged,
    whichever are more; both count if all these images have both. On 469 photos of which a run had judged a fifth, adding
    its predictions to this fifth lowered the average precision from 0.85 to 0.78, because few images set their weight.
    """
    has_features, has_probabilities = (
        np.zeros(len(labels), bool) if each is None else np.isfinite(each).all(1) for each in (features, probabilities)
    )
    uses_features = has_features.sum() >= has_probabilities.sum()
    known = np.flatnonzero(has_features if uses_features else has_probabilities)
    counts = np.bincount(labels[known], minlength=num_classes)
    # Features say nothing about the only image of a class. A model was trained on others.
    classes = np.flatnonzero(counts >= (2 if uses_features else 0))
    places = np.flatnonzero(np.isin(labels[known], classes))
    rows = known[places]
    count = len(labels)
    empty = np.zeros(count), np.zeros(count, np.int64), np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
    found = Doubts(*empty, 0, (0.0, 0.0, 0.0))
    if len(classes) < 2 or not len(rows):
        return found
    given: list[Tensor] = []
    if has_probabilities[known].all():
        given = [torch.from_numpy(np.log(np.maximum(probabilities[np.ix_(rows, classes)], SMALLEST)))]
    sets = iter([given])
    if uses_features:
        parts = components(torch.from_numpy(features[known]))
        if not len(parts[0]):  # all images have equal features
            return found
        targets = torch.from_numpy(labels[known][:, None] == classes).double()
        predicted = leave_one_out(parts, targets)
        sets = ([each[places], *given] for each in predicted)
    part = _judge(labels[rows], classes, sets)
    for whole, each in zip(found[:5], part[:5], strict=True):
        whole[rows] = each
    return Doubts(*found[:5], *part[5:])


def describe_doubts(labels: np.ndarray, num_classes: int, features: np.ndarray) -> str:
    """Return how many labels are probably wrong by the features, or "" if none are, or if judging them takes long."""
    if labels.ndim == 2 or len(labels) * num_classes > MOST_JUDGED:  # 2: several labels
        return ""
    low, number, high = judge_labels(labels, num_classes, features).expected
    if low == 0:
        return ""
    return f"about {number:,.0f} of {len(labels):,} labels are probably wrong (95%: {low:,.0f} to {high:,.0f})"


# --- leave-one-out predictions ---


def leave_one_out(components: tuple[Tensor, Tensor], targets: Tensor) -> Iterator[Tensor]:
    """Yield the prediction of each row of the targets [N, C] by ridge regressions of all other rows, for each penalty."""
    (values, vectors), mean = components, targets.mean(0)
    count = len(targets)
    along, squares = vectors.T @ (targets - mean), vectors.square()
    for penalty in PENALTIES:
        shares = values / (values + penalty * values.sum() / count + 1e-12)
        found = mean + (vectors * shares) @ along
        # How much each image's own target contributes to its prediction. Without this part, the prediction is exact.
        own = (1 / count + squares @ shares).clamp(max=0.999)[:, None]
        yield (found - own * targets) / (1 - own)


def components(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the principal components of images in the space of a kernel: variances [M] and unit vectors [N, M].

    The kernel has degree 2 in the cosine of standardized features, so that a class can be more than a half-space.
    """
    features = features.double()
    deviation = features.std(0, correction=0)
    features = (features - features.mean(0)) / deviation.clamp(min=LIKE_CONSTANT * float(deviation.mean()) or 1.0)
    features = features / features.shape[1] ** 0.5
    count = len(features)
    landmarks = torch.linspace(0, count - 1, min(count, MOST_LANDMARKS)).round().long()
    lengths = features.norm(dim=1).clamp(min=1e-6)
    products = features @ features[landmarks].T
    # Long rows are images with strong features. The root of the lengths keeps half of this in the kernel.
    scales = (lengths[:, None] * lengths[landmarks]).sqrt()
    kernel = products * (2 + products / scales.square()) / scales
    of_landmarks = kernel[landmarks]
    of_landmarks.diagonal().add_(1e-6 * of_landmarks.diagonal().mean() + 1e-12)
    rows = torch.linalg.solve_triangular(torch.linalg.cholesky(of_landmarks), kernel.T, upper=False).T
    rows = rows - rows.mean(0)
    values, basis = torch.linalg.eigh(rows.T @ rows)
    is_used = values > 1e-9 * values[-1]
    values, basis = values[is_used], basis[:, is_used]
    return values, rows @ basis / values.sqrt()


# --- the model of the labels ---


class LabelModel:
    """Explains labels by evidence: a label is the class of the image or, with a small probability, a mistake.

    The logits of the classes are the sum of all evidence, each with its own scale, and of a bias for each class.
    """

    def __init__(self, evidence: list[Tensor], labels: Tensor):
        """`evidence`: scores [N, C] that grow with the probability of a class."""
        count, num_classes = evidence[0].shape
        self.evidence, self.labels = evidence, labels[:, None]
        self.num_scales = len(evidence)
        scales = [-math.log(float(each.std(correction=0)) + 1e-6) for each in evidence]
        # The logarithm of each scale, the log-odds of a wrong label, the bias of each class.
        self.values = torch.tensor([*scales, START, *[0.0] * num_classes], dtype=torch.float64)
        self.fewest = log_odds(FEWEST / count)
        self.loss = math.inf
        other = 1 - torch.eye(num_classes, dtype=torch.float64)
        self.mistakes = other / (num_classes - 1)  # [C, C]: for each class, the labels that its images get by mistake

    def terms(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the share of wrong labels, the probabilities [N, C] of the classes, and for each image the probability
        of its label [N], if the label is right and if it is a mistake."""
        scales, odds, biases = values[: self.num_scales].exp(), values[self.num_scales], values[self.num_scales + 1 :]
        logits = biases + sum(scale * each for scale, each in zip(scales, self.evidence, strict=True))
        shares = logits.softmax(1)
        mistaken = (shares * self.mistakes[:, self.labels[:, 0]].T).sum(1)
        return odds.sigmoid(), shares, shares.gather(1, self.labels)[:, 0], mistaken

    def fit(self, odds: float | None = None) -> tuple[float, Tensor]:
        """Return the smallest loss, minus the log-likelihood, and its values. `odds` fixes the log-odds of a wrong label."""
        start = self.values.clone()
        start[self.num_scales] = START if odds is None else odds
        values = start.requires_grad_()
        optimizer = torch.optim.LBFGS(
            [values], max_iter=100, tolerance_grad=1e-3, tolerance_change=1e-9, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            rate, _, right, mistaken = self.terms(values)
            total = -((1 - rate) * right + rate * mistaken).clamp(min=1e-300).log().sum()
            total = total + values[self.num_scales + 1 :].square().sum() / 2  # a class can have few images
            total.backward()
            if odds is not None:
                values.grad[self.num_scales] = 0
            return total

        with torch.enable_grad():
            optimizer.step(loss)
            return float(loss().detach()), values.detach()

    def learn(self) -> "LabelModel":
        """Fit the model, and return it."""
        self.loss, self.values = self.fit()
        self.values[self.num_scales].clamp_(min=self.fewest)
        return self

    def add_confusions(self) -> None:
        """Let a part of the mistakes follow the model's confusions, and fit again."""
        shares = self.terms(self.values)[1]
        confusions = torch.zeros_like(self.mistakes).index_add_(0, self.labels[:, 0], shares).fill_diagonal_(0)
        confusions = confusions / confusions.sum(1, keepdim=True).clamp(min=1e-300)
        self.mistakes = CONFUSED * confusions + (1 - CONFUSED) * self.mistakes
        self.learn()

    def end_of_interval(self, outside: float) -> Tensor:
        """Return the values at an end of the interval of the log-odds, between the estimate and `outside`."""
        inside, best = float(self.values[self.num_scales]), self.values
        tried = outside
        for _ in range(9):
            loss, values = self.fit(tried)
            if loss - self.loss <= DROP:
                inside, best = tried, values
            else:
                outside = tried
            if inside == outside:
                break
            tried = (inside + outside) / 2
        return best

    def probability_wrong(self, values: Tensor) -> Tensor:
        rate, _, right, mistaken = self.terms(values)
        return rate * mistaken / ((1 - rate) * right + rate * mistaken).clamp(min=1e-300)

    def number_wrong(self, values: Tensor) -> float:
        odds = values[self.num_scales]
        return len(self.labels) * float(odds.sigmoid()) if odds > self.fewest else 0.0


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _judge(labels: np.ndarray, classes: np.ndarray, sets: Iterator[list[Tensor]]) -> Doubts:
    """Judge images with the same kinds of evidence. `sets`: the evidence with each penalty; the most likely one counts."""
    numbers = torch.from_numpy(np.searchsorted(classes, labels))
    model = min((LabelModel(evidence, numbers).learn() for evidence in sets), key=lambda model: model.loss)
    model.add_confusions()
    low, high = model.end_of_interval(model.fewest), model.end_of_interval(log_odds(MOST_WRONG))
    _, shares, _, _ = model.terms(model.values)
    num_correct = int((shares.argmax(1) == numbers).sum())
    confidences, suggestions = shares.scatter(1, model.labels, -1.0).max(1)
    return Doubts(
        model.probability_wrong(model.values).numpy(),
        classes[suggestions.numpy()],
        confidences.numpy(),
        ((model.probability_wrong(high) > 0.5) & (shares.argmax(1) != numbers)).numpy(),
        np.ones(len(labels), bool),
        num_correct,
        tuple(model.number_wrong(values) for values in (low, model.values, high)),
    )
