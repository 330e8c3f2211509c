"""main_multi_gpu.py in float64, whose last process runs out of memory from step 5 on when it takes more than FITS images.

python tests/support/programs/short_of_memory.py FITS FLAGS. Started plainly it starts itself twice, as main_multi_gpu.py does.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
sys.path.insert(0, str(ROOT))

import main_multi_gpu  # noqa: E402
from engine.train.trainer import Trainer  # noqa: E402
from tests.support.programs.train_fp64 import run_out  # noqa: E402
from utils.launch.torchrun import launch  # noqa: E402
from utils.program import exit_code, exit_now  # noqa: E402


def begin(trainer: Trainer, config, model, data, process, *rest) -> None:
    ordinary(trainer, config, model.double(), data, process, *rest)
    if process.rank == process.world_size - 1:
        run_out(trainer, int(sys.argv[1]), step=5)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        exit_now(launch(__file__, sys.argv[1:], 2))
    ordinary, Trainer.__init__ = Trainer.__init__, begin
    exit_now(exit_code(main_multi_gpu.main, sys.argv[2:]))
