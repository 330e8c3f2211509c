"""Estimates the memory of a training step from the tensors that two small batches save for backward."""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from configs.schema import Config
from datasets import build_normalize
from engine.parallel import is_sharded
from engine.parallel.sharding import gathered_blocks
from engine.precision.policy import Precision
from engine.train.loss import build_loss
from engine.train.optimizers import OURS, optimizer_bytes, trained_bytes
from models import add_adapters, build_model
from models.transforms import choose_transforms
from models.transforms.base import has_blocks
from utils.distributed import Process
from utils.host import free_host_memory

FEW, MORE = 2, 3  # images in the two batches; BatchNorm refuses a batch of one image
WORKING = 1.2  # peak memory of a backward pass relative to the saved tensors (ViT-Tiny on a CPU: 1.1 to 1.3)


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated memory of one process's training step, in bytes."""

    fixed: float  # the part that does not depend on the batch size
    per_image: float

    def fitting(self, limit: float) -> int:
        """Return the number of images that fit into `limit` bytes."""
        return max(int((limit - self.fixed) / max(self.per_image, 1)), 0)


def estimate(config: Config, num_classes: int, precision: Precision, process: Process) -> MemoryEstimate:
    """Estimate one process's memory by running a model with random weights on two and on three images."""
    model = add_adapters(build_model(config, num_classes), config)
    choose_transforms(config, process.device, precision.half).apply(model)
    fixed = fixed_bytes(config, model, precision)
    if is_sharded(config, process):
        # Besides its shards, a process has two whole blocks in memory, the current and the next, with their gradients.
        largest = max(sum(each.nbytes for each in block.parameters()) for block in gathered_blocks(model))
        fixed = fixed // process.world_size + 4 * largest
        if config.TRAIN.ACCUM_ITER > 1:  # gradients are reduced and scattered only after the last micro-batch
            fixed += trained_bytes(model)
    few, more = (saved_bytes(config, model.to(process.device), precision, count) for count in (FEW, MORE))
    kept_per_image = (more - few) / (MORE - FEW)
    # Autocast's half copies of weights are saved for backward too, and do not grow with the batch.
    constant = max(few - FEW * kept_per_image, 0)
    return MemoryEstimate(fixed + constant, WORKING * kept_per_image)


def fixed_bytes(config: Config, model: nn.Module, precision: Precision) -> int:
    """Return the bytes that do not depend on the batch: weights, gradients, optimizer, EMA, naive mode's half copy."""
    weights, trained = sum(tensor.nbytes for tensor in model.state_dict().values()), trained_bytes(model)
    # On CPUs the EMA update also allocates the differences of all trained weights. Other devices need less than this.
    ema = weights + trained if config.TRAIN.MODEL_EMA else 0
    halves = (weights + trained) // 2 if precision.is_naive else 0
    kept = trained + optimizer_bytes(config.TRAIN, model)
    # Some optimizers can skip an update only by restoring copies, which are new tensors in each update. Activations
    # hardly ever fit into the memory blocks that the copies leave free.
    copies = kept if precision.device.type != "cpu" and config.TRAIN.OPTIMIZER.NAME not in OURS else 0
    return weights + kept + copies + ema + halves + teacher_bytes(config, precision)


def teacher_bytes(config: Config, precision: Precision) -> int:
    """Return the bytes of the teacher's weights (0 without one). Its activations are freed before the student runs."""
    if config.TRAIN.DISTILLATION_TYPE == "none" and config.TRAIN.OBJECTIVE == "classes":
        return 0
    from extras.distillation.sources import random_teacher

    teacher = random_teacher(config, config.MODEL.NUM_CLASSES or 1)
    return sum(tensor.nbytes for tensor in teacher.model.state_dict().values()) // (2 if precision.half else 1)


def saved_bytes(config: Config, model: nn.Module, precision: Precision, count: int) -> int:
    """Return the bytes that one forward pass of `count` images saves for backward, without weights.

    With TRAIN.GRAD_CHECKPOINTING these are the inputs of the blocks, all tensors of one block, and tensors outside of
    blocks. With frozen weights the result is at least the size of all tensors of one block, because a frozen block
    saves nothing but still needs that memory while it computes.
    """
    computing = precision.computing(model).train()
    kept = record_forward(config, computing, precision, count)
    if all(parameter.requires_grad for parameter in model.parameters()):
        return kept.count(config.TRAIN.GRAD_CHECKPOINTING)
    thawed = record_forward(config, copy.deepcopy(computing).requires_grad_(), precision, count)
    return max(kept.count(config.TRAIN.GRAD_CHECKPOINTING), thawed.largest_block)


def record_forward(config: Config, model: nn.Module, precision: Precision, count: int) -> "SavedTensors":
    device, data = precision.device, config.DATA
    kept = SavedTensors(model)
    side = config.largest_train_side
    pixels = torch.zeros((count, data.IMAGE_CHANNELS, side, side), dtype=torch.uint8)
    if data.TOKENS:
        from extras.native_aspect.synthetic import blank_batch

        pixels = blank_batch(config, count)
    images = build_normalize(data).to(device)(pixels.to(device), precision.input_dtype(model))
    with kept.following(model), torch.autograd.graph.saved_tensors_hooks(kept.note, lambda tensor: tensor):
        with precision.autocast():
            logits = model(images)
        several = config.DATA.has_several_labels
        targets = (
            torch.zeros_like(logits, dtype=torch.float32) if several else logits.new_zeros(count, dtype=torch.int64)
        )
        loss = build_loss(config)(logits, targets)
    # The loss is deleted only here: new tensors at the addresses of freed tensors would not have been counted.
    del loss
    return kept


class SavedTensors:
    """The tensors that a forward pass saves for backward, without weights, grouped by the block that saved them."""

    def __init__(self, model: nn.Module):
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
        self._storages: dict[int, tuple[int, int]] = {}  # {address: (bytes, block)}; block 0 is the rest of the model
        self._inputs: list[int] = []  # bytes of each block's input
        self._block = 0

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages.setdefault(storage.data_ptr(), (storage.nbytes(), self._block))
        return tensor

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in model.blocks if has_blocks(model) else ():
                stack.enter_context(block.register_forward_pre_hook(self._enter))
                stack.enter_context(block.register_forward_hook(self._leave))
            yield

    def _enter(self, block: nn.Module, taken: tuple) -> None:
        self._inputs.append(taken[0].nbytes)
        self._block = len(self._inputs)

    def _leave(self, *call) -> None:
        self._block = 0

    @property
    def by_block(self) -> Counter[int]:
        """Return the bytes of each block. Block 0 is the rest of the model."""
        found: Counter[int] = Counter()
        for count, block in self._storages.values():
            found[block] += count
        return found

    @property
    def largest_block(self) -> int:
        """Return the bytes of the largest block, or of the whole model if it has no blocks."""
        return max((count for block, count in self.by_block.items() if block or not self._inputs), default=0)

    def count(self, recomputes: bool) -> int:
        """Return the total bytes. If `recomputes`, count only blocks' inputs, the largest block and block 0."""
        if recomputes and self._inputs:
            return self.by_block[0] + sum(self._inputs) + self.largest_block
        return self.by_block.total()


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on its device."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).mem_get_info(device)[0]
    return free_host_memory()
