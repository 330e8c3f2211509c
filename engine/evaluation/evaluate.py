"""Exact evaluation: every image counts once for any number of processes. Chooses which weights to evaluate."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from datasets import BadImages, EvalData
from engine.checkpoint.format import read_checkpoint
from engine.checkpoint.resume import is_run
from engine.evaluation.scores import Scores
from engine.evaluation.tally import ImageResults, LabelResults, PerImage, Tally
from engine.plan import Plan
from engine.precision.policy import Precision
from engine.train.counters import sum_dtype
from engine.train.loss import widen
from engine.train.optim.schedule_free import averaged
from engine.train.trainer import Trainer
from models import build_model
from models.parts import statistics_of
from models.weights.load import load_exactly
from models.weights.state import merged
from utils.distributed import Process


class Evaluation(NamedTuple):
    """What an evaluation found; `images.gather` has the results of each."""

    scores: Scores
    images: PerImage


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: EvalData,
    normalize: nn.Module,
    precision: Precision,
    process: Process,
    bad_images: BadImages,
) -> Evaluation:
    """Evaluate the model in the precision of its training. With fewer than 5 classes, top-5 is top-k of all classes."""
    model = precision.computing(model, in_training=True)
    was_training = model.training
    model.eval()
    process.spread(statistics_of(model))  # each rank collected its own in training; rank 0's are saved
    tally = Tally(process.device, sum_dtype(process.device))
    input_dtype, bad = precision.input_dtype(model), []
    num_rows = 1  # a forward even without images: FSDP's all-gather needs every rank
    for batch in data:
        bad_images.note(batch.bad)
        bad += batch.bad
        pixels = batch.images.to(process.device, non_blocking=True)
        missing = num_rows - len(pixels)
        # Padded on the device: on the host the result would not be pinned, and its copy would make the host wait.
        if missing > 0:
            pixels = torch.cat((pixels, pixels.new_zeros(missing, *pixels.shape[1:])))
        num_rows = len(pixels) if data.is_padded else 1
        images = normalize(pixels, input_dtype)
        with precision.autocast():
            logits = model(images)[: batch.num_samples]
        targets = batch.targets.to(process.device, non_blocking=True)
        tally.add(widen(logits), targets[: batch.num_samples], len(batch.bad))
    bad_images.check(process)
    model.train(was_training)
    scores = tally.result(process)
    assert scores.num_images + scores.num_excluded == data.num_samples, (scores, data.num_samples)
    tally.per_image.indices = data.share[~np.isin(data.share, bad)]
    return Evaluation(scores, tally.per_image)


def evaluate_both(trainer: Trainer, data: EvalData, bad_images: BadImages) -> dict[str, Evaluation]:
    """The raw weights, and the EMA weights if there are any."""
    models = {"": trainer.model} | ({"_ema": trainer.ema.model} if trainer.ema else {})
    normalize, metric = trainer.prepare.normalize, trainer.config.TRAIN.BEST_METRIC
    with averaged(trainer.optimizer):
        found = {
            suffix: evaluate(model, data, normalize, trainer.precision, trainer.process, bad_images)
            for suffix, model in models.items()
        }
    return {suffix: each._replace(scores=replace(each.scores, metric=metric)) for suffix, each in found.items()}


def evaluate_saved(path: Path, trainer: Trainer, data: EvalData, bad_images: BadImages) -> ImageResults | LabelResults:
    """Evaluate a best.pth again, as it was in its epoch. The training must be over: the trainer's model gets its weights."""
    suffix = trainer.best.suffix
    key, model = f"state_dict{suffix}", trainer.ema.model if suffix and trainer.ema else trainer.model
    state = trainer.parallel.local_part({key: read_checkpoint(path, lazily=True)[key]})
    trainer.parallel.load(model, state[key])
    found = evaluate(model, data, trainer.prepare.normalize, trainer.precision, trainer.process, bad_images)
    return found.images.gather(trainer.process)


def weights_to_score(plan: Plan, make_model: Callable[[], nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The model with each set of weights to evaluate, and a prefix for its figures.

    `make_model`: builds the model with foreign weights.
    """
    state = plan.saved
    if not is_run(state):
        yield "", make_model()
        return
    model = build_model(plan.config, plan.num_classes)
    for key, name in (("state_dict", ""), ("state_dict_ema", "EMA ")):
        if state.get(key):
            load_exactly(model, merged(state[key], state["config"]), plan.checkpoint)
            yield name, model
