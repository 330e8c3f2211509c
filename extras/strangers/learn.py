"""Adds statistics of the training images to best.pth at the end of a run with STRANGERS, for predict.py -unknown."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from datasets import ImageSet
from engine.checkpoint.format import progress_in, save_checkpoint
from engine.evaluate_weights import load_saved
from engine.features.compute import features_of_images
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.forecast import MOST_COMPARED
from engine.train.trainer import Trainer
from extras.strangers.known import LIKE_ROUNDING, MOST_MOVED, QUANTILE, FeaturePair, Known, Tap, to_plain
from models.weights.state import CALIBRATION, KNOWN
from models.weights.torch_files import read_index
from utils.errors import ConfigError, cause_of
from utils.text import counted

MANY_IMAGES = 5000  # which take so long that a line says what the run is doing
FEWEST_IMAGES = 20  # validation images; fewer have no limit that 95% of them reach


def features_of_set(
    model: nn.Module, images: ImageSet, trainer: Trainer, session: Session
) -> tuple[FeaturePair, np.ndarray]:
    """Return the features and classes of the images drawn from a set, as arrays of all processes. Collective."""
    _, pair, classes = features_of_images(model, Tap(model), images, trainer, session.log.note)
    return FeaturePair(*pair), classes


def learn(path: Path, plan: TrainPlan, trainer: Trainer, session: Session) -> None:
    """Add the statistics to best.pth, if its weights are calibrated and it has none. Collective.

    The weights of best.pth are loaded into the trainer's model, so the training must be over.
    """
    process = trainer.process
    calibration = process.first(lambda: progress_in(path).get(CALIBRATION, {}))
    if not calibration.get("curve") or calibration["epoch"] != trainer.best.epoch:
        return
    saved = calibration.get(KNOWN)
    if saved is None:
        saved = measure(path, plan, trainer, session)
        if "reason" in saved:
            session.log.note(f"-unknown will not compare photos with the training images, because {saved['reason']}")
        process.first(lambda: store(saved, path, session))
    if part := trainer.parts.get(CALIBRATION):
        part.state()[KNOWN] = saved


def store(saved: dict[str, Any], path: Path, session: Session) -> None:
    """Write best.pth again with the statistics. If the disk is full, only warn."""
    try:
        state = read_index(path)
        state[CALIBRATION] = state[CALIBRATION] | {KNOWN: saved}
        save_checkpoint(path, state, keep_previous=False, check_folder=session.check_folder)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
        session.log.warn(f"cannot add the statistics of -unknown to {path} ({cause_of(error)})")


def measure(path: Path, plan: TrainPlan, trainer: Trainer, session: Session) -> dict[str, Any]:
    """Return the statistics and their figures, or the reason why there are none. Collective."""
    num_val = len(plan.eval_set)
    if num_val < FEWEST_IMAGES:
        return {"reason": f"there are {counted(num_val, 'validation image')}, fewer than {FEWEST_IMAGES}"}
    if plan.config.DATA.TOKENS or plan.train_set.makes_batches:
        return {"reason": "images of varying size and generated images are not supported"}
    model, num_train = load_saved(path, trainer), len(plan.train_set)
    say = session.log.say if num_train + num_val > MANY_IMAGES else session.log.note
    say(f"comparing up to {MOST_COMPARED:,} training and validation images each, for STRANGERS")
    try:
        train, classes = features_of_set(model, plan.train_set, trainer, session)
        val, _ = features_of_set(model, plan.eval_set, trainer, session)
    except ConfigError as error:
        return {"reason": str(error)}
    return trainer.process.first(lambda: summarize(train, classes, val))


def summarize(train: FeaturePair, classes: np.ndarray, val: FeaturePair) -> dict[str, Any]:
    """Return the statistics of these features as JSON values, with a histogram of the validation images."""
    if not all(np.isfinite(each).all() for each in (*train, *val)):
        return {"reason": "some features are not finite"}
    known = Known.fit(train, classes, val, int(classes.max()) + 1)
    scores = known(FeaturePair(*map(torch.from_numpy, val))).numpy()
    noise = np.random.default_rng(0)
    moved = [each * (1 + LIKE_ROUNDING * noise.standard_normal(each.shape, np.float32)) for each in val]
    again = known(FeaturePair(*map(torch.from_numpy, moved))).numpy()
    if (~(np.abs(again - scores) <= MOST_MOVED)).mean() > QUANTILE:  # ~: true for NaN too
        return {"reason": "the images are so much alike that rounding decides which of them fit"}
    return {
        "statistics": to_plain(known),
        "figures": {
            "num_training": len(classes),
            "num_validation": len(scores),
            "histogram": histogram(scores),
        },
    }


def histogram(scores: np.ndarray) -> list[list[float]]:
    """Return [lower end, upper end, count] of bins. Scores outside the bins count in the outermost ones."""
    ends = np.linspace(-2, 2, 21).round(1)
    counts, _ = np.histogram(scores.clip(ends[0], ends[-1]), ends)
    return [[*each] for each in zip(ends[:-1].tolist(), ends[1:].tolist(), counts.tolist(), strict=True)]
