"""Doubtful labels: how probably each label of a data set is wrong, by features of a model or by its predictions.

A ridge regression of the features predicts the label of each image from all other images. Its leave-one-out predictions
have a closed form. A model of two causes then explains the labels: a label is drawn from the probabilities of the
prediction, or, with a small probability, it was mistaken for another class. Maximum likelihood gives the number of
wrong labels, with an interval, and the probability that each label is wrong. Nothing is drawn at random.

Copies, images with equal features, count as one image with several labels, so no label is predicted from a copy. Near
copies (saved again, resized, cropped) count as different images: on 100 photos, their features differ by 0.2 to 1.3 of
their length, and so do those of different stamps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.features import linear
from engine.features.compute import ImageFeatures
from engine.features.linear import decomposed, leave_one_out

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
# Features that differ by less of their length are those of copies; equal pixels in two batches differ by 1e-6.
EQUAL = 0.01
NUM_NEIGHBOURS = 32  # with which the features of an image are compared, in the order of the sums of their features
# Different images without which no number is named. With 10 to 30 images, the estimate was up to five times too large,
# and warnings came for right labels; with 40 and more, no longer.
FEWEST_JUDGED = 50
WIDE = 5.0  # deviation of the prior of the log-odds that labels were copied
START = -3.0  # log-odds of a wrong label at the start of a fit; at much lower values the likelihood is flat


class Doubts(NamedTuple):
    """The judgement of each label. Images that could not be judged have the probability 0."""

    wrong: np.ndarray  # float64 [N]: probability that the label is wrong
    suggestions: np.ndarray  # int64 [N]: the most probable other class
    confidences: np.ndarray  # float64 [N]: probability of the suggestion
    # bool [N]: another class is more probable than the label, and the label is probably wrong if the number of wrong
    # labels is at the upper end of its interval
    is_doubtful: np.ndarray
    is_judged: np.ndarray  # bool [N]
    num_correct: int  # judged images whose label is predicted from the other images
    expected: tuple[float, float, float]  # wrong labels: lower end of the 95% interval, estimate, upper end
    num_different: int = 0  # judged images, with copies counted once
    uses_features: bool = False

    @property
    def is_estimated(self) -> bool:
        """Return whether there are enough images for an estimate of the number of wrong labels."""
        return self.num_different >= FEWEST_JUDGED

    @property
    def is_unknown(self) -> bool:
        """Return whether the number of wrong labels may be anything, because features say nothing about labels."""
        limit = 0.99 * MOST_WRONG * int(self.is_judged.sum())
        low, _, high = self.expected
        return high >= limit and (low == 0 or low >= limit)

    @property
    def accuracy(self) -> float:
        return self.num_correct / max(1, int(self.is_judged.sum()))

    @property
    def ranked(self) -> np.ndarray:
        """Return the numbers of the images with doubtful labels, the most doubtful first."""
        doubtful = np.flatnonzero(self.is_doubtful)
        return doubtful[np.argsort(-self.wrong[doubtful], kind="stable")]


def judge_labels(
    labels: np.ndarray,
    num_classes: int,
    features: np.ndarray | None = None,
    probabilities: np.ndarray | None = None,
) -> Doubts:
    """Judge labels [N] by features [N, D], by probabilities [N, C] from models not trained on the image, or by both.

    A row of NaN means that an image has none. Either the images with features or those with probabilities are judged,
    whichever are more; both count if all these images have both. On 469 photos of which a run had judged a fifth,
    adding its predictions to this fifth lowered the average precision from 0.85 to 0.78, because few images set their
    weight.
    """
    has_features, has_probabilities = (
        np.zeros(len(labels), bool) if values is None else np.isfinite(values).all(1)
        for values in (features, probabilities)
    )
    uses_features = has_features.sum() >= has_probabilities.sum()
    known = np.flatnonzero(has_features if uses_features else has_probabilities)
    copies = group_copies(features[known]) if uses_features else np.arange(len(known))
    pairs = np.unique(np.stack([labels[known], copies]), axis=1)  # copies of one image say nothing about each other
    counts = np.bincount(pairs[0], minlength=num_classes)
    # Features say nothing about the only image of a class. A model was trained on others.
    classes = np.flatnonzero(counts >= (2 if uses_features else 0))
    places = np.flatnonzero(np.isin(labels[known], classes))
    rows = known[places]
    count = len(labels)
    empty = np.zeros(count), np.zeros(count, np.int64), np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
    doubts = Doubts(*empty, 0, (0.0, 0.0, 0.0))
    if len(classes) < 2 or len(np.unique(copies[places])) < 2:
        return doubts
    by_model: list[Tensor] = []
    if has_probabilities[known].all():
        logs = np.log(np.maximum(probabilities[np.ix_(known, classes)], SMALLEST))
        by_model = [mean_of_copies(torch.from_numpy(logs), copies)]
    sets = iter([by_model])
    if uses_features:
        targets = torch.from_numpy(labels[known][:, None] == classes).double()
        sets = ([values, *by_model] for values in predicted_without(features[known], copies, targets))
    part = _judge(labels[rows], classes, sets, copies[places])
    for whole, values in zip(doubts[:5], part[:5], strict=True):
        whole[rows] = values
    return Doubts(*doubts[:5], *part[5:])._replace(uses_features=bool(uses_features))


def predicted_without(features: np.ndarray, copies: np.ndarray, targets: Tensor) -> Iterator[Tensor]:
    """Yield for each penalty the predictions [G, C] of groups of copies by the features of all others.

    `features`: [N, D]; `copies`: the group of each image; `targets`: [N, C].
    """
    firsts = np.unique(copies, return_index=True)[1]
    parts = components(torch.from_numpy(features[firsts]))
    return leave_one_out(parts, mean_of_copies(targets, copies), PENALTIES)


def describe_doubts(parts: Sequence[ImageFeatures], num_classes: int) -> str:
    """Return how many labels of these images are probably wrong by their features.

    The result is "" if none are, if there are too few images, or if judging them takes long.
    """
    labels = np.concatenate([part.targets for part in parts])
    features = np.concatenate([part.joined for part in parts])
    if labels.ndim == 2 or len(labels) * num_classes > MOST_JUDGED:  # 2: several labels
        return ""
    doubts = judge_labels(labels, num_classes, features)
    low, number, high = doubts.expected
    if low == 0 or not doubts.is_estimated or doubts.is_unknown:
        return ""
    return f"about {number:,.0f} of {len(labels):,} labels are probably wrong (95%: {low:,.0f} to {high:,.0f})"


# --- copies ---


def group_copies(features: np.ndarray) -> np.ndarray:
    """Return the number of the group of copies of each image, int64 [N], the same in any order of the images."""
    rows = standardized(torch.from_numpy(features))
    sums, lengths = rows.sum(1) / rows.shape[1] ** 0.5, rows.norm(dim=1)
    order = sums.argsort()
    rows, sums, limits = rows[order], sums[order], EQUAL * lengths[order]
    first = torch.arange(len(rows))
    for step in range(1, min(NUM_NEIGHBOURS, len(rows) - 1) + 1):
        # The sums of rows differ at most as much as the rows.
        near = (sums[step:] - sums[:-step] <= limits[step:]).nonzero()[:, 0]
        near = near[(rows[near + step] - rows[near]).norm(dim=1) <= limits[near + step]]
        first[near + step] = near
    while (first[first] != first).any():
        first = first[first]
    groups = np.empty(len(rows), np.int64)
    groups[order.numpy()] = np.unique(first.numpy(), return_inverse=True)[1]
    return groups


def mean_of_copies(values: Tensor, copies: np.ndarray) -> Tensor:
    """Return the mean of the values [N, C] of each group of copies."""
    groups = torch.from_numpy(copies)
    counts = groups.bincount()
    return values.new_zeros(len(counts), values.shape[1]).index_add(0, groups, values) / counts[:, None]


# --- the kernel ---


def components(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the principal components of images in the space of a kernel: variances [M] and unit vectors [N, M].

    The kernel has degree 2 in the cosine of standardized features, so that a class can be more than a half-space.
    """
    features = standardized(features)
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
    return decomposed(rows - rows.mean(0))[:2]


def standardized(features: Tensor) -> Tensor:
    """Return the features as float64 with mean 0 and, unless they hardly vary, mean square 1 / D."""
    return linear.standardized(features)[0] / features.shape[1] ** 0.5


# --- the model of the labels ---


class LabelModel:
    """Explains labels by evidence: a label is the class of the image or, with a small probability, a mistake.

    The logits of the classes are the sum of all evidence, each with its own scale, and of a bias for each class.
    """

    def __init__(self, evidence: list[Tensor], labels: Tensor, copies: Tensor):
        """`evidence`: scores [G, C] that grow with the probability of a class, for each group of copies.

        `copies`: the group of each label, [N].
        """
        count, num_classes = evidence[0].shape
        self.evidence, self.labels, self.copies = evidence, labels[:, None], copies
        chosen = torch.zeros(count, num_classes, dtype=torch.float64)
        chosen[copies, labels] = 1.0
        self.is_agreed = (copies.bincount(minlength=count) > 1) & (chosen.sum(1) == 1)  # copies with one label
        self.is_divided = chosen.sum(1) > 1
        self.label = chosen.argmax(1)  # of a group, if it is agreed
        self.num_scales = len(evidence)
        scales = [-math.log(float(each.std(correction=0)) + 1e-6) for each in evidence]
        # In order: the logarithm of each scale, the log-odds of a wrong label, the log-odds that a picture was copied
        # together with its label (otherwise, each copy was labelled separately), and the bias of each class.
        self.values = torch.tensor([*scales, START, 0.0, *[0.0] * num_classes], dtype=torch.float64)
        self.fewest = log_odds(FEWEST / len(labels))
        self.loss = math.inf
        other = 1 - torch.eye(num_classes, dtype=torch.float64)
        self.mistakes = other / (num_classes - 1)  # [C, C]: for each class, the labels that its images get by mistake

    def terms(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms [G, C] of the probabilities of the classes, and of these times that of the labels."""
        scales, (odds, odds_copied) = values[: self.num_scales].exp(), values[self.num_scales : self.num_scales + 2]
        biases = values[self.num_scales + 2 :]
        logits = biases + sum(scale * each for scale, each in zip(scales, self.evidence, strict=True))
        shares, rate = logits.log_softmax(1), odds.sigmoid()
        is_right = torch.eye(len(biases), dtype=torch.float64)
        mistaken = ((1 - rate) * is_right + rate * self.mistakes).clamp(min=1e-300).log().T  # [label, class]
        of_labels = torch.zeros_like(shares).index_add(0, self.copies, mistaken[self.labels[:, 0]])
        # Copies with different labels were labelled by themselves.
        apart = of_labels + (self.is_divided * logsigmoid(-odds_copied))[:, None]
        copied = torch.logaddexp(of_labels + logsigmoid(-odds_copied), mistaken[self.label] + logsigmoid(odds_copied))
        return shares, shares + torch.where(self.is_agreed[:, None], copied, apart)

    def shares(self) -> Tensor:
        """Return the probabilities of the classes for each label, [N, C], by the evidence."""
        return self.terms(self.values)[0].exp()[self.copies]

    def fit(self, odds: float | None = None) -> tuple[float, Tensor]:
        """Return the smallest loss, minus the log-likelihood, and its values.

        `odds` fixes the log-odds of a wrong label.
        """
        start = self.values.clone()
        start[self.num_scales] = START if odds is None else odds
        values = start.requires_grad_()
        optimizer = torch.optim.LBFGS(
            [values], max_iter=100, tolerance_grad=1e-3, tolerance_change=1e-9, line_search_fn="strong_wolfe"
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            total = -self.terms(values)[1].logsumexp(1).sum()
            copied, biases = values[self.num_scales + 1], values[self.num_scales + 2 :]
            # A class can have few images, and a set few copies.
            total = total + biases.square().sum() / 2 + (copied / WIDE).square() / 2
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
        if self.values[self.num_scales] > log_odds(MOST_WRONG):
            self.loss, self.values = self.fit(log_odds(MOST_WRONG))
        self.values[self.num_scales].clamp_(min=self.fewest)
        return self

    def add_confusions(self) -> None:
        """Let a part of the mistakes follow the model's confusions, and fit again."""
        shares = self.shares()
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
        return 1 - self.terms(values)[1].softmax(1)[self.copies].gather(1, self.labels)[:, 0]

    def number_wrong(self, values: Tensor) -> float:
        odds = values[self.num_scales]
        return len(self.labels) * float(odds.sigmoid()) if odds > self.fewest else 0.0


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def _judge(labels: np.ndarray, classes: np.ndarray, sets: Iterator[list[Tensor]], copies: np.ndarray) -> Doubts:
    """Judge images with the same kinds of evidence. `sets`: the evidence with each penalty; the most likely one counts.

    `copies`: the group of each image, a row of the evidence.
    """
    numbers, groups = torch.from_numpy(np.searchsorted(classes, labels)), torch.from_numpy(copies)
    model = min((LabelModel(evidence, numbers, groups).learn() for evidence in sets), key=lambda model: model.loss)
    model.add_confusions()
    low, high = model.end_of_interval(model.fewest), model.end_of_interval(log_odds(MOST_WRONG))
    shares = model.shares()
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
        len(np.unique(copies)),
    )
