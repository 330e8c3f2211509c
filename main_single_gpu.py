"""Train or evaluate a Vision Transformer on one device.

python main_single_gpu.py -cfg configs/vit_digits.yaml -amp
"""

import sys

from utils.program import exit_code, exit_now, relax_gc  # isort: skip
from configs.checks import is_typed
from configs.load import LoadedConfig
from engine.settings import load_settings
from scripts.train import has_rank, train
from utils.errors import ConfigError
from utils.text import warning


def main(arguments: list[str]) -> int:
    loaded = load_settings(arguments)
    if has_rank(loaded):
        raise ConfigError(
            "-dist_url, -world_size and -rank: main_single_gpu.py runs one process; use main_multi_gpu.py"
        )
    if (loaded.config.NGPUS or 1) > 1:
        refuse_several(loaded)
    return train(loaded)


def refuse_several(loaded: LoadedConfig) -> None:
    """Refuse the flag -ngpus, or warn about NGPUS in a settings file, which several programs may use."""
    origin, number = loaded.origins["NGPUS"], loaded.config.NGPUS
    if is_typed("NGPUS", loaded.origins):
        raise ConfigError(
            f"NGPUS ({origin}) is {number}: main_single_gpu.py runs one process; "
            f"for {number}, run main_multi_gpu.py -ngpus {number} with the other flags"
        )
    print(warning(f"NGPUS ({origin}) is {number}, but main_single_gpu.py runs one process; run main_multi_gpu.py"))


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
