"""Train or evaluate a Vision Transformer on several devices, one process each.

CUDA_VISIBLE_DEVICES=0,1 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
torchrun --nproc_per_node 2 main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
srun --ntasks 2 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
mpirun -np 2 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
"""

import os
import sys

from configs.load import Loaded, load
from utils.errors import ToldError, UserError, exit_code
from utils.launch.launch_env import Asked, Place, count_local, find_place, told_rank
from utils.program import hurry, leave


def main(arguments: list[str]) -> int:
    loaded = load_once(arguments)  # also before launching: a mistake is told at once
    config, dist = loaded.config, loaded.config.DIST
    asked = Asked(dist.URL, dist.WORLD_SIZE, dist.RANK, config.NGPUS, dist.TIMEOUT)
    place = find_place(os.environ, asked)
    if config.CHECK:
        return check_once(loaded, place)
    from utils.distributed import Process, find_devices

    if place is None:
        from utils.launch.torchrun import launch

        return launch(__file__, arguments, config.NGPUS or find_devices(config.DEVICE)[1])
    from engine.run import run

    return run(loaded, Process.start(config.DEVICE, os.environ, asked))


def check_once(loaded: Loaded, place: Place | None) -> int:
    """-check in process 0 alone. The others end at once: reading all images may take longer than they would wait."""
    if place and place.rank:
        return 0
    from engine.check.preflight import check
    from utils.distributed import die_with_parent

    if place is None:
        return check(loaded, loaded.config.NGPUS)
    if place.is_watched:
        die_with_parent()
    return check(loaded, place.world_size, count_local(os.environ, place.world_size))


def load_once(arguments: list[str]) -> Loaded:
    """The settings; a mistake in them is told by one process of the launcher's, not by each."""
    try:
        return load(arguments)
    except UserError as error:
        raise (error if told_rank(os.environ) == "0" else ToldError(str(error))) from None


if __name__ == "__main__":
    hurry()
    leave(exit_code(main, sys.argv[1:]))
