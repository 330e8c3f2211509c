"""Measures a candidate: features of a bounded number of images, and the speed of a run that fine-tunes it."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch

from configs.schema import MACHINE, RECORD
from configs.values import flatten, of_role, plain
from datasets import ImageSet, open_data
from datasets.split import DRAWN
from engine.batch_size import find_batch_size
from engine.build import build
from engine.catalogue import licence_text
from engine.choice.candidates import Candidate
from engine.features.channels import start_channels
from engine.features.compute import MOST_IMAGES, ImageFeatures, features_of_images, why_not_fitted
from engine.plan import TrainPlan, plan_training, read_inputs
from engine.settings import load_settings
from engine.short_trial import alone, forecast_run
from engine.train.trainer import Trainer
from models.heads import output_layers
from models.weights.files import find_file
from models.weights.metadata import pretrained_cfg
from utils.distributed import Process
from utils.errors import ConfigError, cause_of
from utils.files import replacing
from utils.log import Log
from utils.text import warning

MOST = 2_000  # images of each part
SILENT = Log(rank=1)
NO_EFFECT = {*of_role(MACHINE, RECORD), "DATA.DATA_PATH"}  # on features; the facts of a plan identify the images


class Measured(NamedTuple):
    """The features that a candidate computes. `val` is None if validation images were drawn from the training images."""

    train: ImageFeatures
    val: ImageFeatures | None
    facts: dict[str, Any]  # parameters, licence, images/s and seconds


def plan_candidate(arguments: Sequence[str], candidate: Candidate, process: Process) -> TrainPlan:
    """Return the plan of a run that fine-tunes the candidate, without a budget. `arguments`: of the command line."""
    loaded = load_settings([*arguments], {"TRAIN.BUDGET": "none", **candidate.settings})
    inputs = read_inputs(loaded, process, SILENT)
    return plan_training(inputs, lambda given: open_data(given.config, "both", given.known), find_batch_size)


def images_of(plan: TrainPlan) -> tuple[ImageSet, ImageSet | None]:
    """Return the training images to look at, and the validation images, or None if they were drawn like the others."""
    sets = [plan.train_set, plan.eval_set][: 1 if plan.eval_set.split.get("rule") in DRAWN else 2]
    # The first images of an epoch, because they are in few shards.
    found = [each.take(np.sort(each.epoch_order(plan.config.SEED, 0)[:MOST])) for each in sets]
    return found[0], found[1] if found[1:] else None


def measure(plan: TrainPlan, candidate: Candidate, began: float) -> Measured:
    """Build a run that fine-tunes the candidate, and measure it.

    `began`: when the program would have started, by time.monotonic(), if it fine-tuned only this candidate.
    """
    plan = replace(plan, inputs=alone(plan.inputs))
    images, val = images_of(plan)
    trainer = build(plan, SILENT)
    startup = time.monotonic() - began
    looked_at = replace(plan, train_set=images)
    if reason := why_not_fitted(looked_at, trainer, [*output_layers(trainer.model).values()]):
        raise ConfigError(f"no linear model can be fitted: {reason}")
    start_channels(trainer, images, note=lambda line: None)
    begun = time.perf_counter()
    parts = [features_of_images(each, trainer, lambda line: None) for each in (images, val) if each is not None]
    speed = sum(len(each.indices) for each in parts) / (time.perf_counter() - begun)
    facts = {"parameters": sum(each.numel() for each in trainer.model.parameters()), "licence": licence_of(candidate)}
    times = forecast_run(plan, trainer, startup + fitting_time(plan, trainer, parts[0])).times
    facts |= {
        "train_images_per_s": plan.order.global_batch / times.update,
        "predict_images_per_s": speed * plan.order.world_size,
        "seconds": times.until_end(trainer.step, trainer.schedule.num_updates),
    }
    return Measured(parts[0], parts[1] if parts[1:] else None, facts)


def fitting_time(plan: TrainPlan, trainer: Trainer, found: ImageFeatures) -> float:
    """Return how many seconds a run needs to fit its linear model before the first update."""
    features, targets = torch.from_numpy(found.joined), torch.from_numpy(found.targets)
    is_fitted = plan.config.MODEL.NEW_CLASSIFIER != "random" and not plan.starts_from_its_classes
    if not is_fitted or trainer.task.why_no_fit(targets, plan.classes) or not features.isfinite().all():
        return 0.0
    begun = time.perf_counter()
    trainer.task.fit_head(features, targets, plan.num_classes)
    return (time.perf_counter() - begun) * min(len(plan.train_set), MOST_IMAGES) / len(targets)


def licence_of(candidate: Candidate) -> str:
    """Return the licence of timm weights as text, or "" for a file."""
    return "" if find_file(candidate.source) else licence_text(pretrained_cfg(candidate.source).get("license"))


def file_of(plan: TrainPlan, candidate: Candidate) -> str:
    """Return the name of the file that keeps what is measured: a digest of weights, settings, images and processes."""
    path = find_file(candidate.source)
    stamp = [path.stat().st_size, path.stat().st_mtime_ns] if path else []
    settings = {key: plain(value) for key, value in flatten(plan.config).items() if key not in NO_EFFECT}
    facts = [candidate.word, stamp, settings, plan.facts, plan.process.device.type, plan.process.world_size, MOST]
    # The facts of a plan tell sets apart, but not every changed file.
    facts += [each.stamp(row) for each in images_of(plan) if each is not None and each.root for row in range(len(each))]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16] + ".npz"


# --- kept features ---

FIELDS = ("indices", "targets", "features")


def keep(path: Path, found: Measured, say: Callable[[str], None]) -> None:
    arrays = {"facts": np.array(json.dumps(found.facts))}
    for name, part in (("train", found.train), ("val", found.val)):
        if part is not None:
            columns = zip(FIELDS, (part.indices, part.targets, part.joined), strict=True)
            arrays |= {f"{name}_{column}": values for column, values in columns}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **arrays)
    except OSError as error:
        say(warning(f"cannot write {path} ({cause_of(error)}), so another call measures this candidate again"))


def read(path: Path) -> Measured | None:
    """Return what the file keeps, or None if there is no such file, or if it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            facts = json.loads(str(file["facts"]))
            parts = [_part(file, name) for name in ("train", "val")[: 1 + ("val_indices" in file)]]
    except (OSError, EOFError, KeyError, ValueError, BadZipFile):
        return None
    return Measured(parts[0], parts[1] if parts[1:] else None, facts)


def _part(file: Any, name: str) -> ImageFeatures:
    indices, targets, features = (file[f"{name}_{column}"] for column in FIELDS)
    return ImageFeatures(indices, [features], targets)
