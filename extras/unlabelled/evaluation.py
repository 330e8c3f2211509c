"""Evaluates a student on held-out images: similarity to its teacher, loss, and the k-NN accuracy on labelled images."""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from datasets import BadImages, EvalData, Normalize, build_preparation
from engine.checkpoint.resume import is_run
from engine.evaluation.evaluate import Evaluation
from engine.evaluation.scores import TITLES, Scores, format_value
from engine.evaluation.tally import sum_dtype, widen
from engine.plan import EvalPlan
from engine.session import Session
from engine.train.loss import build_loss
from extras.unlabelled.training import (
    FeatureLoss,
    FeaturePreparation,
    FeatureTargets,
    Labelled,
    knn_accuracy,
    make_feature_training,
    mean_cosine,
    pairs,
)
from models import build_model, describe
from models.parts import statistics_of
from models.transforms import choose_transforms
from models.weights.load import load_exactly
from utils.distributed import Process
from utils.errors import ConfigError, ensure, naming_damage
from utils.text import counted


@dataclass(frozen=True)
class FeatureScores(Scores):
    """The scores of a model that learns features. Its accuracies are NaN, because it has no classes."""

    similarity: float = math.nan  # mean cosine between student and teacher, in percent
    knn: float | None = None  # k-NN accuracy, in percent; None without labelled images

    def more(self) -> dict[str, float]:
        return {"similarity": self.similarity} | ({} if self.knn is None else {"knn": self.knn})

    def figures(self) -> dict[str, float]:
        return {key: value for key, value in super().figures().items() if math.isfinite(value)}

    def describe(self, name: str) -> str:
        return ", ".join([f"{name} Loss: {self.loss:.4f}", *(f"{name} {text}" for text in self._texts())])

    def describe_all(self, name: str) -> str:
        """Return the line that -eval prints. `name`: the name of the weights."""
        excluded = f"; {counted(self.num_excluded, 'unreadable one')} left out" if self.num_excluded else ""
        scores = ", ".join([*self._texts(), f"loss {self.loss:.4f}"])
        return f"{name}{scores} of {counted(self.num_images, 'image')}{excluded}"

    def _texts(self) -> Iterator[str]:
        for name, value in self.more().items():
            yield f"{TITLES[name]} {format_value(name, value)}"


class NoImageResults:
    """A placeholder for per-image results, which need classes."""

    def gather(self, process: Process) -> None:
        return None


@torch.no_grad()
def evaluate_features(
    models: Sequence[nn.Module],
    prepare: FeaturePreparation,
    loss: FeatureLoss,
    data: EvalData,
    bad_images: BadImages,
    process: Process,
) -> list[Evaluation]:
    """Evaluate models in their training precision, all in one pass over the images. Collective.

    Each image counts exactly once, with any number of processes. The teacher computes each batch once.
    """
    precision = prepare.precision
    models = [precision.computing(each, in_training=True) for each in models]
    were_training = [each.training for each in models]
    for model in models:
        model.eval()
        process.broadcast(statistics_of(model))  # as in engine/evaluation/evaluate.py
    # For each model, the sums of: loss, cosine, images, unreadable images.
    sums = torch.zeros(len(models), 4, dtype=sum_dtype(process.device), device=process.device)
    for images, count, bad in batches(data, prepare, models[0], bad_images, process):
        targets = FeatureTargets(None, tuple(each[:count] for each in prepare.targets_of(images).features))
        for model, row in zip(models, sums, strict=True):
            *mapped, _ = (widen(each[:count]) for each in outputs_of(model, images, prepare))
            cosines = [mean_cosine(ours, widen(theirs)) for ours, theirs in pairs(tuple(mapped), targets)]
            row[0] += loss.of_images(tuple(mapped), targets).to(row).sum()
            row[1] += torch.stack(cosines).mean(0).to(row).sum()
            row[2] += count
            row[3] += len(bad)
    bad_images.check(process)
    knns = knn_scores(models, prepare, prepare.labelled, process) if prepare.labelled else None
    for model, was_training in zip(models, were_training, strict=True):
        model.train(was_training)
    values = process.sum(sums).tolist()
    found = []
    for number, (total, cosine, count, excluded) in enumerate(values):
        ensure(count + excluded == data.num_samples, f"the evaluation saw {count:.0f} of {data.num_samples:,} images")
        counts = {"num_images": int(count), "num_excluded": int(excluded), "top1": math.nan, "top5": math.nan}
        means = {"loss": total / max(count, 1), "similarity": 100 * cosine / max(count, 1)}
        found.append(Evaluation(FeatureScores(**counts, **means, knn=knns and knns[number]), NoImageResults()))
    return found


def outputs_of(model: nn.Module, images: Tensor, prepare: FeaturePreparation) -> tuple[Tensor, ...]:
    with prepare.precision.autocast():
        return model(images)


def batches(
    data: EvalData, prepare: FeaturePreparation, model: nn.Module, bad_images: BadImages, process: Process
) -> Iterator[tuple[Tensor, int, list[int]]]:
    """Yield normalized images, the number of images without padding, and the indices of unreadable images.

    Batches are padded as in engine/evaluation/evaluate.py: FSDP needs every rank's forward pass.
    """
    dtype, min_size = prepare.precision.input_dtype(model), 1
    for batch in data:
        bad_images.note(batch.bad)
        pixels = batch.images.to(process.device, non_blocking=True)
        missing = min_size - len(pixels)
        if missing > 0:
            pixels = torch.cat((pixels, pixels.new_zeros(missing, *pixels.shape[1:])))
        min_size = len(pixels) if data.is_padded else 1
        yield prepare.normalize(pixels, dtype), batch.num_samples, batch.bad


def knn_scores(
    models: Sequence[nn.Module],
    prepare: FeaturePreparation,
    labelled: Labelled,
    process: Process,
) -> list[float]:
    """Return each model's k-NN accuracy on the labelled images, from its own pooled features. Collective."""
    rows: list[list[np.ndarray]] = [[] for _ in models]
    unreadable: list[int] = []
    for images, count, bad in batches(labelled.data, prepare, models[0], labelled.bad_images, process):
        unreadable += bad
        for model, found in zip(models, rows, strict=True):
            found.append(widen(outputs_of(model, images, prepare)[-1][:count]).cpu().numpy())
    labelled.bad_images.check(process)
    indices = labelled.data.share[~np.isin(labelled.data.share, unreadable)]
    accuracies = []
    for found in rows:
        parts = process.join([(indices, np.concatenate(found))])
        numbers, features = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(numbers, kind="stable")
        targets = np.asarray(labelled.images.targets)[numbers[order]]
        accuracies.append(process.first(lambda: knn_accuracy(features[order], targets)))  # noqa: B023
    return accuracies


# --- evaluating a run that learned features (-eval) ---


def evaluate_run(session: Session, plan: EvalPlan, data: EvalData) -> int:
    """Evaluate the raw and the EMA weights of a checkpoint, and return the exit code. Collective."""
    config, process, log, state = plan.config, session.process, session.log, plan.inputs.saved
    if not is_run(state):
        raise ConfigError(
            "-eval: these weights have no feature maps, without which the similarity to the teacher cannot be measured; "
            "name a run's checkpoint with -resume, or fine-tune the weights (TRAIN.OBJECTIVE=classes)"
        )
    wrapper = make_feature_training(config, process, log)
    model = build_model(config, plan.num_classes).to(process.device)
    wrapper.change_model(model)
    log.say(f"model: {config.MODEL.NAME}, {describe(model)}")
    prepare = build_preparation(config, Normalize(config.DATA, torch.float32).to(process.device), is_compiled=False)
    prepare, loss = wrapper.wrap(prepare, build_loss(config), plan.precision)
    transforms = choose_transforms(config, process.device, plan.precision.half)
    bad_images = BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    figures = {}
    for key, name in (("state_dict", ""), ("state_dict_ema", "EMA ")):
        if not state.get(key):
            continue
        with naming_damage(plan.inputs.checkpoint):
            load_exactly(model, state[key], plan.inputs.checkpoint)
        scored = deepcopy(model)
        log.say(*transforms.apply(scored))
        if not figures:  # all checks have passed
            session.begin(plan.inputs.loaded)
            session.status("evaluating")
        (found,) = evaluate_features([scored], prepare, loss, data, bad_images, process)
        scores = replace(found.scores, metric=config.TRAIN.BEST_METRIC)
        log.detail(f"----- {scores.describe(f'{name}Validation')}")
        log.say(scores.describe_all(name))
        figures[name.strip().lower() or "raw"] = scores.figures()
    session.status("done", exit_code=0, **figures)
    return 0
