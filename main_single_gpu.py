"""Train or evaluate a Vision Transformer on one device.

python main_single_gpu.py -cfg configs/vit_digits.yaml -amp
"""

import os
import sys
from pathlib import Path

from utils.program import exit_code, exit_now, relax_gc  # isort: skip
from configs.combinations import is_typed
from configs.load import LoadedConfig
from engine.settings import load_settings
from utils.commands import TYPED, as_typed
from utils.errors import ConfigError
from utils.text import warning


def main(arguments: list[str]) -> int:
    loaded = load_settings(arguments)
    start = loaded.config.START
    if (start.URL, start.WORLD_SIZE, start.RANK) != (None, None, None):
        raise ConfigError(
            "-dist_url, -world_size and -rank: main_single_gpu.py runs one process; use main_multi_gpu.py"
        )
    if (start.NGPUS or 1) > 1:
        start_several(loaded)
    if start.CHECK:
        from engine.check import check

        return check(loaded)
    from engine.run import run  # imported after the check of the settings, because importing torch takes seconds
    from utils.distributed import Process

    return run(loaded, Process.start(loaded.config.DEVICE))


def start_several(loaded: LoadedConfig) -> None:
    """Start the processes that NGPUS asks for, refuse the flag, or warn about a settings file, which may be shared."""
    origin, number = loaded.origins["NGPUS"], loaded.config.START.NGPUS
    if TYPED in os.environ:  # halfstep, which has one command for any number of processes
        multi = Path(__file__).with_name("main_multi_gpu.py")
        os.execv(sys.executable, [sys.executable, str(multi), *loaded.arguments])
    if is_typed("NGPUS", loaded.origins):
        raise ConfigError(
            f"NGPUS ({origin}) is {number}: main_single_gpu.py runs one process; "
            f"for {number}, run main_multi_gpu.py -ngpus {number} with the other flags"
        )
    print(
        warning(
            as_typed(f"NGPUS ({origin}) is {number}, but main_single_gpu.py runs one process; run main_multi_gpu.py")
        )
    )


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
