"""A linear classifier of frozen features: a logistic regression, which shows how easy a task is before any training."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Half the penalty on the squared weights of standardized features, per image. On three sets of real photos the best
# accuracies lie between 0.03 and 0.3.
PENALTY = 0.1
# Images x features x classes; above it, the regression takes more than half a minute on two cores.
MOST_PRODUCTS = 3e9
FEATURES_OF_AN_OUTPUT = 140  # a decomposition takes as long as another class for each 140 features
LIKE_CONSTANT = 0.01  # features that vary less than this share of the mean deviation count as if they varied so much


class LinearClassifier(NamedTuple):
    weight: Tensor  # float64 [C, D]
    bias: Tensor  # [C]


def fit_linear(
    features: Tensor, targets: Tensor, num_classes: int, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> LinearClassifier:
    """Fit a logistic regression: features [N, D], targets of N images as in Batch. It is the same on every machine.

    `loss_of`: returns the loss of logits and targets, see ClassTask.start_loss.
    """
    features, mean, deviation = standardized(features)
    weight = features.new_zeros(num_classes, features.shape[1], requires_grad=True)
    bias = features.new_zeros(num_classes, requires_grad=True)
    until = {"max_iter": 300, "tolerance_grad": 1e-7, "tolerance_change": 1e-14}
    optimizer = torch.optim.LBFGS([weight, bias], history_size=10, line_search_fn="strong_wolfe", **until)

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = torch.addmm(bias, features, weight.T)
        total = loss_of(logits, targets) + PENALTY / 2 * weight.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(loss)
    weight = weight.detach() / deviation
    return LinearClassifier(weight, bias.detach() - weight @ mean)


# Penalties of a ridge regression, as shares of the mean variance of the features' components.
SHARES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def fit_ridge(features: Tensor, targets: Tensor) -> LinearClassifier:
    """Fit a ridge regression for each column of numbers: features [N, D], targets [N, C], NaN where one is missing.

    Each column has the penalty with the smallest leave-one-out error, which has a closed form.
    """
    targets = targets.double()
    weight = targets.new_zeros(targets.shape[1], features.shape[1])
    bias = targets.new_zeros(targets.shape[1])
    patterns, of_columns = targets.isfinite().T.unique(dim=0, return_inverse=True)
    for number, known in enumerate(patterns):  # columns with the same missing numbers share a decomposition
        columns = torch.nonzero(of_columns == number)[:, 0]
        weight[columns], bias[columns] = _fit_columns(features[known], targets[known][:, columns])
    return LinearClassifier(weight, bias)


def _fit_columns(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights [C, D] and the biases [C] for the numbers of images, of which none is missing."""
    features, mean, deviation = standardized(features)
    squares, rows, directions = decomposed(features)
    tried = leave_one_out((squares, rows), targets, SHARES)
    best = torch.stack([(each - targets).square().mean(0) for each in tried]).argmin(0)
    penalties = squares.new_tensor(SHARES)[best] * squares.sum() / len(targets) + 1e-12
    along = rows.T @ (targets - targets.mean(0)) * squares[:, None].sqrt() / (squares[:, None] + penalties)
    weight = (directions @ along).T / deviation
    return weight, targets.mean(0) - weight @ mean


def standardized(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [N, D] in float64 with mean 0 and, unless they hardly vary, deviation 1; and both [D]."""
    features = features.double()
    mean, deviation = features.mean(0), features.std(0, correction=0)
    deviation = deviation.clamp(min=LIKE_CONSTANT * float(deviation.mean()) or 1.0)
    return (features - mean) / deviation, mean, deviation


def decomposed(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared singular values of features [N, D], and the vectors of images [N, M] and features [D, M].

    With more images than features they come from the products of the features, in half the time and without components
    that are far smaller than any penalty.
    """
    if len(features) < features.shape[1]:
        rows, values, directions = torch.linalg.svd(features, full_matrices=False)
        return values.square(), rows, directions.T
    squares, directions = torch.linalg.eigh(features.T @ features)
    is_used = squares > 1e-12 * squares[-1]
    squares, directions = squares[is_used], directions[:, is_used]
    return squares, features @ directions / squares.sqrt(), directions


def leave_one_out(components: tuple[Tensor, Tensor], targets: Tensor, penalties: Sequence[float]) -> Iterator[Tensor]:
    """Yield the prediction of each row of the targets [N, C] by ridge regressions of all other rows, for each penalty.

    `components`: the variances [M] and unit vectors [N, M]; `penalties`: shares of the mean variance.
    """
    (values, vectors), mean = components, targets.mean(0)
    count = len(targets)
    along, squares = vectors.T @ (targets - mean), vectors.square()
    for penalty in penalties:
        shares = values / (values + penalty * values.sum() / count + 1e-12)
        fitted = mean + vectors @ (shares[:, None] * along)
        # How much each image's own target contributes to its prediction. Without this part, the prediction is exact.
        own = (1 / count + squares @ shares).clamp(max=0.999)[:, None]
        yield (fitted - own * targets) / (1 - own)


@torch.no_grad()
def set_classifier(layers: list[nn.Module], classifier: LinearClassifier) -> None:
    """Give the layers that compute the logits these weights.

    Several layers read parts of the features; their mean counts.
    """
    widths = [layer.weight[0].numel() for layer in layers]
    for layer, weight in zip(layers, classifier.weight.split(widths, dim=1), strict=True):
        layer.weight.copy_(len(layers) * weight.reshape(layer.weight.shape))
        layer.bias.copy_(classifier.bias)
