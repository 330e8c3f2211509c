"""Chooses the start of the first layer for images with more channels than the red, green and blue of its weights."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from datasets import ImageSet
from engine.features.compute import features_of_images
from engine.features.linear import SHARES, decomposed, leave_one_out, standardized
from engine.train.stop_conditions import Stopped
from engine.train.trainer import Trainer
from models.weights.load import keep_rgb, rgb_layer
from utils.text import counted

MOST_IMAGES = 500  # whose features show which start is the best
CLEARLY = 0.75  # a single channel must leave less than this share of the error that all channels leave
RGB = "rgb"  # the key in a checkpoint for the weights that the starts are made of, until one is chosen


class RgbWeights(NamedTuple):
    """The first layer's weights for red, green and blue. A run that was stopped while it compared starts needs them."""

    kernel: Tensor

    def state(self) -> Tensor:
        return self.kernel


def resume_channels(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Give the model the weights for red, green and blue if the run was stopped before a start was chosen."""
    if RGB in saved:
        for model in models_of(trainer):
            keep_rgb(model, saved[RGB])


def start_channels(
    trainer: Trainer,
    train_set: ImageSet,
    note: Callable[[str], None],
    stop_if_requested: Callable[[], None] = lambda: None,
) -> str:
    """Start the first layer from the channel whose features predict best, if they are clearly better than those of all.

    Nothing happens if the layer has the channels of its weights. Return a line for the log, or "". Collective.
    """
    if not (layer := rgb_layer(trainer.model)):
        return ""
    images = train_set.take(train_set.epoch_order(trainer.config.SEED, 0)[:MOST_IMAGES])
    starts, errors = {"all channels": layer.weight.detach().clone(), **dict(single_channels(layer))}, {}
    trainer.parts[RGB] = RgbWeights(layer.rgb)
    try:
        for name, weight in starts.items():
            set_weight(trainer, weight)
            gathered = features_of_images(images, trainer, note, stop_if_requested)
            features, targets = torch.from_numpy(gathered.joined), torch.from_numpy(gathered.targets)
            errors[name] = trainer.process.first(functools.partial(left_out_error, features, targets))
    except Stopped:
        set_weight(trainer, starts["all channels"])  # the run is saved, and repeats the comparison when it is resumed
        raise
    del trainer.parts[RGB]
    best, error_of_all = min(errors, key=errors.get), errors["all channels"]
    chosen = best if errors[best] < CLEARLY * error_of_all else "all channels"
    set_weight(trainer, starts[chosen])
    channels = counted(layer.in_channels, "channel")
    return (
        f"first layer: starts with {chosen}; of {channels} alone, {best} is the best: a linear model of its features "
        f"leaves {errors[best]:.0%} of the variance, of all {error_of_all:.0%}"
    )


def left_out_error(features: Tensor, targets: Tensor) -> float:
    """Return the leave-one-out error of a ridge regression, as a share of the variance. `targets`: as in Batch."""
    if not targets.is_floating_point() and targets.ndim == 1:
        targets = nn.functional.one_hot(targets.long())
    targets = targets.double().nan_to_num()  # standardized numbers have mean 0
    squares, rows, _ = decomposed(standardized(features)[0])
    tried = leave_one_out((squares, rows), targets, SHARES)
    least = min(float((each - targets).square().sum()) for each in tried)
    return least / float((targets - targets.mean(0)).square().sum())


def single_channels(layer: nn.Conv2d) -> Iterator[tuple[str, Tensor]]:
    """Yield weights that read one channel, as grey, and no other."""
    grey = layer.rgb.to(layer.weight).sum(1)
    for channel in range(layer.in_channels):
        weight = torch.zeros_like(layer.weight)
        weight[:, channel] = grey
        yield f"channel {channel}", weight


@torch.no_grad()
def set_weight(trainer: Trainer, weight: Tensor) -> None:
    for model in models_of(trainer):
        rgb_layer(model).weight.copy_(weight)
    trainer.computing.refresh()


def models_of(trainer: Trainer) -> list[nn.Module]:
    return [trainer.model, *([trainer.ema.model] if trainer.ema else [])]
