"""What tells strangers from the photos of a run with DATA.FOLDS: its own features of all images, and limits by the
further runs, whose distances are those of held-out images to the images that their model has learned."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from datasets import BadImages, ImageSet, build_eval_data
from engine.confidence.fit import FeatureTally, fit_spread, gather_features, scale_of, why_unusable
from engine.confidence.known import KnownScore, Neighbours, Tap, TappedFeatures, combine, parts_of, to_plain
from engine.evaluation.evaluate import evaluate
from engine.evaluation.tally import Scoring
from engine.folds.tally import CountingTally
from engine.train.trainer import Trainer


@dataclass
class FoldFeatures:
    """The features of held-out images and of learned images, by the model of each fold, and of all images."""

    held_out: list[TappedFeatures | None] = field(default_factory=list)
    learned: list[TappedFeatures | None] = field(default_factory=list)
    of_all: TappedFeatures | None = None

    def statistics(self, temperature: float, reason: str) -> dict[str, Any]:
        """Return the statistics that weights keep, or the reason why there are none. `reason`: why there are no features."""
        features = [self.of_all, *self.held_out, *self.learned]
        if why := next(filter(None, (why_unusable(each, reason) for each in features)), ""):
            return {"reason": why}
        return {"statistics": to_plain(fit(self, temperature))}


def fit(found: FoldFeatures, temperature: float) -> KnownScore:
    """Return the statistics. Limits and medians are those of held-out images, of all folds together."""
    nearest, outlying = [], []
    for held_out, learned in zip(found.held_out, found.learned, strict=True):
        nearest.append(stored(learned.read).double()(held_out.read.double()))
        outlying.append(spread_of(learned.middle).double()(held_out.middle.double()))
    logits = torch.cat([features.logits.double() for features in found.held_out])
    parts = parts_of(logits, temperature, torch.cat(nearest), torch.cat(outlying))
    scales = torch.stack([scale_of(part) for part in parts])
    num_images = len(found.of_all.logits)
    of_total = scale_of(combine(parts, scales, num_images))
    scales = torch.cat([scales, of_total[None]])
    return KnownScore(stored(found.of_all.read), spread_of(found.of_all.middle), scales, temperature)


def stored(features: Tensor) -> Neighbours:
    return Neighbours(features.double())


def spread_of(features: Tensor) -> nn.Module:
    spread, _ = fit_spread(features.double())
    return spread


def features_of(model: nn.Module, images: ImageSet, trainer: Trainer) -> TappedFeatures | None:
    """Return the features of at most 1,000 images, evenly spaced, or None if the model shows none. Collective."""
    data = build_eval_data(trainer.config, images, trainer.process)
    bad_images = BadImages(images, max_fraction=1.0, say=lambda line: None)  # other evaluations report them
    tap = Tap(model, KnownScore.middle_of)
    try:
        tally = FeatureTally(tap, CountingTally(), len(images))
        (found,) = evaluate([model], data, trainer.inference, bad_images, Scoring(lambda *given: tally))
    finally:
        tap.close()
    return gather_features(found.images, trainer.process)
