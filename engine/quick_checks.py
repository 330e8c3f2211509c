"""Checks that cost almost nothing. -check prints each result as a row, and a run logs only failed checks."""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from configs.schema import Config, Train
from configs.tables import TORCH_OPTIMIZERS
from datasets import ImageSet, check_policy, choose_workers
from datasets.build import AHEAD_OF_PROCESS, shared_bytes
from datasets.order import Order
from engine.checkpoint.format import checkpoint_bytes
from engine.plan import TrainPlan
from engine.train.optimizers import check_optimizer
from engine.train.schedule import batch_factor
from utils.distributed import Process
from utils.errors import ConfigError
from utils.files import free_bytes, nearest_existing
from utils.host import SHARED_MEMORY
from utils.text import counted, format_bytes, format_bytes_apart

OK, WARN, WRONG = "ok", "WARN", "WRONG"
RATE_FACTOR = 10  # a learning rate outside the usual range by more than this factor is reported
MAX_INITIAL = 0.01  # the largest accepted share of initial weights in the final EMA
OTHER_FILES = 2**20  # assumed size of a run's logs, tables and curves in bytes
WARN_FRACTION = 0.8  # the fraction of the free space above which the verdict is WARN


@dataclass(frozen=True)
class Finding:
    """A row of the table that -check prints. Further lines of `text` are printed below the first."""

    title: str
    text: str
    verdict: str = OK
    remedy: str = ""

    def lines(self) -> list[str]:
        """Return the row as lines of text."""
        first, *more = self.text.split("\n")
        more += [f"-> {self.remedy}"] if self.remedy else []
        return [f"{self.title:<17}  {self.verdict:<5}  {first}", *(" " * 26 + line.strip() for line in more)]


def refusals(config: Config) -> dict[str, Callable[[], object]]:
    """Return {row title in -check: function} for all checks of settings that need neither data nor a checkpoint."""
    checks = {
        "augmentation": partial(check_policy, config.TRAIN),
        "optimizer": partial(check_optimizer, config),
    }
    if config.TRACK:
        from engine.record.trackers import check_trackers

        checks["tracking"] = partial(check_trackers, config)
    return checks


def quick_checks(plan: TrainPlan, model: nn.Module | None, path: Path | None) -> Iterator[Finding]:
    """Yield the results of all quick checks. In -check, `model` or `path` (the run's folder) is None after an error."""
    config, order = plan.config, plan.order
    yield check_updates(order)
    fine_tuning = [*check_fine_tuning(config, order.global_batch, model)]
    yield check_rate(config.TRAIN, order.global_batch, is_judged=bool(fine_tuning))
    if config.TRAIN.MODEL_EMA:
        yield check_ema(config.TRAIN, plan.num_updates)
    yield from fine_tuning
    yield check_warm_up(config.TRAIN)
    yield check_shared_memory(config, plan.train_set, plan.process)
    if model and path:
        yield check_disk(config, path, checkpoint_bytes(config.TRAIN, model))


def check_updates(order: Order) -> Finding:
    """Compare the number of images in an update with the number in an epoch."""
    if order.global_batch <= order.num_images:
        return Finding("updates", f"an epoch is {order.describe_epoch()}")
    text = (
        f"an update has {counted(order.global_batch, 'image')} ({order.describe_split()}), but the training set has "
        f"only {order.num_images:,}: an epoch is a single update with all of them"
    )
    return Finding("updates", text, WARN, "lower -batch_size or -accum_iter to get more updates")


def check_rate(settings: Train, global_batch: int, is_judged: bool = False) -> Finding:
    """Compare the highest learning rate with the usual range.

    `is_judged`: whether `check_fine_tuning` names the limit for this run, so that the range would only confuse.
    """
    name, scaled_for = settings.OPTIMIZER.NAME, settings.LINEAR_SCALED_LR
    rate = settings.BASE_LR * batch_factor(settings, global_batch)
    per_256 = settings.BASE_LR * batch_factor(settings, 256) if scaled_for else rate * 256 / global_batch
    origin = f" (TRAIN.BASE_LR {settings.BASE_LR:g}, scaled from {scaled_for} images)" if scaled_for else ""
    text = f"{rate:.3g}{origin} for {counted(global_batch, 'image')} per update, {per_256:.3g} per 256 images"
    if name not in TORCH_OPTIMIZERS:
        return Finding("learning rate", text)
    low, high = TORCH_OPTIMIZERS[name].usual_rates
    usual = f"usual with {name}: {low:g} to {high:g}"
    if low / RATE_FACTOR <= per_256 <= high * RATE_FACTOR:
        accepted = "" if low <= per_256 <= high else f"; up to {RATE_FACTOR} times more or less is accepted"
        return Finding("learning rate", text if is_judged else f"{text}; {usual}{accepted}")
    remedy = "set TRAIN.BASE_LR, or set TRAIN.LINEAR_SCALED_LR to the batch size that TRAIN.BASE_LR was tuned for"
    return Finding("learning rate", f"{text}; {usual}", WARN, remedy)


def check_fine_tuning(config: Config, global_batch: int, model: nn.Module | None = None) -> Iterator[Finding]:
    """Yield checks of the settings that trained weights need, in runs that they concern."""
    settings = config.MODEL
    if not (settings.PRETRAINED or settings.FREEZE or settings.LORA.RANK or config.TRAIN.LAYER_DECAY):
        return
    from engine.fine_tuning_rate import judge_rate

    for text, remedy in judge_rate(config, global_batch, model):
        yield Finding("fine-tuning", text, WARN if remedy else OK, remedy)


def check_warm_up(settings: Train) -> Finding:
    """Check that warm-up ends before the end of training or the start of its cool-down."""
    chosen = settings.LR_SCHEDULER
    cooldown = chosen.COOLDOWN_EPOCHS if chosen.NAME not in ("constant", "step") else 0
    text = f"{settings.WARMUP_EPOCHS:g} of {counted(settings.NUM_EPOCHS, 'epoch')}"
    text += f", and {cooldown} at TRAIN.END_LR" if cooldown else ""
    if settings.WARMUP_EPOCHS + cooldown < settings.NUM_EPOCHS:
        return Finding("warm-up", text)
    # This text is short, because every short test run prints it.
    return Finding("warm-up", text, WARN, f"lower TRAIN.{'LR_SCHEDULER.COOLDOWN' if cooldown else 'WARMUP'}_EPOCHS")


def check_ema(settings: Train, num_updates: int) -> Finding:
    """Check that the initial weights have almost no share in the final EMA."""
    updates, decay = counted(num_updates, "update"), settings.MODEL_EMA_DECAY
    if settings.MODEL_EMA_WARMUP:
        from engine.train.ema import decay_at

        return Finding("EMA", f"its decay warms up to {decay_at(num_updates - 1, settings):.6g} in {updates}")
    share = decay**num_updates
    text = f"after {updates} with decay {decay:g}, the initial weights still have a share of {share:.2%}"
    if share <= MAX_INITIAL:
        return Finding("EMA", text)
    return Finding("EMA", text, WARN, "set TRAIN.MODEL_EMA_WARMUP=true, or lower TRAIN.MODEL_EMA_DECAY")


def check_disk(config: Config, path: Path, checkpoint_size: int) -> Finding:
    """Check that all files of a run fit on the disk of `path`. Each checkpoint takes up `checkpoint_size` bytes."""
    numbered = min(config.KEEP_CHECKPOINTS, math.ceil(config.TRAIN.NUM_EPOCHS / config.SAVE_FREQ))
    count = numbered + 4  # best, last, previous, and the file that is being written
    # The checkpoints of a resumed run already take up space. A file with several names is counted only once.
    present = {status.st_ino: status.st_size for status in (file.stat() for file in path.rglob("*.pth"))}
    need = max(count * checkpoint_size - sum(present.values()), 2 * checkpoint_size) + OTHER_FILES
    free = free_bytes(path)
    needs, has = format_bytes_apart(need, free)
    text = (
        f"checkpoints of {format_bytes(checkpoint_size)}, up to {count} at once; with logs and curves {needs} of {has} "
        f"free at {nearest_existing(path)}"
    )
    remedy = "free some space, set -output, or lower KEEP_CHECKPOINTS"
    return Finding("disk", text, *verdict_on_space(need, free, remedy))


def refuse_full_disk(path: Path, checkpoint_size: int) -> None:
    """Raise ConfigError if not even one checkpoint of `checkpoint_size` bytes fits on the disk of the run's folder."""
    disk = shutil.disk_usage(path)
    if disk.total and checkpoint_size > disk.free:  # some network file systems do not know their size and report 0
        needs, has = format_bytes_apart(checkpoint_size, disk.free)
        raise ConfigError(
            f"SAVE: one checkpoint of this run takes {needs}, but the disk of {path} has only {has} free; free some "
            "space there, or choose another disk with -output"
        )


def check_shared_memory(config: Config, image_set: ImageSet, process: Process) -> Finding:
    """Check that prefetched batches fit into shared memory. Otherwise SIGBUS kills loader processes."""
    title, workers = "shared memory", choose_workers(config, image_set, process)
    num_workers = workers.count * process.local_size
    if workers.kind == "threads" or image_set.makes_batches or not num_workers or not SHARED_MEMORY.is_dir():
        return Finding(title, "not needed")
    need, free = shared_bytes(config, num_workers), free_bytes(SHARED_MEMORY)
    needs, has = format_bytes_apart(need, free)
    text = (
        f"{counted(num_workers, 'loader process')} with {counted(AHEAD_OF_PROCESS, 'batch')} each: {needs} of {has} in "
        f"{SHARED_MEMORY}"
    )
    remedy = "enlarge it (docker run --shm-size), or lower -num_workers or -batch_size"
    return Finding(title, text, *verdict_on_space(need, free, remedy))


def verdict_on_space(need: float, free: float, remedy: str) -> tuple[str, str]:
    """Return the verdict on the free space, and the remedy unless the verdict is OK."""
    if need > WARN_FRACTION * free:
        return WRONG if need > free else WARN, remedy
    return OK, ""
