"""A short trial of a run: some updates and an evaluated batch say how long the whole run takes.

It changes the model.
"""

import contextlib
import itertools
import time
from dataclasses import replace

import numpy as np

from datasets import BadImages, build_eval_data
from engine.evaluate_weights import evaluate_both
from engine.features.compute import MOST_IMAGES, why_not_fitted
from engine.memory import naming_remedy
from engine.plan import Inputs, TrainPlan
from engine.train.forecast import END_BY_START, Forecast, RunTimes
from engine.train.trainer import Trainer
from models.heads import output_layers

SECONDS, MOST_UPDATES = 3.0, 20  # the limits for timing updates; at least two updates are timed


def alone(inputs: Inputs) -> Inputs:
    """Return the inputs as if process 0 were the only process. It still computes only its share of an update."""
    return replace(inputs, process=replace(inputs.process, world_size=1, local_size=1))


def forecast_run(plan: TrainPlan, trainer: Trainer, startup: float, fitting: float = 0.0) -> Forecast:
    """Make some updates, evaluate a batch, and return a forecast whose times are measured.

    `startup` is the time from program start to the first update, in seconds, without any pass over the images, and
    `fitting` that of a linear model, if the run fits one.
    """
    config, times = plan.config, RunTimes.of(plan.config, plan.order, plan.num_evaluated)
    forecast = Forecast(config, times, time.monotonic())
    times.end_work = END_BY_START * startup
    with naming_remedy(trainer, None):  # if memory runs out
        make_updates(plan, trainer, forecast)
    times.evaluation = time_evaluation(plan, trainer)
    is_fitted = config.MODEL.NEW_CLASSIFIER != "random"
    is_scored = plan.scores_start or (is_fitted and plan.holds_out)
    times.before_first_update = startup + (times.evaluation if is_scored else 0.0)
    layers = [*output_layers(trainer.model).values()]
    if is_fitted and not plan.starts_from_its_classes and not why_not_fitted(plan, trainer, layers):
        times.before_first_update += prediction_time(plan, times) * min(len(plan.train_set), MOST_IMAGES) + fitting
    return forecast


def prediction_time(plan: TrainPlan, times: RunTimes) -> float:
    """Return how many seconds a process needs to evaluate an image with one model.

    An evaluation may have two models.
    """
    return times.evaluation / len(plan.eval_set) / (1 + plan.config.TRAIN.MODEL_EMA)


def make_updates(plan: TrainPlan, trainer: Trainer, forecast: Forecast) -> None:
    """Train for a few seconds as the run would, so that the forecast can measure an update."""
    trainer.callbacks = [forecast]
    trainer.notify("on_epoch_start")
    end = time.monotonic() + SECONDS
    with contextlib.closing(trainer.data.windows(trainer.step, plan.num_updates, trainer.left_out)) as windows:
        for number, window in enumerate(itertools.islice(windows, MOST_UPDATES), start=1):
            trainer.update(window)
            trainer.report()  # waits for the device
            if number > 1 and time.monotonic() > end:  # one update is not enough, because the first is slower
                break


def time_evaluation(plan: TrainPlan, trainer: Trainer) -> float:
    """Evaluate the first batch. Return the seconds that a process needs for its share of all validation images."""
    size = plan.config.DATA.BATCH_SIZE_EVAL or plan.config.DATA.BATCH_SIZE
    batch = plan.eval_set.take(np.arange(min(size, len(plan.eval_set))))
    data = build_eval_data(plan.config, batch, plan.process)
    # Unreadable images are reported elsewhere.
    bad_images = BadImages(plan.eval_set, plan.config.DATA.MAX_BAD_FRACTION, lambda line: None)
    for _ in range(2):  # the first evaluation is slower, so the second is timed
        start = time.perf_counter()
        evaluate_both(trainer, data, bad_images)
    return (time.perf_counter() - start) / len(batch) * len(plan.eval_set) / plan.order.world_size
