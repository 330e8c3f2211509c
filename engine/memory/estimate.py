"""How much memory a training step will take, from what two small batches leave for their backward, and what is free."""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from configs.schema import Config
from datasets import Normalize
from engine.check.quick_checks import optimizer_bytes, trained_bytes
from engine.parallel.sharding import gathered_blocks, is_sharded
from engine.precision.policy import Precision
from engine.train.loss import ClassificationLoss
from models.transforms.activation_checkpointing import has_blocks
from utils.distributed import Process
from utils.findings import OK, WARN, WRONG, Finding
from utils.host import free_host_memory
from utils.units import format_bytes

FEW, MORE = 2, 3  # images; BatchNorm refuses a single one
WORKING = 1.2  # what a backward needs at its peak over what was kept for it (ViT-Tiny on a CPU: 1.1 to 1.3)
NEAR, FAR = 0.9, 1.5  # shares of what is free: it is an estimate


@dataclass(frozen=True)
class Need:
    """Bytes of one process's training step, estimated."""

    fixed: float  # without images
    per_image: float

    def fitting(self, limit: float) -> int:
        """Images of a step within so many bytes; none where it is less than 1."""
        return max(int((limit - self.fixed) / max(self.per_image, 1)), 0)


def estimate(config: Config, model: nn.Module, precision: Precision, fixed: int | None = None) -> Need:
    """From two forwards. Moves the model to its device. `fixed`: without images, where a process has not all weights."""
    few, more = (saved_bytes(config, model.to(precision.device), precision, count) for count in (FEW, MORE))
    kept_per_image = (more - few) / (MORE - FEW)
    # Half copies of weights that autocast keeps are saved too, and do not grow with the batch.
    constant = max(few - FEW * kept_per_image, 0)
    fixed = fixed_bytes(config, model, precision) if fixed is None else fixed
    return Need(fixed + constant, WORKING * kept_per_image)


def check_memory(config: Config, model: nn.Module, precision: Precision, free: int, process: Process) -> Finding:
    """Of one process's step against `free` bytes. Moves the model to its device."""
    num_sharing = process.local_size if process.device.type == "cpu" else 1  # processes that share these bytes
    fixed = fixed_bytes(config, model, precision)
    if is_sharded(config, process):
        # Beside its shares a process has two blocks whole, one that computes and the next, with their gradients.
        largest = max(sum(each.nbytes for each in block.parameters()) for block in gathered_blocks(model))
        fixed = fixed // process.world_size + 4 * largest
        if config.TRAIN.ACCUM_ITER > 1:  # gradients are shared out when the last micro-batch is done
            fixed += trained_bytes(model)
    advice = "lower -batch_size and raise -accum_iter alike" + (", or use -amp" if precision.half is None else "")
    if num_sharing * fixed > FAR * free:
        return _finding(f"{format_bytes(num_sharing * fixed)} without activations", num_sharing * fixed, free, advice)
    try:
        need = estimate(config, model, precision, fixed)
    except torch.OutOfMemoryError:
        return Finding("memory", f"{format_bytes(free)} are too little for a batch of {MORE} images", WRONG, advice)
    batch_size = config.DATA.BATCH_SIZE
    total = num_sharing * (need.fixed + batch_size * need.per_image)
    images = f"{format_bytes(batch_size * need.per_image)} for {batch_size} images"
    parts = f"{format_bytes(need.fixed)} of weights, gradients and optimizer, {images}"
    fitting = need.fitting(NEAR * free / num_sharing)
    remedy = f"{advice}; about {fitting} images fit" if fitting else advice
    shared = f", in each of {num_sharing} processes" if num_sharing > 1 else ""
    # What lives for a moment in the forward is not counted, and with a frozen part that may be most of it.
    about = "at least" if config.MODEL.FREEZE else "about"
    return _finding(f"{about} {format_bytes(total)} ({parts}{shared})", total, free, remedy)


def _finding(needs: str, need: float, free: int, remedy: str) -> Finding:
    verdict = WRONG if need > FAR * free else WARN if need > NEAR * free else OK
    return Finding("memory", f"{needs} of {format_bytes(free)} free", verdict, "" if verdict == OK else remedy)


def fixed_bytes(config: Config, model: nn.Module, precision: Precision) -> int:
    """What does not depend on the batch: weights, gradients, optimizer, running mean, naive mode's copy in half."""
    weights, trained = sum(tensor.nbytes for tensor in model.state_dict().values()), trained_bytes(model)
    # The mean's update takes the difference of all weights at once.
    mean = 2 * weights if config.TRAIN.MODEL_EMA else 0
    halves = (weights + trained) // 2 if precision.is_naive else 0
    return weights + trained + optimizer_bytes(config.TRAIN, model) + mean + halves


def saved_bytes(config: Config, model: nn.Module, precision: Precision, count: int) -> int:
    """What one forward of `count` images keeps for its backward, weights left out.

    With TRAIN.GRAD_CHECKPOINTING: the inputs of the blocks, all of one block, and what is not in blocks.
    """
    device, data = precision.device, config.DATA
    computing = precision.computing(model).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in computing.state_dict().values()}
    kept = Kept()
    pixels = torch.zeros((count, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE), dtype=torch.uint8)
    targets = torch.zeros(count, dtype=torch.int64, device=device)
    images = precision.cast(Normalize(data).to(device)(pixels.to(device)))
    blocks = computing.blocks if config.TRAIN.GRAD_CHECKPOINTING and has_blocks(computing) else ()
    with kept.following(blocks), torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        with precision.autocast():
            logits = computing(images)
        loss = ClassificationLoss(config.TRAIN)(logits, targets)
    del loss  # only now: a storage that is freed could be counted twice under another address
    return kept.count(own)


class Kept:
    """What a forward keeps for its backward, and in which of the blocks that will compute again."""

    def __init__(self):
        self._storages: dict[int, tuple[int, int]] = {}  # by address: bytes, and the block (0: none) that kept it first
        self._inputs: list[int] = []  # bytes, of each block so far
        self._block = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage.data_ptr(), (storage.nbytes(), self._block))
        return tensor

    @contextlib.contextmanager
    def following(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        handles = [block.register_forward_pre_hook(self._enter) for block in blocks]
        handles += [block.register_forward_hook(self._leave) for block in blocks]
        yield
        for handle in handles:
            handle.remove()

    def _enter(self, block: nn.Module, taken: tuple) -> None:
        self._inputs.append(taken[0].nbytes)
        self._block = len(self._inputs)

    def _leave(self, *call) -> None:
        self._block = 0

    def count(self, own: set[int]) -> int:
        """Bytes but for the storages at `own`: of blocks their inputs, and all of the one that keeps most."""
        of_block: Counter[int] = Counter()
        for address, (count, block) in self._storages.items():
            of_block[block] += count if address not in own else 0
        return of_block.pop(0, 0) + sum(self._inputs) + max(of_block.values(), default=0)


def passing_bytes(task: Callable[[], None]) -> int:
    """The most that tensors on the CPU fill while the task runs, over what they fill before."""
    from torch.profiler import ProfilerActivity, profile

    with _without_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        task()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """The profiler's libraries print there that there is no GPU, and when they begin and end."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take where it computes."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).mem_get_info(device)[0]
    return free_host_memory()
