"""Train or evaluate a Vision Transformer on one device.

python main_single_gpu.py -cfg configs/vit_digits.yaml -amp
"""

import sys

from utils.program import exit_code, exit_now, relax_gc  # isort: skip
from engine.settings import load_settings
from utils.errors import ConfigError


def main(arguments: list[str]) -> int:
    loaded = load_settings(arguments)
    start = loaded.config.START
    if (start.URL, start.WORLD_SIZE, start.RANK) != (None, None, None):
        raise ConfigError(
            "-dist_url, -world_size and -rank: main_single_gpu.py runs one process; use main_multi_gpu.py"
        )
    if start.CHECK:
        from engine.check import check

        return check(loaded)
    from engine.run import run  # imported after the check of the settings, because importing torch takes seconds
    from utils.distributed import Process

    return run(loaded, Process.start(loaded.config.DEVICE))


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
