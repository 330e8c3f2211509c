"""DATA.BATCH_SIZE auto: finds the largest batch that fits, by trials on a GPU and by an estimate elsewhere."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from configs.schema import Config
from configs.values import SETTINGS
from datasets import TrainData, build_train_data
from datasets.sources.synthetic import read_synthetic
from engine.build import make_wrappers
from engine.check.memory import estimate, free_memory
from engine.plan import Inputs
from engine.precision.policy import Precision, amp_hint
from engine.train.micro_batches import Guard
from engine.train.trainer import Trainer
from engine.trial import build_trial
from extras.memory.guard import MemoryGuard, release, shortage
from models import add_adapters, build_model
from utils.distributed import Process
from utils.errors import ConfigError, StoppedBySignal
from utils.log import Log
from utils.program import StopSignal
from utils.text import counted, format_bytes

# Fractions of free memory kept in reserve. On a device, the reserve is for fragmentation and libraries. On a host it is
# larger, because other programs may start, and because the system kills a process whose batch is too large,
# without an error.
DEVICE_MARGIN, HOST_MARGIN = 0.1, 0.2
STEP = 8  # batch sizes are multiples of this number, for Tensor Cores
CLOSE = 0.02  # relative difference between batch sizes that is not worth another trial
# Minimum number of updates per epoch. With fewer updates, a model hardly learns from a small data set.
UPDATES = 10
AT_LIMIT = f"with a larger batch an epoch would have fewer than {UPDATES} updates"


def find_batch_size(
    inputs: Inputs, num_images: int, num_classes: int, stop: StopSignal | None = None
) -> tuple[int, str]:
    """Return one batch size for all processes, and how it was found. `num_images`: the number of training images."""
    config, process = inputs.config, inputs.process
    start, limit = time.perf_counter(), max_images(config, num_images, process.world_size)
    if can_run_out(process.device):
        found, how = try_sizes(Trial(config, num_classes, process, stop), limit)
    else:
        found, how = calculate(config, num_classes, inputs.precision, process, limit)
    agreed = process.host_min(-stop.number if stop and stop.number else found)
    if agreed < 0:
        raise StoppedBySignal(-agreed, "while searching for the largest batch")
    if agreed == 0:
        process.first(lambda: refuse(config, how, process.device))
    notes = [how]
    if agreed == limit:
        notes.append(AT_LIMIT)
    if process.world_size > 1:
        notes.append(f"the smallest among {process.world_size} processes")
    if config.COMPILE:
        notes.append("without torch.compile, which usually needs less memory")
    return agreed, "; ".join([*notes, f"{time.perf_counter() - start:.1f} s"])


def max_images(config: Config, num_images: int, world_size: int) -> int:
    """Return the largest batch size with which an epoch has at least UPDATES updates."""
    limit = min(num_images // (UPDATES * world_size * config.TRAIN.ACCUM_ITER), SETTINGS["DATA.BATCH_SIZE"].bounds[1])
    return max(rounded(limit, config), unit_of(config))


def unit_of(config: Config) -> int:
    return 2 if config.TRAIN.mixes else 1


def rounded(number: int, config: Config) -> int:
    """Round down to a multiple of 8; below 8, to an even number if images are mixed in pairs."""
    step = STEP if number >= STEP else unit_of(config)
    return number // step * step


def can_run_out(device: torch.device) -> bool:
    """Return whether the device raises an error when its memory is full. A host kills the process instead."""
    return device.type in ("cuda", "xpu")


def size_of_images(config: Config) -> tuple[str, str, str]:
    """Return the setting that decides the size of training images, its value, and a description of the setting."""
    data = config.DATA
    if not data.TOKENS:
        return "DATA.IMAGE_SIZE", str(data.IMAGE_SIZE), "image size"
    if data.TRAIN_TOKENS:
        return "DATA.TRAIN_TOKENS", str(list(data.TRAIN_TOKENS)), "largest number of patches"
    return "DATA.TOKENS", str(data.TOKENS), "number of patches"


def refuse(config: Config, how: str, device: torch.device) -> None:
    setting, value, _ = size_of_images(config)
    raise ConfigError(
        f"DATA.BATCH_SIZE is auto, but no batch fits, not even one of {counted(unit_of(config), 'image')} ({how}); "
        f"lower {setting} ({value}), choose a smaller model (MODEL.NAME is {config.MODEL.NAME})"
        f"{amp_hint(config.AMP, device)}, or stop other programs that use the memory"
    )


def calculate(config: Config, num_classes: int, precision: Precision, process: Process, limit: int) -> tuple[int, str]:
    """Return the largest batch, calculated from forwards of 2 and 3 images (0 if none fits), and how it was found."""
    on_device, free = can_run_out(process.device), free_memory(process.device)
    margin, sharing = (DEVICE_MARGIN, 1) if on_device else (HOST_MARGIN, process.local_size)
    shared = f" for {sharing} processes" if sharing > 1 else ""
    how = f"calculated from forwards of 2 and 3 images, with {margin:.0%} of {format_bytes(free)}{shared} left free"
    try:
        fitting = estimate(config, num_classes, precision, process).fitting((1 - margin) * free / sharing)
    except torch.OutOfMemoryError:
        return 0, how
    return rounded(min(fitting, limit), config), how


def try_sizes(trial: "Trial", limit: int) -> tuple[int, str]:
    """Return the largest batch, found by trying whole updates, and how it was found.

    The device must raise out-of-memory errors. A fraction of its memory is withheld during the search.
    """
    device, free = trial.device, free_memory(trial.device)
    module = getattr(torch, device.type)
    found = search(trial, int(DEVICE_MARGIN * free), limit)
    trial.trainer = None  # free the memory of the trial before the run trains
    release(device)
    module.reset_peak_memory_stats(device)  # so that the run reports its own peak
    return found, f"tried on {module.get_device_name(device)} with {DEVICE_MARGIN:.0%} of {format_bytes(free)} withheld"


def search(trial: "Trial", withheld: int, limit: int) -> int:
    """Return the largest batch that fits while `withheld` bytes are allocated; 0 if none does."""
    memory = torch.empty(withheld, dtype=torch.uint8, device=trial.device)
    found = bisect(trial.fits, limit)
    if not found:
        unit = unit_of(trial.config)
        fewer = [each for each in (limit, 4, 2, 1) if each <= limit and each < STEP and each % unit == 0]
        found = next((each for each in fewer if trial.fits(each)), 0)
    del memory
    return found


class Trial:
    """Tries batch sizes with a throw-away trainer like the run's trainer, on random weights and images."""

    def __init__(self, config: Config, num_classes: int, process: Process, stop: StopSignal | None = None):
        # The second micro-batch runs with the gradients of the first in memory; a third would need no more memory.
        train = replace(config.TRAIN, ACCUM_ITER=min(config.TRAIN.ACCUM_ITER, 2), REPEATED_AUG=1)
        if config.TRAIN.SIZE_SCHEDULE:
            train = replace(train, SIZE_SCHEDULE=(f"0:{config.largest_train_side}",))
        model = replace(config.MODEL, NUM_CLASSES=num_classes)
        tokens = config.DATA.TRAIN_TOKENS
        data = replace(config.DATA, TRAIN_TOKENS=(max(tokens),) if tokens else ())
        self.config = replace(config, COMPILE=False, DATA=data, TRAIN=train, MODEL=model)
        self.device, self.stop = process.device, stop
        self.has_others, self.probes = process.world_size > 1, process.world_size > 1 and not config.COMPILE
        self.trainer: Trainer | None = None
        self.has_fitted = False

    def fits(self, count: int) -> bool:
        """Return whether updates with micro-batches of this size fit. After a signal, return False without a trial."""
        if self.stop and self.stop.number:
            return False
        try:
            self.update(count, times=2)  # twice, because the first update allocates the optimizer's state
            self.trainer.report()  # synchronizes, because the device may report an error late
            self.has_fitted = True
            return True
        except RuntimeError as error:
            # A batch that is too large may also fail with another error, because it exceeds a limit of a kernel.
            if not (shortage(error) or self.has_fitted):
                raise
        # This is outside `except`, because the error's traceback keeps tensors of the forward pass alive.
        if self.has_fitted:
            self.trainer.replica = self.trainer.computing.model
            self.trainer.replica.zero_grad(set_to_none=True)
        else:
            self.trainer = None
        release(self.device)
        return False

    def update(self, count: int, times: int = 1) -> None:
        data = replace(self.config.DATA, BATCH_SIZE=count, SYNTHETIC_SIZE=count * self.config.TRAIN.ACCUM_ITER)
        config = replace(self.config, DATA=data)
        train_data = build_train_data(config, read_synthetic(config)[0], Process(self.device))
        if self.trainer is None:
            self.begin(config, train_data)
        with contextlib.closing(train_data.windows(0, times)) as windows:
            for window in windows:
                self.trainer.update(window)

    def begin(self, config: Config, train_data: TrainData) -> None:
        model = add_adapters(build_model(config, config.MODEL.NUM_CLASSES), config).to(self.device)
        silent = Log(rank=1)
        # The trial has its own loss scale, because updates change the loss scale. The trial's guard must not
        # repeat failed updates.
        process = Process(self.device)
        wrappers = make_wrappers(config, process, silent, config.MODEL.NUM_CLASSES)
        trainer = build_trial(config, process, model, train_data, silent, wrappers)
        trainer.guard = ProbeOnly(config, trainer, silent) if self.probes else Guard()
        if self.has_others:
            self.ddp_buckets = [torch.empty_like(each) for each in trainer.parameters]
        self.trainer = trainer


class ProbeOnly(MemoryGuard):
    """A guard that probes every update (a run probes only its first two) and never reduces the micro-batch."""

    def __init__(self, config: Config, trainer: Trainer, log: Log):
        super().__init__(config, trainer, log)
        self.probes_left = math.inf

    def halve(self, step: int, reason: str | None) -> None:
        raise torch.OutOfMemoryError(reason)


def bisect(fits: Callable[[int], bool], max_size: int) -> int:
    """Return the largest batch that fits, found by doubling and then bisecting; 0 if not even the smallest fits."""
    largest, too_large, size = 0, max_size // STEP * STEP + STEP, STEP
    while too_large - largest > max(STEP, CLOSE * largest):
        if fits(size):
            largest = size
        else:
            too_large = size
        doubled, middle = 2 * largest, (largest + too_large) // 2 // STEP * STEP
        size = max(STEP, doubled if doubled < too_large else middle)
    return largest
