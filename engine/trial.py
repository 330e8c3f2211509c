"""A throw-away trainer like that of a run, with random weights: for trials of memory and of time."""

from dataclasses import replace

import torch

from configs.schema import Config
from datasets import TrainData
from engine.build import build_trainer, make_wrappers
from engine.plan import plan_of
from engine.train.micro_batches import Guard
from engine.train.trainer import Trainer
from models import adapt, build_model
from utils.distributed import Process
from utils.log import Log


def trial_config(config: Config, num_classes: int) -> Config:
    """The settings of a trial: images of the largest size, not compiled, in few micro-batches."""
    # The second micro-batch runs with the gradients of the first in memory; a third would not need more.
    train = replace(config.TRAIN, ACCUM_ITER=min(config.TRAIN.ACCUM_ITER, 2), REPEATED_AUG=1)
    if config.TRAIN.SIZE_SCHEDULE:
        train = replace(train, SIZE_SCHEDULE=(f"0:{config.largest_train_side}",))
    return replace(config, COMPILE=False, TRAIN=train, MODEL=replace(config.MODEL, NUM_CLASSES=num_classes))


def build_trial(config: Config, device: torch.device, data: TrainData) -> Trainer:
    """The trainer of one process. `config`: from `trial_config`. Nothing repeats an update that fails."""
    process, silent = Process(device), Log(rank=1)
    model = adapt(build_model(config, config.MODEL.NUM_CLASSES), config).to(device)
    # A precision of its own, since its updates move the loss scale.
    plan = plan_of(config, process, data.image_set)
    wrappers = make_wrappers(config, process, silent, config.MODEL.NUM_CLASSES)
    trainer = build_trainer(plan, model, data, silent, wrappers)
    trainer.guard = Guard()
    return trainer
