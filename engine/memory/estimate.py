"""How much memory a training step takes, from what two small batches keep for their backward."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from configs.schema import Config, Train
from datasets import Normalize
from engine.precision.policy import Precision
from engine.train.loss import ClassificationLoss
from models.transforms.activation_checkpointing import has_blocks
from utils.host import free_host_memory

FEW, MORE = 2, 3  # images; BatchNorm refuses a single one
WORKING = 1.2  # what a backward needs at its peak over what was kept for it (ViT-Tiny on a CPU: 1.1 to 1.3)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process's training step, estimated."""

    fixed: float  # without images
    per_image: float

    def fitting(self, limit: float) -> int:
        """Images of a step within so many bytes; none where it is less than 1."""
        return max(int((limit - self.fixed) / max(self.per_image, 1)), 0)


def estimate(config: Config, model: nn.Module, precision: Precision, fixed: int | None = None) -> MemoryEstimate:
    """From two forwards. Moves the model to its device. `fixed`: without images, where a process has not all weights."""
    few, more = (saved_bytes(config, model.to(precision.device), precision, count) for count in (FEW, MORE))
    kept_per_image = (more - few) / (MORE - FEW)
    # Half copies of weights that autocast keeps are saved too, and do not grow with the batch.
    constant = max(few - FEW * kept_per_image, 0)
    fixed = fixed_bytes(config, model, precision) if fixed is None else fixed
    return MemoryEstimate(fixed + constant, WORKING * kept_per_image)


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
    kept = SavedTensors()
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


class SavedTensors:
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


def checkpoint_bytes(settings: Train, model: nn.Module) -> int:
    """Weights, running mean and optimizer."""
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    return weights * (2 if settings.MODEL_EMA else 1) + optimizer_bytes(settings, model)


def optimizer_bytes(settings: Train, model: nn.Module) -> int:
    """Adam keeps two numbers for each weight that trains, SGD one where it has momentum."""
    chosen = settings.OPTIMIZER
    per_weight = (1 if chosen.MOMENTUM else 0) if chosen.NAME == "SGD" else 2
    return per_weight * trained_bytes(model)


def trained_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take where it computes."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).mem_get_info(device)[0]
    return free_host_memory()
