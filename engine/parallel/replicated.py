"""One process, or all weights on every process and averaged gradients (DIST.STRATEGY ddp)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.weights.sharded import Parts, changed
from utils.distributed import Process

LARGE = ("state_dict", "state_dict_ema", "optimizer")  # the parts of a state with large tensors


class Parallel:
    """How the processes of a run hold a model; this one is for a single process, which has all of it."""

    is_sharded = False

    def __init__(self, process: Process | None = None):
        self.process = process

    def place(self, *models: nn.Module) -> None:
        """Move the weights to their device; whole models are there already."""

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        """The model, wrapped to average gradients over the processes."""
        return model

    def sync_gradients(self, replica: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        """Context for forward and backward: average the gradients now, or accumulate them locally."""
        return contextlib.nullcontext()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that this process's optimizer updates."""
        return dict(model.named_parameters())

    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        """This process's part of weights and buffers; shares memory with the model."""
        return model.state_dict()

    def load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)

    def gradients_to_optimizer(self) -> None:
        """Put gradients where the optimizer reads them."""

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Combine over all processes whether a gradient is not finite."""

    def norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, from that of this process's part."""
        return norm

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Include this optimizer in the states below."""

    def gather_state(self, state: dict) -> dict:
        """The whole state for process 0, gathered from all processes. A collective."""
        return state

    def local_part(self, state: dict) -> dict:
        """The part of a saved state that this process loads."""
        return within_large(state, lambda place, value: value.whole() if isinstance(value, Parts) else value)


class Replicated(Parallel):
    """Every process holds all weights; torch's DDP averages the gradients."""

    def __init__(self, process: Process, reduce: torch.dtype | None = None, bucket_mb: int | None = None):
        """`reduce`: the type of the all-reduce, if it is not that of the gradients; `bucket_mb`: gradients that are
        averaged at once, if not torch's 25 MiB.
        """
        super().__init__(process)
        self._reduce, self._bucket_mb = reduce, bucket_mb

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        device = self.process.device
        replica = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._bucket_mb,
            # A static graph must be the same in every pass; with accumulation only the last pass synchronises.
            static_graph=not accumulates,
        )
        if self._reduce is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

            compress = {torch.float16: hooks.fp16_compress_hook, torch.bfloat16: hooks.bf16_compress_hook}
            replica.register_comm_hook(None, compress[self._reduce])
        return replica

    def sync_gradients(self, replica: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if now else replica.no_sync()


def within_large(state: dict, change: Callable[[str, Any], Any]) -> dict:
    """The state with `change` applied to the place and the value of each leaf of its large parts."""
    return {name: changed(value, change, name) if name in LARGE else value for name, value in state.items()}
