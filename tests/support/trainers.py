"""Trainers of small settings, without an entry script around them."""

import torch

from configs.schema import Config
from datasets import build_train_data, load_image_sets
from engine.train.trainer import Trainer
from models import build_model
from tests.support.configs import CPU
from utils.distributed import Process
from utils.log import Log
from utils.signals import StopSignal


def make_trainer(config: Config, double: bool = False) -> Trainer:
    train_set, _ = load_image_sets(config)
    torch.manual_seed(0)
    model = build_model(config, 10)
    data = build_train_data(config, train_set, 0, 1, CPU)
    return Trainer(config, model.double() if double else model, data, Process(CPU), Log(0), StopSignal())
