"""Exact evaluation: every image counted once, whatever the number of processes."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from datasets import BadImages, EvalData
from engine.precision.policy import Precision
from engine.train.loss import widen
from utils.distributed import Process


@dataclass(frozen=True)
class Scores:
    """Mean loss, and accuracies in percent, over `num_images`; `num_excluded` could not be read."""

    loss: float
    top1: float
    top5: float
    num_images: int
    num_excluded: int


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    data: EvalData,
    normalize: torch.nn.Module,
    precision: Precision,
    process: Process,
    bad_images: BadImages,
) -> Scores:
    """Score the model in the precision that it trains in. Top-5 is top-k of as many classes as there are, if fewer."""
    model = precision.computing(model)
    was_training = model.training
    model.eval()
    sums = torch.zeros(5, dtype=sum_type(process.device), device=process.device)  # loss, top-1, top-5, images, excluded
    for batch in data:
        sums[4] += len(batch.bad)
        bad_images.note(batch.bad)
        # Also where none counts, or is left: weights in shards are gathered from all processes.
        pixels = batch.images if len(batch.images) else batch.images.new_zeros(1, *batch.images.shape[1:])
        images = precision.cast(normalize(pixels.to(process.device, non_blocking=True)))
        with precision.autocast():
            logits = model(images)
        if not batch.num_samples:
            continue
        targets = batch.targets.to(process.device, non_blocking=True)
        logits = widen(logits)
        best = logits.topk(min(5, logits.shape[1])).indices.eq(targets[:, None])
        sums[0] += functional.cross_entropy(logits, targets, reduction="none").to(sums).sum()
        sums[1] += best[:, 0].sum()
        sums[2] += best.sum()
        sums[3] += batch.num_samples
    model.train(was_training)
    loss, top1, top5, count, excluded = process.sum(sums).tolist()
    assert count + excluded == data.num_samples, (count, excluded, data.num_samples)
    count = max(count, 1)
    return Scores(loss / count, 100 * top1 / count, 100 * top5 / count, int(count), int(excluded))


def sum_type(device: torch.device) -> torch.dtype:
    """Sums over an epoch want more digits than float32 has; MPS has no others."""
    return torch.float32 if device.type == "mps" else torch.float64
