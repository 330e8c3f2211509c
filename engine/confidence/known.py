"""Tells photos of a model's classes from photos of something else, by statistics that are stored with its weights.

The score adds up the confidence and two distances to validation images. What the classifier reads shows unknown
classes, by the distance to the nearest image. The mean output of a layer in the middle shows other kinds of pictures,
by the Mahalanobis distance to all images. BENCHMARKS.md, "Strangers", compares the score with six other methods.
"""

import base64
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.parts import classifier_names
from utils.errors import ConfigError

LIKE_ROUNDING = 1e-4  # relative noise, a little more than that of rounding
# Such noise moves a score by less, unless images are so much alike that rounding decides their scores.
MOST_MOVED = 0.05


# --- features ---


class TappedFeatures(NamedTuple):
    """What the score of a batch of images is computed from."""

    read: Tensor  # [B, D], what the classifier reads
    middle: Tensor  # [B, E], the mean output of a layer in the middle
    logits: Tensor  # [B, classes], not divided by the temperature


def middle_of(num_layers: int) -> int:
    """Return the index of the layer in the middle whose output the score uses."""
    return max(min(num_layers * 2 // 3, num_layers - 2), 0)  # the last layer of a ViT computes only what is read


class Tap:
    """Keeps the features of each batch that a model computes."""

    def __init__(self, model: nn.Module):
        self._kept: dict[str, Tensor] = {}
        try:
            layers = list(model.feature_info)
            layer = layers[middle_of(len(layers))]
            self._width, middle = layer["num_chs"], model.get_submodule(layer["module"])
            head = model.get_submodule(classifier_names(model)[0])
        except (AttributeError, IndexError, KeyError):
            raise ConfigError(f"timm does not name the layers of {type(model).__name__}") from None
        self._hooks = (head.register_forward_hook(self._keep_read), middle.register_forward_hook(self._keep_middle))

    def __deepcopy__(self, memo: dict) -> "Tap":
        return self  # the half-precision copy of a model has the same tap

    def _keep_read(self, head: nn.Module, inputs: tuple, logits: Tensor) -> None:
        self._kept |= {"read": inputs[0].flatten(1).float(), "logits": logits.flatten(1).float()}

    def _keep_middle(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        if not isinstance(output, Tensor):  # several branches, as in HRNet
            return
        channels_first = output.ndim == 4 and output.shape[1] == self._width
        places = range(2, 4) if channels_first else range(1, output.ndim - 1)
        self._kept["middle"] = output.float().mean(tuple(places))

    def take(self) -> TappedFeatures:
        """Return the features of the newest batch."""
        kept, self._kept = self._kept, {}
        if len(kept) < len(TappedFeatures._fields):
            raise ConfigError("this model does not show the output of a layer in the middle")
        return TappedFeatures(**kept)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


# --- scores ---


class Neighbours(nn.Module):
    """The distance to the nearest of some images, of features that are scaled to length 1."""

    def __init__(self, images: Tensor):
        """`images`: their features [N, D]."""
        super().__init__()
        self.register_buffer("images", functional.normalize(images.float()))

    def forward(self, features: Tensor) -> Tensor:
        return distance_of(functional.normalize(features) @ self.images.T)


def distance_of(cosines: Tensor) -> Tensor:
    """Return the smallest distance in each row, for cosines [B, N] of vectors of length 1."""
    return (2 - 2 * cosines.amax(1)).clamp(min=0).sqrt()


class Spread(nn.Module):
    """The Mahalanobis distance to some images."""

    def __init__(self, mean: Tensor, directions: Tensor, weights: Tensor, rest: Tensor):
        """`weights` [k] are the inverse variances along the columns of `directions` [E, k].

        `rest`: along all others.
        """
        super().__init__()
        for name, value in (("mean", mean), ("directions", directions), ("weights", weights), ("rest", rest)):
            self.register_buffer(name, value.float())

    def forward(self, features: Tensor) -> Tensor:
        place = features - self.mean
        squares = (place @ self.directions).square()
        others = (place.square().sum(1) - squares.sum(1)).clamp(min=0)
        return (squares @ self.weights + self.rest * others).sqrt()


class KnownScore(nn.Module):
    """Scores how well images fit the validation images. A typical one has 1; strangers have negative scores.

    Its output has shape [B].
    """

    def __init__(self, read: Neighbours, middle: Spread, scales: Tensor, temperature: float):
        """`scales` [4, 2]: limit and median of the parts of the score and of their sum, on validation images."""
        super().__init__()
        self.read, self.middle, self.temperature = read, middle, temperature
        self.register_buffer("scales", scales.float())

    def forward(self, features: TappedFeatures) -> Tensor:
        distances = self.read(features.read), self.middle(features.middle)
        parts = parts_of(features.logits, self.temperature, *distances)
        return scaled(combine(parts, self.scales, len(self.read.images)), self.scales[3])


def parts_of(logits: Tensor, temperature: float, read: Tensor, middle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a score, larger if an image fits better: the log of the confidence, and two distances."""
    return (logits / temperature).log_softmax(1).amax(1), -read, -middle


HALF = 100  # with this number of validation images, a distance counts half as much as the confidence


def combine(parts: tuple[Tensor, Tensor, Tensor], scales: Tensor, num_images: int) -> Tensor:
    """Add up the parts of a score. With few validation images, the confidence decides, because distances need many."""
    confidence, read, middle = (scaled(part, scale) for part, scale in zip(parts, scales[:3], strict=True))
    return confidence + num_images / (num_images + HALF) * (read + middle)


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Rescale the values so that the limit becomes 0 and the median becomes 1."""
    return (values - scale[0]) / (scale[1] - scale[0]).clamp(min=torch.finfo(torch.float32).tiny)


MATRICES = ("read.images", "middle.directions")  # they have 16 bits in a file


def to_plain(known: KnownScore) -> dict[str, Any]:
    """Return the statistics as JSON values. Arrays become text."""
    arrays = {
        name: value.numpy().astype("<f2" if name in MATRICES else "<f4") for name, value in known.state_dict().items()
    }
    return {name: [list(each.shape), base64.b64encode(each.tobytes()).decode()] for name, each in arrays.items()}
