"""Exact evaluation: every image counts once for any number of processes. Chooses which weights to evaluate."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from datasets import BadImages, EvalData
from engine.checkpoint.resume import is_run
from engine.loss.classification import widen
from engine.plan import Plan
from engine.precision.policy import Precision
from engine.scores.scores import Scores
from engine.scores.tally import Tally
from engine.train.counters import sum_dtype
from models import build_model
from models.formats.adapters import merged
from models.pretrained.weights import load_exactly
from models.running_statistics import statistics_of
from utils.distributed import Process


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: EvalData,
    normalize: nn.Module,
    precision: Precision,
    process: Process,
    bad_images: BadImages,
) -> Scores:
    """Evaluate the model in the precision of its training. With fewer than 5 classes, top-5 is top-k of all classes."""
    model = precision.computing(model, in_training=True)
    was_training = model.training
    model.eval()
    process.spread(statistics_of(model))  # each rank collected its own in training; rank 0's are saved
    tally = Tally(process.device, sum_dtype(process.device))
    input_dtype = precision.input_dtype(model)
    num_rows = 1  # a forward even without images: FSDP's all-gather needs every rank
    for batch in data:
        bad_images.note(batch.bad)
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
    return scores


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
