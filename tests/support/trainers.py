"""Trainers with small settings, without an entry script."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn.functional import cosine_similarity

from configs.schema import Config
from datasets import Window, build_train_data
from engine.build import build_trainer
from engine.plan import StepPlan
from engine.stages import train_epoch
from engine.train.callback import Callback
from engine.train.counters import EpochResult, Report
from engine.train.loss_scale import LossScaler
from engine.train.trainer import Trainer
from models import add_adapters, build_model
from tests.support.configs import CPU
from tests.support.opened import open_sets
from utils.distributed import Process
from utils.log import Log
from utils.program import StopSignal


class Reports(Callback):
    """A callback that records every report and every epoch's result."""

    def __init__(self):
        self.seen, self.results = [], []

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self.seen.append(report)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        self.results.append(result)


class Lines(Log):
    """A log that records its lines, separately by kind."""

    def __init__(self):
        super().__init__(rank=1)
        self.said, self.noted, self.warned = [], [], []
        self.say, self.note, self.warn = self.said.append, self.noted.append, self.warned.append


def make_trainer(
    config: Config,
    double: bool = False,
    callbacks: list[Callback] = (),
    device: torch.device = CPU,
    classes: list[str] | None = None,
) -> Trainer:
    """Return a trainer as a run builds it. Its initial weights are the same in each call.

    `classes`: the classes that a teacher must know; None: a teacher has random weights.
    """
    train_set, _ = open_sets(config)
    torch.manual_seed(0)
    model = add_adapters(build_model(config, 10), config)
    data = build_train_data(config, train_set, Process(device))
    model = (model.double() if double else model).to(device)
    plan = replace(StepPlan.of_trial(config, Process(device), train_set), classes=classes)
    trainer = build_trainer(plan, model, data, Log(0))
    trainer.callbacks = list(callbacks)
    return trainer


def update(trainer: Trainer, times: int = 1) -> Trainer:
    """Run the next `times` updates."""
    for window in trainer.data.windows(trainer.step, trainer.step + times):
        trainer.update(window)
    return trainer


def scaled_step(scaler: LossScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Do with the scaler what the trainer does after a backward. Return whether the update was skipped."""
    scaler.unscale_(optimizer)
    skipped = bool(scaler.found_inf())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return skipped


def cosines_to_float32(trainer: Trainer) -> dict[str, float]:
    """Return for each weight the cosine between its gradient and its float32 gradient on the next batch."""
    windows = trainer.data.windows(trainer.step, trainer.step + 1)
    images, targets = trainer.prepare(next(iter(next(windows).batches)))
    exact, gradients = copy.deepcopy(trainer.model), []
    trainer.transforms.revert(exact)
    for model, precision in ((trainer.model, trainer.precision.autocast()), (exact, contextlib.nullcontext())):
        with precision:
            loss = trainer.loss(model(images), targets) * trainer.precision.scaler.get_scale()
        gradients.append([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])
    names = [name for name, _ in exact.named_parameters()]
    return {name: cosine_similarity(*pair, dim=0).item() for name, *pair in zip(names, *gradients, strict=True)}


def big_logits(model: torch.nn.Module, block: int = 1) -> None:
    """Scale queries and keys to hundreds, so that their products overflow float16 at any loss scale."""
    with torch.no_grad():
        model.blocks[block].attn.qkv.weight[:32].normal_(std=200.0)


def train(
    trainer: Trainer,
    windows: Iterator[Window] | None = None,
    stop: StopSignal | None = None,
    save: Callable = lambda: None,
) -> Report:
    """Run the rest of the trainer's epoch, without a log."""
    windows = windows or trainer.data.windows(trainer.step, trainer.data.steps_per_epoch * (trainer.epoch + 1))
    report, _ = train_epoch(trainer, windows, Log(1), stop or StopSignal(), save)
    return report
