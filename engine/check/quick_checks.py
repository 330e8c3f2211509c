"""What can be wrong with a run and costs next to nothing to see: looked at by -check, and at the start of every run."""

import math
import shutil
import tempfile
from pathlib import Path

from torch import nn

from configs.schema import Config, Train
from datasets import TrainData
from datasets.loading.workers import BATCHES_AHEAD, count_workers
from datasets.sources.synthetic import SyntheticImages
from engine.memory.estimate import checkpoint_bytes
from engine.train.optim import Schedule
from utils.distributed import Process
from utils.findings import OK, WARN, WRONG, Finding
from utils.units import format_bytes

# Rates per 256 images, from fine-tuning to training from scratch: rules of thumb.
CUSTOMARY = {"AdamW": (1e-5, 1e-3), "Adam": (1e-5, 1e-3), "SGD": (1e-3, 1e-1)}
FAR = 10  # times
SHARED = Path("/dev/shm")  # where workers lay their batches on Linux
NEAR = 0.8  # share of what is free


def quick_checks(config: Config, model: nn.Module, data: TrainData, process: Process, path: Path) -> list[Finding]:
    """All of them. `path`: the folder that will be written to, or one that it will be made in."""
    num_workers = loader_processes(config, data.image_set, process)
    return [
        check_rate(config.TRAIN, data.global_batch),
        check_warm_up(config.TRAIN),
        check_disk(config, path, checkpoint_bytes(config.TRAIN, model)),
        check_shared_memory(config, num_workers),
    ]


def check_rate(settings: Train, global_batch: int) -> Finding:
    """The highest learning rate against what others use for as many images."""
    name, scaled_for = settings.OPTIMIZER.NAME, settings.LINEAR_SCALED_LR
    rate = Schedule(settings, steps_per_epoch=1, global_batch=global_batch).base
    per_256 = rate * 256 / global_batch
    least, most = CUSTOMARY[name]
    origin = f" (TRAIN.BASE_LR {settings.BASE_LR:g} x {global_batch} / {scaled_for})" if scaled_for else ""
    found = (
        f"{rate:.3g}{origin} for {global_batch} images an update, {per_256:.3g} for each 256; "
        f"customary with {name}: {least:g} to {most:g}"
    )
    if least / FAR <= per_256 <= most * FAR:
        return Finding("learning rate", found)
    remedy = "set TRAIN.BASE_LR, or TRAIN.LINEAR_SCALED_LR to the images an update that it is meant for"
    return Finding("learning rate", found, WARN, remedy)


def check_warm_up(settings: Train) -> Finding:
    """Whether the learning rate ever gets to its height."""
    found = f"{settings.WARMUP_EPOCHS:g} of {settings.NUM_EPOCHS} epochs"
    if settings.WARMUP_EPOCHS <= settings.NUM_EPOCHS:
        return Finding("warm-up", found)
    return Finding("warm-up", found, WARN, "set TRAIN.WARMUP_EPOCHS lower: the rate never gets to TRAIN.BASE_LR")


def check_output(save: str) -> Finding:
    """Whether a run's folder can be made there."""
    try:
        folder = existing(Path(save))
        with tempfile.TemporaryFile(dir=folder):
            return Finding("output", f"{folder} can be written to")
    except OSError as error:
        remedy = "choose another folder with -output"
        return Finding("output", f"SAVE: cannot write to {save} ({error.strerror})", WRONG, remedy)


def check_disk(config: Config, path: Path, each: int) -> Finding:
    """Whether there is room at `path` for all checkpoints of `each` bytes that will lie there at once."""
    kept = min(config.KEEP_CHECKPOINTS, math.ceil(config.TRAIN.NUM_EPOCHS / config.SAVE_FREQ))
    count = kept + 4  # last, best, previous, and the one that is being written
    # A resumed run's checkpoints have their room already; a file with several names has it once.
    present = {status.st_ino: status.st_size for status in (file.stat() for file in path.rglob("*.pth"))}
    need = max(count * each - sum(present.values()), 2 * each)
    free = free_bytes(existing(path))
    found = (
        f"checkpoints of {format_bytes(each)}, up to {count} at once: {format_bytes(need)} of {format_bytes(free)} "
        f"free at {path}"
    )
    return Finding("disk", found, *fullness(need, free, "make room, lower KEEP_CHECKPOINTS, or set -output"))


def existing(path: Path) -> Path:
    """The folder itself, or the nearest around it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def check_shared_memory(config: Config, num_workers: int) -> Finding:
    """Whether the batches that `num_workers` on this machine read ahead fit into shared memory; else they die of SIGBUS."""
    data, what = config.DATA, "shared memory"
    if not num_workers or not SHARED.is_dir():
        return Finding(what, "not needed")
    num_images = data.BATCH_SIZE + (data.BATCH_SIZE_EVAL or data.BATCH_SIZE)  # training's workers outlive evaluation
    ahead = data.PREFETCH or BATCHES_AHEAD  # of each worker; fewer where the CPU computes
    need = num_workers * ahead * num_images * data.IMAGE_CHANNELS * data.IMAGE_SIZE**2
    free = free_bytes(SHARED)
    found = (
        f"{num_workers} loader processes with {ahead} batches each: {format_bytes(need)} of {format_bytes(free)} "
        f"in {SHARED}"
    )
    remedy = "enlarge it (docker run --shm-size), or lower -num_workers or -batch_size"
    return Finding(what, found, *fullness(need, free, remedy))


def loader_processes(config: Config, image_set, process: Process) -> int:
    """Of all training processes on this machine together; threads need no shared memory."""
    if config.DATA.WORKERS == "threads" or isinstance(image_set, SyntheticImages):
        return 0
    return count_workers(config.DATA, image_set, process.world_size, process.device) * process.local_size


def fullness(need: float, free: float, remedy: str) -> tuple[str, str]:
    """The verdict, and the remedy if there is need of one."""
    if need > NEAR * free:
        return WRONG if need > free else WARN, remedy
    return OK, ""


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
