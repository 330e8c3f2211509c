"""main_multi_gpu.py, whose process 1 meets NaN in the images of updates 21 to 25.

python -m tests.support.programs.poisoned SETTINGS.yaml CODE.pth FLAGS, once per process as launchers do; the exit code of process 0
is written to CODE.pth.
"""

import os
import sys

import torch

import main_multi_gpu
from engine.train.trainer import Trainer
from utils.program import exit_code, exit_now

if __name__ == "__main__":
    settings, out, *flags = sys.argv[1:]
    place = Trainer._place

    def poisoned(trainer, batch):
        images, targets = place(trainer, batch)
        is_bad = trainer.process.rank == 1 and 21 <= batch.piece.step <= 25
        return (images * float("nan") if is_bad else images), targets

    Trainer._place = poisoned
    code = exit_code(main_multi_gpu.main, ["-cfg", settings, *flags])
    if os.environ["RANK"] == "0":
        torch.save(code, out)
    exit_now(code)
