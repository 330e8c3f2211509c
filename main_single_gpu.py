"""Train or evaluate a Vision Transformer on one device.

python main_single_gpu.py -cfg configs/vit_digits.yaml -amp
"""

import sys

from configs.load import load
from utils.errors import ConfigError, exit_code
from utils.program import hurry, leave


def main(arguments: list[str]) -> int:
    loaded = load(arguments)
    dist = loaded.config.DIST
    if (dist.URL, dist.WORLD_SIZE, dist.RANK) != (None, None, None):
        raise ConfigError(
            "-dist_url, -world_size and -rank: this is the program for one process; use main_multi_gpu.py"
        )
    if loaded.config.CHECK:
        from engine.check.preflight import check

        return check(loaded)
    from engine.run import run  # after the settings are known to be right: importing torch takes seconds
    from utils.distributed import Process

    return run(loaded, Process.start(loaded.config.DEVICE, environment={}))


if __name__ == "__main__":
    hurry()
    leave(exit_code(main, sys.argv[1:]))
