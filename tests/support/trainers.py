"""Trainers of small settings, without an entry script around them."""

from collections.abc import Callable, Iterator

import torch

from configs.schema import Config
from datasets import Window, build_train_data, load_image_sets
from engine.train.build import build_trainer
from engine.train.callbacks import Callback
from engine.train.counters import EpochResult, Report
from engine.train.epoch import train_epoch
from engine.train.trainer import Trainer
from models import build_model
from tests.support.configs import CPU
from utils.distributed import Process
from utils.log import Log
from utils.signals import StopSignal


class Reports(Callback):
    """Keeps every report, and the result of every epoch."""

    def __init__(self):
        self.seen, self.results = [], []

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self.seen.append(report)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        self.results.append(result)


def make_trainer(config: Config, double: bool = False, callbacks: list[Callback] = ()) -> Trainer:
    train_set, _ = load_image_sets(config)
    torch.manual_seed(0)
    model = build_model(config, 10)
    data = build_train_data(config, train_set, 0, 1, CPU)
    trainer = build_trainer(config, model.double() if double else model, data, Process(CPU), Log(0))
    trainer.callbacks = list(callbacks)
    return trainer


def train(
    trainer: Trainer,
    windows: Iterator[Window] | None = None,
    stop: StopSignal | None = None,
    save: Callable = lambda: None,
) -> Report:
    """The rest of the trainer's epoch, without a log."""
    windows = windows or trainer.data.windows(trainer.step, trainer.data.steps_per_epoch * (trainer.epoch + 1))
    return train_epoch(trainer, windows, Log(1), stop or StopSignal(), save)
