"""What tells strangers from the photos of a run with DATA.FOLDS: its own features of all images, and limits by the
further runs, whose distances are those of held-out images to the images that their model has learned."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from datasets import BadImages, ImageSet, build_eval_data
from engine.confidence.fit import FeatureTally, fit_spread, gather_features, scale_of, why_unusable
from engine.confidence.known import KnownScore, Neighbours, Tap, TappedFeatures, combine, parts_of, to_plain
from engine.evaluation.evaluate import evaluate
from engine.evaluation.tally import Tally
from engine.folds.tally import CountingTally
from engine.train.trainer import Trainer


@dataclass
class FoldFeatures:
    """The features of held-out images and of learned images, by the model of each fold, and of all images."""

    held_out: list[TappedFeatures | None] = field(default_factory=list)
    learned: list[TappedFeatures | None] = field(default_factory=list)
    of_all: TappedFeatures | None = None

    def statistics(self, temperature: float, reason: str) -> dict[str, Any]:
        """Return the statistics that weights keep, or the reason against them. `reason`: why there are no features."""
        for features in (self.of_all, *self.held_out, *self.learned):
            if why := why_unusable(features, reason):
                return {"reason": why}
        return {"statistics": to_plain(fit(self, temperature))}


def fit(features: FoldFeatures, temperature: float) -> KnownScore:
    """Return the statistics. Limits and medians are those of held-out images, of all folds together."""
    nearest, outlying = [], []
    for held_out, learned in zip(features.held_out, features.learned, strict=True):
        nearest.append(stored(learned.read).double()(held_out.read.double()))
        outlying.append(spread_of(learned.middle).double()(held_out.middle.double()))
    logits = torch.cat([held_out.logits.double() for held_out in features.held_out])
    parts = parts_of(logits, temperature, torch.cat(nearest), torch.cat(outlying))
    scales = torch.stack([scale_of(part) for part in parts])
    num_images = len(features.of_all.logits)
    of_total = scale_of(combine(parts, scales, num_images))
    scales = torch.cat([scales, of_total[None]])
    return KnownScore(stored(features.of_all.read), spread_of(features.of_all.middle), scales, temperature)


def stored(features: Tensor) -> Neighbours:
    return Neighbours(features.double())


def spread_of(features: Tensor) -> nn.Module:
    spread, _ = fit_spread(features.double())
    return spread


def features_of(
    model: nn.Module, images: ImageSet, trainer: Trainer, tally: CountingTally, bad_images: BadImages
) -> TappedFeatures | None:
    """Evaluate a model with this tally. Return the features of at most 1,000 images, evenly spaced. Collective."""
    with contextlib.closing(Tap(model)) as tap:
        predict(model, images, trainer, FeatureTally(tap, tally, len(images)), bad_images)
    return gather_features(tally, trainer.process)


def learned_features(model: nn.Module, images: ImageSet, trainer: Trainer) -> TappedFeatures | None:
    """Return the features of images that the model has learned. Collective."""
    unreported = BadImages(images, max_fraction=1.0, say=lambda line: None)  # other evaluations report them
    return features_of(model, images, trainer, CountingTally(), unreported)


def predict(model: nn.Module, images: ImageSet, trainer: Trainer, tally: Tally, bad_images: BadImages) -> None:
    """Evaluate a model on these images with this tally. Collective."""
    data = build_eval_data(trainer.config, images, trainer.process)
    evaluate([model], data, trainer.inference, bad_images, lambda *sizes: tally)
