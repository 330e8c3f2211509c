"""All weights on every process, averaged gradients (DIST.STRATEGY ddp), or a single process."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.weights.sharded import ROWS, Parts, changed, span
from utils.distributed import Process

LARGE = ("state_dict", "state_dict_ema", "optimizer")  # the parts of a state with large tensors


class Replicated:
    """Every process holds all weights; gradients are averaged. fsdp.py's subclass shards them instead."""

    def __init__(self, process: Process | None = None, reduce: torch.dtype | None = None, bucket_mb: int | None = None):
        """`reduce`: the type of the all-reduce, if it is not that of the gradients; `bucket_mb`: gradients that are
        averaged at once, if not torch's 25 MiB.
        """
        self.process, self._reduce, self._bucket_mb = process, reduce, bucket_mb

    def place(self, *models: nn.Module) -> None:
        """Move the weights to their device; whole models are there already."""

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        """The model, wrapped to average gradients over the processes."""
        process = self.process
        if process.world_size == 1:
            return model
        replica = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[process.device] if process.device.type == "cuda" else None,
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

    def sync_gradients(self, replica: nn.Module, now: bool):
        """Context for forward and backward: average the gradients now, or accumulate them locally."""
        return contextlib.nullcontext() if now or self.process.world_size == 1 else replica.no_sync()

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

    def split_for_save(self, state: dict) -> tuple[dict, dict[str, Tensor]]:
        """The state without its large tensors, and this process's rows of them by path."""
        pieces = {}

        def take(place: str, value: Any) -> Any:
            length = self._length(place, value)
            if length is None:
                return value
            pieces[place] = self._rows(value, length)
            return {ROWS: length}

        return within_large(state, take), pieces

    def local_part(self, state: dict) -> dict:
        """The part of a saved state that this process loads."""
        return within_large(state, lambda place, value: value.whole() if isinstance(value, Parts) else value)

    def _length(self, place: str, value: Any) -> int | None:
        """Number of rows of the tensor at this path; None for what all processes hold whole."""
        return len(value) if isinstance(value, Tensor) and value.ndim else None

    def _rows(self, tensor: Tensor, length: int) -> Tensor:
        """This process's part of `length` rows."""
        start, stop = span(length, self.process.rank, self.process.world_size)
        return tensor[start:stop]


def within_large(state: dict, change: Callable[[str, Any], Any]) -> dict:
    return {name: changed(value, change, name) if name in LARGE else value for name, value in state.items()}
