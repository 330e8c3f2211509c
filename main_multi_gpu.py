"""Train or evaluate a Vision Transformer on several devices, one process each.

CUDA_VISIBLE_DEVICES=0,1 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
torchrun --nproc_per_node 2 main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
"""

import os
import sys

from configs.load import Loaded, load
from utils.errors import ToldError, UserError, exit_code


def main(arguments: list[str]) -> int:
    loaded = load_once(arguments)  # also before launching: a mistake is told at once
    if loaded.config.CHECK:
        return check_once(loaded)
    from utils.distributed import Process, find_devices, was_launched

    if not was_launched(os.environ):
        from utils.launch import launch

        return launch(__file__, arguments, loaded.config.NGPUS or find_devices(loaded.config.DEVICE)[1])
    from engine.run import run

    return run(loaded, Process.start(loaded.config.DEVICE, os.environ))


def check_once(loaded: Loaded) -> int:
    """-check in process 0 alone. The others end at once: reading all images may take longer than they would wait."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    from engine.preflight import check
    from utils.distributed import count_local, die_with_parent, was_launched

    if not was_launched(os.environ):
        return check(loaded, loaded.config.NGPUS)
    die_with_parent()
    return check(loaded, int(os.environ["WORLD_SIZE"]), count_local(os.environ))


def load_once(arguments: list[str]) -> Loaded:
    """The settings; a mistake in them is told by one process of torchrun's, not by each."""
    try:
        return load(arguments)
    except UserError as error:
        raise (error if os.environ.get("RANK", "0") == "0" else ToldError(str(error))) from None


if __name__ == "__main__":
    code = exit_code(main, sys.argv[1:])
    from utils.distributed import leave

    leave(code)
