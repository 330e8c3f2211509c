"""main_multi_gpu.py, whose process 1 ends by kill -9 as an update begins.

python -m tests.support.programs.killed STEP FLAGS, once per process as launchers do; STEP -1: it is not killed.
"""

import os
import signal
import sys

import main_multi_gpu
from engine.train.trainer import Trainer
from utils.program import exit_code, exit_now

if __name__ == "__main__":
    step, *flags = sys.argv[1:]
    update = Trainer.update

    def killed(trainer, window):
        if trainer.process.rank == 1 and trainer.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        update(trainer, window)

    Trainer.update = killed
    exit_now(exit_code(main_multi_gpu.main, flags))
