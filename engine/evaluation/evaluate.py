"""Exact evaluation: each image counts exactly once, with any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from datasets import BadImages, EvalData
from engine.evaluation.scores import Scores
from engine.evaluation.tally import MakeTally, sum_dtype
from engine.precision import Precision
from models.parts import statistics_of
from utils.distributed import Process
from utils.errors import ensure


class Evaluation(NamedTuple):
    """The result of an evaluation. `images.gather` returns the results of each image."""

    scores: Scores
    images: Any  # see Tally.per_image


@dataclass(frozen=True)
class Inference:
    """The normalization of images, the precision of models, and the process that computes."""

    normalize: nn.Module
    precision: Precision
    process: Process


@torch.no_grad()
def evaluate(
    models: Sequence[nn.Module],
    data: EvalData,
    inference: Inference,
    bad_images: BadImages,
    make_tally: MakeTally,
) -> list[Evaluation]:
    """Evaluate models in their training precision, all in one pass over the images. Collective."""
    precision, process, groups = inference.precision, inference.process, None
    if data.image_set.is_grouped:
        from engine.evaluation.groups import groups_of

        groups = groups_of(data.image_set)
    models = [precision.computing(each, in_training=True) for each in models]
    were_training = [each.training for each in models]
    for model in models:
        model.eval()
        # In training, each rank collects its own BatchNorm statistics. Checkpoints contain the statistics of rank 0.
        process.broadcast(statistics_of(model))
    tallies = [make_tally(process.device, sum_dtype(process.device), data.num_samples) for _ in models]
    input_dtype, indices = precision.input_dtype(models[0]), []
    # Batches are padded to this size, which is at least 1, because FSDP's all-gather needs every rank's forward pass.
    min_size = 1
    for batch in data:
        bad_images.note(batch.bad)
        indices.append(batch.indices)
        pixels = batch.images.to(process.device, non_blocking=True)
        missing = min_size - len(pixels)
        # Pad on the device: a batch padded on the host would not be pinned, and its copy would make the host wait.
        if missing > 0:
            pixels = torch.cat((pixels, pixels.new_zeros(missing, *pixels.shape[1:])))
        min_size = len(pixels) if data.is_padded else 1  # a compiled model gets batches of one size only
        images = inference.normalize(pixels, input_dtype)
        targets = batch.targets.to(process.device, non_blocking=True)[: batch.num_samples]
        for model, tally in zip(models, tallies, strict=True):
            with precision.autocast():
                outputs = model(images)
            tally.add(outputs, targets, len(batch.bad))
    bad_images.check(process)
    evaluations, of_images = [], np.concatenate(indices)
    for model, was_training, tally in zip(models, were_training, tallies, strict=True):
        model.train(was_training)
        tally.per_image.indices, tally.per_image.groups = of_images, groups
        scores = tally.result(process)
        num_seen = scores.num_images + scores.num_excluded
        ensure(num_seen == data.num_samples, f"the evaluation saw {num_seen:,} of {data.num_samples:,} images")
        evaluations.append(Evaluation(scores, tally.per_image))
    return evaluations
