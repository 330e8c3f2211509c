"""DATA.BATCH_SIZE auto: finds the largest batch that fits, by trials on a GPU and by an estimate elsewhere."""

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from configs.schema import Config
from configs.values import SETTINGS
from datasets import TrainData, build_train_data, invent_images
from engine.build import build_trainer
from engine.first_passes import gradients_of, largest_batch
from engine.memory import free_memory, release, reports_memory, shortage, too_large
from engine.plan import Inputs, StepPlan
from engine.train.trainer import Trainer
from models import add_adapters, build_model
from utils.distributed import Process
from utils.errors import StoppedBySignal
from utils.log import Log
from utils.program import StopSignal
from utils.text import counted, format_bytes
from utils.torch_internals import events_of

# Fractions of free memory kept in reserve. On a device, the reserve is for fragmentation and libraries. On a host it is
# larger, because other programs may start, and because the system kills a process whose batch is too large,
# without an error.
DEVICE_MARGIN, HOST_MARGIN = 0.1, 0.2
STEP = 8  # batch sizes are multiples of this number, for Tensor Cores
CLOSE = 0.02  # relative difference between batch sizes that is not worth another trial
# Minimum number of updates per epoch. With fewer updates, a model hardly learns from a small data set.
UPDATES = 10
AT_LIMIT = f"with a larger batch an epoch would have fewer than {UPDATES} updates"
FEW, MORE = 2, 4  # images in the two batches that are measured; BatchNorm refuses a batch of one image


def find_batch_size(
    inputs: Inputs, num_images: int, num_classes: int, stop: StopSignal | None = None
) -> tuple[int, str]:
    """Return one batch size for all processes, and how it was found. `num_images`: the number of training images."""
    config, process = inputs.config, inputs.process
    start, limit = time.perf_counter(), max_images(config, num_images, process.world_size)
    if reports_memory(process.device):
        number, how = try_sizes(StepTrial(config, num_classes, process, stop), limit)
    else:
        number, how = calculate(config, num_classes, process, limit)
    agreed = process.host_min(-stop.number if stop and stop.number else number)
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


def refuse(config: Config, how: str, device: torch.device) -> None:
    smallest = counted(unit_of(config), "image")
    raise too_large(config, device, f"DATA.BATCH_SIZE is auto, but no batch fits, not even one of {smallest} ({how})")


def calculate(config: Config, num_classes: int, process: Process, limit: int) -> tuple[int, str]:
    """Return the largest batch, calculated from updates of few images (0 if none fits), and how it was found."""
    free, sharing = free_memory(process.device), process.local_size
    shared = f" for {sharing} processes" if sharing > 1 else ""
    fitting = measure_step(config, num_classes).fitting((1 - HOST_MARGIN) * free / sharing)
    left = f"{HOST_MARGIN:.0%} of {format_bytes(free)}{shared} left free"
    how = f"calculated from updates of {FEW} and {MORE} images, with {left}"
    return rounded(min(fitting, limit), config), how


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated memory of one process's training step, in bytes."""

    fixed: float  # the part that does not depend on the batch size
    per_image: float

    def fitting(self, limit: float) -> int:
        """Return the number of images that fit into `limit` bytes."""
        return max(int((limit - self.fixed) / max(self.per_image, 1)), 0)


def measure_step(config: Config, num_classes: int) -> MemoryEstimate:
    """Return the memory of one process's step on a CPU: the peak of a small update, extrapolated."""
    trial = StepTrial(config, num_classes, Process(torch.device("cpu")))

    def compute_pass(num_images: int) -> None:
        """Compute the gradient of the first weight only: others, and the optimizer, can need more than a few images."""
        trainer = trial.trainer
        first = [each for each in trainer.computing.model.parameters() if each.requires_grad][:1]
        gradients_of(trainer, largest_batch(trainer, num_images), first)

    update = partial(trial.update, FEW)  # the first one allocates the state of the optimizer
    passes = partial(compute_pass, FEW), partial(compute_pass, MORE)
    (_, kept), (step, _), (few, _), (more, _) = peaks_of_cpu_tensors(update, update, *passes)
    per_image = (more - few) / (MORE - FEW)
    return MemoryEstimate(kept + step - FEW * per_image, per_image)


def peaks_of_cpu_tensors(*tasks: Callable[[], None]) -> list[tuple[int, int]]:
    """Run the tasks. Return for each the peak memory of CPU tensors during it, and their memory after it, relative to
    before the task."""
    # torch.profiler.profile would import torch's compiler, which takes seconds.
    from torch.autograd.profiler import profile, record_function

    with without_stderr(), profile(profile_memory=True) as profiled:
        for number, task in enumerate(tasks):
            gc.collect()  # so that no memory from before is freed during the task
            with record_function(f"task {number}"):
                task()
    events = events_of(profiled)
    spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events if event.name().startswith("task ")}
    peaks = []
    for number in range(len(tasks)):
        start, end = spans[f"task {number}"]
        inside = (event for event in events if event.name() == "[memory]" and start <= event.start_ns() <= end)
        totals = list(itertools.accumulate((event.nbytes() for event in inside), initial=0))
        peaks.append((max(totals), totals[-1]))
    return peaks


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Hide stderr, because the profiler's libraries print that there is no GPU."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def try_sizes(trial: "StepTrial", limit: int) -> tuple[int, str]:
    """Return the largest batch, found by trying whole updates, and how it was found.

    The device must raise out-of-memory errors. A fraction of its memory is withheld during the search.
    """
    device, free = trial.device, free_memory(trial.device)
    module = getattr(torch, device.type)
    number = search(trial, int(DEVICE_MARGIN * free), limit)
    trial.trainer = None  # free the memory of the trial before the run trains
    release(device)
    module.reset_peak_memory_stats(device)  # so that the run reports its own peak
    return (
        number,
        f"tried on {module.get_device_name(device)} with {DEVICE_MARGIN:.0%} of {format_bytes(free)} withheld",
    )


def search(trial: "StepTrial", withheld: int, limit: int) -> int:
    """Return the largest batch that fits while `withheld` bytes are allocated; 0 if none does."""
    memory = torch.empty(withheld, dtype=torch.uint8, device=trial.device)
    number = bisect(trial.fits, limit)
    if not number:
        unit = unit_of(trial.config)
        fewer = [each for each in (limit, 4, 2, 1) if each <= limit and each < STEP and each % unit == 0]
        number = next((each for each in fewer if trial.fits(each)), 0)
    del memory
    return number


def with_largest_images(config: Config) -> Config:
    """Return settings with which all training images have the largest size."""
    if not config.TRAIN.SIZE_SCHEDULE:
        return config
    return config.changed("TRAIN", SIZE_SCHEDULE=(f"0:{max(config.train_shapes.values()).width}",))


class StepTrial:
    """Tries batch sizes with a throw-away trainer like the run's trainer, on random weights and images."""

    def __init__(self, config: Config, num_classes: int, process: Process, stop: StopSignal | None = None):
        config = with_largest_images(config)
        # The second micro-batch runs with the gradients of the first in memory; a third would need no more memory.
        config = config.changed("TRAIN", ACCUM_ITER=min(config.TRAIN.ACCUM_ITER, 2), REPEATED_AUG=1)
        # Invented images may lack a class.
        config = config.changed("DATA", SAMPLER="shuffle").changed("TRAIN", CLASS_WEIGHTS=None)
        self.config = replace(config.changed("MODEL", NUM_CLASSES=num_classes), COMPILE=False)
        self.device, self.stop, self.has_others = process.device, stop, process.world_size > 1
        self.process = Process(self.device)  # computes alone, so that another process may try another size
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
            self.trainer.replica.zero_grad(set_to_none=True)
        else:
            self.trainer = None
        release(self.device)
        return False

    def update(self, count: int, times: int = 1) -> None:
        with contextlib.closing(self.prepare(count).windows(0, times)) as windows:
            for window in windows:
                self.trainer.update(window)

    def prepare(self, count: int) -> TrainData:
        """Return the data of updates with micro-batches of this size, and build the trainer if there is none."""
        num_images = count * self.config.TRAIN.ACCUM_ITER * self.process.world_size
        config = self.config.changed("DATA", BATCH_SIZE=count, SYNTHETIC_SIZE=num_images)
        train_data = build_train_data(config, invent_images(config), self.process)
        if self.trainer is None:
            self.begin(config, train_data)
        return train_data

    def new_model(self, config: Config) -> nn.Module:
        """Return a model with random weights."""
        return add_adapters(build_model(config, config.MODEL.NUM_CLASSES), config).to(self.device)

    def begin(self, config: Config, train_data: TrainData) -> None:
        # The trial has its own loss scale, because updates change the loss scale.
        plan = StepPlan.of_trial(config, self.process, train_data.image_set)
        self.trainer = build_trainer(plan, self.new_model(config), train_data, Log(rank=1))
        if self.has_others:
            self.ddp_buckets = [torch.empty_like(each) for each in self.trainer.parameters]


def bisect(fits: Callable[[int], bool], max_size: int) -> int:
    """Return the largest batch that fits, found by doubling and then bisecting; 0 if not even the smallest fits."""
    largest, excess, size = 0, max_size // STEP * STEP + STEP, STEP
    while excess - largest > max(STEP, CLOSE * largest):
        if fits(size):
            largest = size
        else:
            excess = size
        doubled, middle = 2 * largest, (largest + excess) // 2 // STEP * STEP
        size = max(STEP, doubled if doubled < excess else middle)
    return largest
