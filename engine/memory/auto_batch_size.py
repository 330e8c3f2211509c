"""DATA.BATCH_SIZE auto: the number that a run was begun with, or the largest batch that fits, tried out on this device."""

import contextlib
import copy
import time
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from configs.schema import Config
from configs.values import SETTINGS
from datasets import TrainData, build_train_data
from datasets.sources.synthetic import read_synthetic
from engine.memory.estimate import estimate, free_memory, passing_bytes
from engine.memory.largest_batch import STEP, bisect
from engine.memory.recovery import MicroBatches, release, shortage
from engine.precision.policy import Precision
from engine.session import Session
from engine.train.trainer import Trainer
from models import build_model
from utils.distributed import Process
from utils.errors import ConfigError, StoppedBySignal
from utils.log import Log
from utils.signals import StopSignal
from utils.units import format_bytes

# Shares of the free memory that are left alone: of a device for what lies unused between tensors, and for the libraries;
# of a host more, as other programs come and go there, and a batch that is too large is an end without an error.
MARGIN, HOST_MARGIN = 0.1, 0.2
MEASURED = 16  # images of the largest batch that is tried on a host


def settle(session: Session, num_images: int, num_classes: int, begun_with: int | None, stop: StopSignal) -> None:
    """Put the number in the place of auto. `begun_with`: that of the run that goes on; `num_images`: to train on."""
    if begun_with:
        session.settle_batch_size(begun_with, "what the run was begun with")
        session.log.say(f"batch size: {begun_with}, as this run was begun with (DATA.BATCH_SIZE is auto)")
        return
    config, process, start = session.config, session.process, time.perf_counter()
    most = most_images(config, num_images, process.world_size)
    found, how = (try_sizes if can_try(process.device) else calculate)(config, num_classes, process, most, stop)
    agreed = process.host_min(-stop.number or found)
    if agreed < 0:
        raise StoppedBySignal(-agreed, "while the largest batch was looked for")
    if agreed == 0:
        process.first(lambda: refuse(config, how))
    seconds = time.perf_counter() - start
    session.settle_batch_size(agreed, how)
    limit = ", all there are for an update" if agreed == most else ""
    fewest = f", in the one of {process.world_size} processes where the fewest fit" if process.world_size > 1 else ""
    uncompiled = "; without torch.compile, which mostly takes less" if config.COMPILE else ""
    session.log.say(f"batch size: {agreed} images{limit}{fewest} ({how}{uncompiled}; {seconds:.1f} s)")


def most_images(config: Config, num_images: int, world_size: int) -> int:
    """The largest batch with which an update does not ask for more images than there are to train on."""
    most = min(num_images // (world_size * config.TRAIN.ACCUM_ITER), SETTINGS["DATA.BATCH_SIZE"].bounds[1])
    return max(rounded(most, config), unit_of(config))


def unit_of(config: Config) -> int:
    return 2 if config.TRAIN.mixes else 1


def rounded(number: int, config: Config) -> int:
    """Down to a multiple of 8, or of what is mixed where it is less."""
    step = STEP if number >= STEP else unit_of(config)
    return number // step * step


def expect(config: Config, model: nn.Module, precision: Precision, process: Process, free: int, num_images: int) -> int:
    """About what a run would find, from two forwards alone; 0 where nothing fits."""
    share = 1 - (MARGIN if can_try(process.device) else HOST_MARGIN)
    model = copy.deepcopy(model)  # it will be prepared once more
    precision.prepare(model)
    try:
        fitting = estimate(config, model, precision).fitting(share * free / sharing(process))
    except torch.OutOfMemoryError:
        return 0
    return rounded(min(fitting, most_images(config, num_images, process.world_size)), config)


def can_try(device: torch.device) -> bool:
    """Whether it says itself when its memory is full."""
    return device.type in ("cuda", "xpu")


def sharing(process: Process) -> int:
    """Processes that take of the same memory."""
    return 1 if can_try(process.device) else process.local_size


def refuse(config: Config, how: str) -> None:
    amp = "" if config.AMP else ", or use -amp"
    raise ConfigError(
        f"DATA.BATCH_SIZE is auto, but not even {unit_of(config)} images fit ({how}); lower DATA.IMAGE_SIZE "
        f"({config.DATA.IMAGE_SIZE}), take a smaller model (MODEL.NAME is {config.MODEL.NAME}){amp}, or end what else "
        "uses the memory"
    )


def try_sizes(config: Config, num_classes: int, process: Process, most: int, stop: StopSignal) -> tuple[int, str]:
    """On a device that says itself when its memory is full: whole updates, while a share of it is withheld."""
    device, free = process.device, free_memory(process.device)
    module = getattr(torch, device.type)
    found = search(Trial(config, num_classes, process, stop), int(MARGIN * free), most)
    release(device)
    module.reset_peak_memory_stats(device)  # what the run reports is to be its own
    return found, f"tried on {module.get_device_name(device)} with {MARGIN:.0%} of {format_bytes(free)} withheld"


def search(trial: "Trial", withheld: int, most: int) -> int:
    """The largest batch that fits beside so many bytes; 0 where none does."""
    memory = torch.empty(withheld, dtype=torch.uint8, device=trial.device)
    found = bisect(lambda count: count if trial.fits(count) else None, STEP, most).batch_size
    if not found:
        unit = unit_of(trial.config)
        fewer = [each for each in (most, 4, 2, 1) if each <= most and each < STEP and each % unit == 0]
        found = next((each for each in fewer if trial.fits(each)), 0)
    del memory
    return found


def calculate(config: Config, num_classes: int, process: Process, most: int, stop: StopSignal) -> tuple[int, str]:
    """Where a batch that is too large ends in a kill: from forwards and updates of small ones."""
    free = free_memory(process.device)
    limit = (1 - HOST_MARGIN) * free / sharing(process)
    model, precision = build_model(config, num_classes), Precision(config, process.device)
    precision.prepare(model)
    need = estimate(config, model, precision)
    large = rounded(min(MEASURED, need.fitting(limit) // 4, most), config)
    small = rounded(large // 2, config)
    sizes = "2 and 3 images"
    if small and not stop.number:
        trial = Trial(config, num_classes, process, stop)
        trial.update(small)  # takes the memory of the optimizer's state
        less, more = (passing_bytes(partial(trial.update, count)) for count in (small, large))
        need = replace(need, per_image=max(need.per_image, (more - less) / (large - small)))
        sizes = f"2, 3, {small} and {large} images"
    shared = f" for {process.local_size} processes" if process.local_size > 1 else ""
    how = f"calculated from {sizes}, with {HOST_MARGIN:.0%} of {format_bytes(free)}{shared} left free"
    return rounded(min(need.fitting(limit), most), config), how


class Trial:
    """A trainer as the run will have one, of random weights and images, to be thrown away."""

    def __init__(self, config: Config, num_classes: int, process: Process, stop: StopSignal):
        # Of several micro-batches the second meets the gradients of the first; a third would meet no more.
        train = replace(config.TRAIN, ACCUM_ITER=min(config.TRAIN.ACCUM_ITER, 2), REPEATED_AUG=1)
        model = replace(config.MODEL, NUM_CLASSES=num_classes)
        self.config = replace(config, COMPILE=False, TRAIN=train, MODEL=model)
        self.device, self.stop = process.device, stop
        self.has_others, self.rehearses = process.world_size > 1, process.world_size > 1 and not config.COMPILE
        self.trainer: Trainer | None = None
        self.has_fitted = False

    def fits(self, count: int) -> bool:
        """Whether updates of micro-batches of so many images do. Told to stop, it tries none."""
        if self.stop.number:
            return False
        try:
            self.update(count, times=2)  # the first has not all of the optimizer's state from its beginning
            self.trainer.report()  # waits for the device, which may tell of an error late
            self.has_fitted = True
            return True
        except RuntimeError as error:
            # Kernels have other limits too, which a batch may exceed that is larger than one that fits.
            if not (shortage(error) or self.has_fitted):
                raise
        # Not inside `except`: the error would keep what it met of the forward.
        if self.has_fitted:
            self.trainer.replica = self.trainer.computing
            self.trainer.replica.zero_grad(set_to_none=True)
        else:
            self.trainer = None
        release(self.device)
        return False

    def update(self, count: int, times: int = 1) -> None:
        accumulated = self.config.TRAIN.ACCUM_ITER
        data = replace(self.config.DATA, BATCH_SIZE=count, SYNTHETIC_SIZE=count * accumulated)
        config = replace(self.config, DATA=data)
        train_data = build_train_data(config, read_synthetic(config)[0], 0, 1, self.device)
        if self.trainer is None:
            self._begin(config, train_data)
        with contextlib.closing(train_data.windows(0, times)) as windows:
            for window in windows:
                self.trainer.update(window)

    def _begin(self, config: Config, train_data: TrainData) -> None:
        model = build_model(config, config.MODEL.NUM_CLASSES).to(self.device)
        alone, silent = Process(self.device), Log(rank=1)
        trainer = Trainer(config, model, train_data, alone, silent, self.stop)
        trainer.micro_batches = Whole(config, train_data.order, alone, silent)
        if self.has_others:
            self.kept_by_ddp = [torch.empty_like(each) for each in trainer.parameters]  # its buckets of gradients
        if self.rehearses:
            trainer.rehearsals = -1  # in each update, as a run does in its first two
        self.trainer = trainer


class Whole(MicroBatches):
    """Micro-batches that are never made smaller."""

    def halve(self, step: int, reason: str | None) -> None:
        raise torch.OutOfMemoryError(reason)
