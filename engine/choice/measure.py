"""Measures a candidate: the score of its features, and the speed of a run that fine-tunes it."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import timm  # noqa: F401 (each run imports it; else only the first candidate would need the seconds for it)

from configs.schema import RECORD
from configs.values import flatten, of_role, plain
from datasets import open_data
from datasets.split.by_hash import hashes_of
from engine.auto_values import choose_values
from engine.build import build
from engine.catalogue import licence_text
from engine.choice.candidates import Candidate
from engine.choice.scoring import Scored, images_of
from engine.features.channels import start_channels
from engine.features.compute import MOST_IMAGES, features_of_images, why_not_fitted
from engine.plan import TrainPlan, plan_training, read_inputs
from engine.settings import load_settings
from engine.short_trial import alone, forecast_run, prediction_time
from engine.train.budget import fewest_updates
from models.heads import output_layers
from models.weights.files import find_file
from models.weights.metadata import pretrained_cfg
from utils import VERSION
from utils.distributed import Process
from utils.errors import ConfigError
from utils.host import name_of
from utils.log import Log

RESULTS = 3  # version of kept results; raise it if their content or computation changes
SILENT = Log(rank=1)
NO_EFFECT = {*of_role(RECORD), "DATA.DATA_PATH"}  # on results; the facts of a plan identify the images


def plan_candidate(arguments: Sequence[str], candidate: Candidate, process: Process) -> TrainPlan:
    """Return the plan of a run that fine-tunes the candidate, without a budget. `arguments`: of the command line."""
    loaded = load_settings([*arguments], {"TRAIN.BUDGET": "none", **candidate.settings})
    inputs = read_inputs(loaded, process, SILENT)
    return plan_training(inputs, lambda inputs: open_data(inputs.config, "both", inputs.prior), choose_values)


def measure(plan: TrainPlan, candidate: Candidate, began: float) -> tuple[Scored, dict[str, Any]]:
    """Build a run that fine-tunes the candidate. Return its scores, and parameters, licence, images/s and times.

    `began`: when the program would have started, by time.monotonic(), if it fine-tuned only this candidate.
    """
    plan = replace(plan, inputs=alone(plan.inputs))
    sets = images_of(plan)
    if len(sets) == 1 and {*plan.inputs.record.get("class_names", ())} & {*plan.classes}:
        raise ConfigError(
            "its run may have learned the labels of these images; put images that it has not seen into a folder val/"
        )
    trainer = build(plan, SILENT)
    startup = time.monotonic() - began
    looked_at = replace(plan, train_set=sets[0])
    if reason := why_not_fitted(looked_at, trainer, [*output_layers(trainer.model).values()]):
        raise ConfigError(f"no linear model can be fitted: {reason}")
    start_channels(trainer, sets[0], note=lambda line: None)
    scored = Scored(plan, [features_of_images(each, trainer, lambda line: None) for each in sets])
    fitting = scored.seconds_of_fit * min(len(plan.train_set), MOST_IMAGES)
    facts = {"parameters": sum(each.numel() for each in trainer.model.parameters()), "licence": licence_of(candidate)}
    step = trainer.step
    times = forecast_run(plan, trainer, startup, fitting).times  # it makes some updates
    facts |= {
        "train_images_per_s": min(plan.order.global_batch, plan.order.num_images) / times.update,
        "predict_images_per_s": 1 / prediction_time(plan, times),
        "shortest_seconds": times.until_end(step, fewest_updates(plan.order, trainer.schedule.num_updates)),
        "seconds": times.until_end(step, trainer.schedule.num_updates),
    }
    return scored, facts


def licence_of(candidate: Candidate) -> str:
    """Return the licence of timm weights as text, or "" for a file."""
    return "" if find_file(candidate.source) else licence_text(pretrained_cfg(candidate.source).get("license"))


def file_of(plan: TrainPlan, candidate: Candidate) -> str:
    """Return the name of the file that keeps the result: a digest of weights, settings, images and processes."""
    path = find_file(candidate.source)
    stamp = [path.stat().st_size, path.stat().st_mtime_ns] if path else []
    settings = {key: plain(value) for key, value in flatten(plan.config).items() if key not in NO_EFFECT}
    process = plan.process
    machine = [name_of(process.device), process.num_cores, process.world_size]
    facts = [VERSION, RESULTS, candidate.word, stamp, settings, plan.facts, machine]
    for images in images_of(plan):
        # The facts of a plan identify the set, but they miss some changes of files, and the groups of DATA.GROUP_BY.
        facts += [images.storage.stamp(images.row(number)) for number in range(len(images)) if images.root]
        facts += hashes_of(images.split_keys(), 0).tolist()
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16] + ".json"
