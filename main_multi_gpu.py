"""Train or evaluate a Vision Transformer on several devices, with one process per device.

CUDA_VISIBLE_DEVICES=0,1 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
torchrun --nproc_per_node 2 main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
srun --ntasks 2 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
mpirun -np 2 python main_multi_gpu.py -cfg configs/vit_base_patch16_224.yaml -amp
"""

import os
import sys
from contextlib import suppress
from dataclasses import replace

from utils.program import exit_code, exit_now, relax_gc  # isort: skip
from configs.load import LoadedConfig
from engine.settings import load_settings
from utils.errors import AlreadyReportedError, ConfigError, UserError
from utils.launch import (
    LaunchedRank,
    check_single_node,
    find_launched_rank,
    launch,
    rank_in_environment,
)
from utils.text import counted, warning

# Environment variable with the launcher's start time, on a clock that all processes of a machine share.
STARTED = "HALFSTEP_STARTED"


def main(arguments: list[str]) -> int:
    loaded = load_once(arguments)  # the launcher also loads the settings, to report a mistake at once
    config, dist = loaded.config, loaded.config.DIST
    launched = find_launched_rank(os.environ, dist.URL, dist.WORLD_SIZE, dist.RANK, config.NGPUS)
    if launched is None:
        check_single_node(os.environ)
        warn_of_few_cores(config.DEVICE, config.NGPUS)
    if config.CHECK:
        return check_once(loaded, launched)
    from utils.distributed import Process
    from utils.host import find_devices

    if launched is None:
        os.environ[STARTED] = str(loaded.started)
        return launch(__file__, arguments, config.NGPUS or find_devices(config.DEVICE)[1])
    from engine.run import run

    if STARTED in os.environ:
        loaded = replace(loaded, started=float(os.environ[STARTED]))
    return run(loaded, Process.start(config.DEVICE, launched, dist.TIMEOUT))


def warn_of_few_cores(device: str, num_processes: int | None) -> None:
    """Warn if more processes than cores would compute on the CPU."""
    from utils.host import count_cores, find_devices

    cores = count_cores()
    with suppress(ConfigError):  # the run, or a row of -check, reports that there is no such device
        if (num_processes or 1) > cores and find_devices(device)[0] == "cpu":
            shared = f"-ngpus: {num_processes} processes share {counted(cores, 'core')} of this CPU"
            print(warning(f"{shared}; one process uses all cores"))


def check_once(loaded: LoadedConfig, launched: LaunchedRank | None) -> int:
    """Run -check on rank 0. The other ranks exit at once: reading all images may take longer than DIST.TIMEOUT."""
    if launched and launched.rank:
        return 0
    from engine.check import check
    from utils.program import die_with_parent

    if launched is None:
        return check(loaded, loaded.config.NGPUS)
    if launched.parent_is_launcher:
        die_with_parent()
    return check(loaded, max(launched.world_size, launched.max_world_size), launched.local_size or launched.world_size)


def load_once(arguments: list[str]) -> LoadedConfig:
    """Load the settings. Only rank 0 reports a mistake in them."""
    try:
        return load_settings(arguments)
    except UserError as error:
        raise (AlreadyReportedError(str(error)) if rank_in_environment(os.environ) else error) from None


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
