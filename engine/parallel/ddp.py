"""A whole copy of the model in each process (ddp), the base of the other ways to distribute a model."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.weights.sharded import Shards, changed
from utils.distributed import Process

LARGE = ("state_dict", "state_dict_ema", "optimizer")  # the parts of a state that contain large tensors
# DDP's bucket size in MiB with torch.compile, which cuts the graph at every bucket (ViT-Base into 13 pieces with the
# default of 25). Used only on CUDA, because the size changes the last bit of an average over more than two processes.
BUCKET_MB = 100


class Parallel:
    """A whole copy of the model in each process. With several processes, DDP averages the gradients.

    Sharded (sharding.py) overrides most methods.
    """

    is_sharded = False

    def __init__(self, process: Process, reduce: torch.dtype | None = None, bucket_mb: int | None = None):
        """Store how gradients are averaged: in the type `reduce` (None: in their own type), and in buckets of
        `bucket_mb` MiB (None: torch's default of 25).
        """
        self.process, self._reduce, self._bucket_mb = process, reduce, bucket_mb

    def share_memory(self, model: nn.Module) -> dict[int, Tensor]:
        """Return a memo for deepcopy, {id: tensor}, of tensors that the copy shares until `place` copies them."""
        return {}

    def place(self, *models: nn.Module) -> None:
        """Move the weights of a model and of its EMA copy to their device. Unsharded models are already there."""

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        """Return the model, wrapped to average gradients if there are several processes."""
        device = self.process.device
        if self.process.world_size == 1:
            return model
        replica = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._bucket_mb,
            # A static graph must be the same in every pass, but with accumulation only the last pass synchronises.
            static_graph=not accumulates,
        )
        if self._reduce is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

            compress = {torch.float16: hooks.fp16_compress_hook, torch.bfloat16: hooks.bf16_compress_hook}
            replica.register_comm_hook(None, compress[self._reduce])
        return replica

    def sync_gradients(self, replica: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        """Return a context for forward and backward that averages the gradients if `now`, else accumulates them."""
        return contextlib.nullcontext() if now or self.process.world_size == 1 else replica.no_sync()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters that this process's optimizer updates."""
        return dict(model.named_parameters())

    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return this process's part of weights and buffers. The tensors share memory with the model."""
        return model.state_dict()

    def load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)

    def gradients_to_optimizer(self) -> None:
        """Move the gradients to the parameters that the optimizer updates."""

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Set found_inf in all processes if it is set in any of them.

        Averaged gradients have set it everywhere already.
        """

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the whole gradient, given the norm of this process's part."""
        return norm

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember the parameters of this optimizer, so that the methods below can handle its state."""

    def gather_state(self, state: dict) -> dict:
        """Return the whole state in process 0, gathered from all processes. Collective."""
        return state

    def local_part(self, state: dict) -> dict:
        """Return the part of a saved state that this process loads."""
        return within_large(state, lambda place, value: value.whole() if isinstance(value, Shards) else value)


def within_large(state: dict, change: Callable[[str, Any], Any]) -> dict:
    """Return the state with `change(path, value)` applied to each leaf of its large parts."""
    return {name: changed(value, change, name) if name in LARGE else value for name, value in state.items()}
