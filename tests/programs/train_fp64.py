"""Trains the small model in float64 on some digits for 20 updates and saves the weights.

python -m tests.programs.train_fp64 SETTINGS.yaml NUM_IMAGES OUT.pth [-opts ...], once per process as launchers do.
"""

import os
import sys

import numpy as np
import torch

from configs.load import load
from datasets import build_train_data, load_image_sets
from engine.trainer import Trainer
from models import build_model
from utils.distributed import Process
from utils.log import Log
from utils.signals import StopSignal


def main() -> None:
    settings, num_images, out, *options = sys.argv[1:]
    config = load(["-cfg", settings, *options]).config
    process = Process.start("cpu", os.environ)
    train_set, _ = load_image_sets(config)
    train_set = train_set.take(np.arange(int(num_images)))
    torch.manual_seed(0)
    model = build_model(config, 10).double()
    data = build_train_data(config, train_set, process.rank, process.world_size, process.device)
    trainer = Trainer(config, model, data, process, Log(process.rank), StopSignal())
    for window in data.windows(0, 20):
        trainer.update(window)
    if process.is_first:
        torch.save({"weights": model.state_dict(), "samples": trainer.totals[2], "updates": trainer.step}, out)
    process.close()


if __name__ == "__main__":
    main()
