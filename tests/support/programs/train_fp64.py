"""Trains the small model in float64 for 12 updates, once for each way of splitting the batch.

python -m tests.support.programs.train_fp64 SETTINGS.yaml OUT.pth CASES, once per process as launchers do. Each case is
NUM_IMAGES,DROP_LAST,MIXUP_MODE,BATCH_SIZE,ACCUM_ITER; MIXUP_MODE "none" means no augmentation. With ,FITS appended,
the last process runs out of memory whenever it processes more than FITS images at once.
"""

import os
import sys

import numpy as np
import torch

from configs.load import load
from datasets import build_train_data, load_image_sets
from engine import first_passes
from engine.build import build_trainer
from models import build_model
from tests.support.planted import run_out
from utils.distributed import Process
from utils.launch import find_launched_rank
from utils.log import Log
from utils.program import exit_now

AUGMENTATION = ("TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.REPEATED_AUG=3").split()


def train(settings: str, case: str, process: Process) -> dict[str, torch.Tensor]:
    """Return the weights after 12 updates."""
    num_images, drop_last, mode, batch_size, accumulate, *fits = case.split(",")
    options = [f"DATA.DROP_LAST={drop_last}", f"DATA.BATCH_SIZE={batch_size}", f"TRAIN.ACCUM_ITER={accumulate}"]
    if mode == "none":  # clipping would hide gradients that are too large
        options.append("TRAIN.GRAD_CLIP=null")
    else:
        options += [f"TRAIN.MIXUP_MODE={mode}", *AUGMENTATION]
    options += ["TRAIN.SMOOTHING=0.1", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.NUM_EPOCHS=12"]  # so that no learning rate is 0
    config = load(["-cfg", settings, "-opts", *options]).config
    train_set, _ = load_image_sets(config)
    train_set = train_set.take(np.arange(int(num_images)))
    torch.manual_seed(0)
    model = build_model(config, 10).double()
    data = build_train_data(config, train_set, process)
    trainer = build_trainer(config, process, model, data, Log(process.rank))
    if fits and process.rank == process.world_size - 1:
        run_out(trainer, int(fits[0]), step=0)
    first_passes.fit_micro_batches(trainer, Log(process.rank))
    for window in trainer.data.windows(0, 12):
        trainer.update(window)
    return model.state_dict()


if __name__ == "__main__":
    settings, out, *cases = sys.argv[1:]
    first_passes.raises_when_full = lambda device: True
    process = Process.start("cpu", find_launched_rank(os.environ))
    weights = {case: train(settings, case, process) for case in cases}
    if process.is_first:
        torch.save(weights, out)
    process.close()
    exit_now(0)
