"""Trainers of a small Vision Transformer, made as in a run, and comparisons of their results."""

import functools

import torch
from torch import Tensor

from configs.load import load
from datasets import build_train_data
from engine.build import build_trainer
from engine.plan import StepPlan
from models import add_adapters, build_model
from models.compilation import parts_to_compile
from tests.support.opened import open_sets
from tests.support.runs import ROOT
from utils.distributed import Process
from utils.log import Log

SIZES = "MODEL.EMBED_DIM=128 MODEL.NUM_HEADS=2 MODEL.DEPTH=3 MODEL.DROPOUT=0 MODEL.ATTENTION_DROPOUT=0".split()
BATCH = {"cuda": ["DATA.BATCH_SIZE=32"], "cpu": ["DATA.BATCH_SIZE=8", "DATA.IMAGE_SIZE=32", "MODEL.PATCH_SIZE=8"]}


def small_trainer(device: str, *options: str):
    """Return a trainer at step 0, with the same weights each time."""
    words = ["DATA.DATASET=synthetic", "MODEL.NUM_CLASSES=64", f"DEVICE={device}", *SIZES, *BATCH[device], *options]
    config = load(["-cfg", str(ROOT / "configs/vit_tiny_patch16_224.yaml"), "-opts", *words]).config
    train_set, _ = open_sets(config)
    process = Process.start(config.DEVICE)
    torch.manual_seed(0)
    model = add_adapters(build_model(config, 64), config).to(process.device)
    data = build_train_data(config, train_set, process)
    trainer = build_trainer(StepPlan.of_trial(config, process, train_set), model, data, Log(1))
    if config.COMPILE and device == "cpu":
        for part in parts_to_compile(trainer.computing.model, config):
            part.compile(backend="eager", dynamic=False)  # a compiler that generates code would take half a minute
    return trainer


def first_batches(trainer) -> list:
    """Return the micro-batches of the first update."""
    windows = trainer.data.windows(0, 1)  # kept alive while its batches are read
    return list(next(windows).batches)


def train(trainer, steps: int) -> tuple[float, list[Tensor]]:
    """Return the mean loss of the next updates, and the weights after them."""
    for window in trainer.data.windows(trainer.step, trainer.step + steps):
        trainer.update(window)
    return trainer.report().mean_loss, [each.detach() for each in trainer.model.parameters()]


def relative_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the error of all tensors together, relative to their norm."""
    pairs = list(zip(got, expected, strict=True))
    square = functools.partial(sum, start=torch.zeros((), device=expected[0].device, dtype=torch.float64))
    error = square((a.double() - b.double()).square().sum() for a, b in pairs)
    return (error / square(b.double().square().sum() for _, b in pairs)).sqrt().item()
