"""All weights on every process, gradients averaged (DIST.STRATEGY ddp); with one process there is nothing to do."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.formats.sharded import ROWS, Parts, changed, span
from utils.distributed import Process

LARGE = ("state_dict", "state_dict_ema", "optimizer")  # parts of a state


class Replicated:
    """Every process holds all weights; their gradients are averaged."""

    def __init__(self, process: Process | None = None, reduce: torch.dtype | None = None):
        """`reduce`: the type in which gradients travel, where it is not their own."""
        self.process, self._reduce = process, reduce

    def place(self, *models: nn.Module) -> None:
        """Put the weights where they belong. Whole models are on their device already."""

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        """The model with its gradients averaged over the processes."""
        process = self.process
        if process.world_size == 1:
            return model
        replica = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[process.device] if process.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # A static graph must be the same in every pass; with accumulation passes differ in whether they sync.
            static_graph=not accumulates,
        )
        if self._reduce is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

            compress = {torch.float16: hooks.fp16_compress_hook, torch.bfloat16: hooks.bf16_compress_hook}
            replica.register_comm_hook(None, compress[self._reduce])
        return replica

    def sync_gradients(self, replica: nn.Module, now: bool):
        """Around forward and backward: gradients are averaged only when `now`, else kept for later."""
        return contextlib.nullcontext() if now or self.process.world_size == 1 else replica.no_sync()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """What the optimizer of this process moves."""
        return dict(model.named_parameters())

    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        """What this process holds of the weights and buffers; writing to it changes the model."""
        return model.state_dict()

    def load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.load_state_dict(state)

    def gradients_to_optimizer(self) -> None:
        """Put gradients where the optimizer looks for them."""

    def sync_found_inf(self, found_inf: Tensor) -> None:
        """Whether a gradient is not finite, of all processes' parts of it."""

    def norm(self, norm: Tensor) -> Tensor:
        """That of the whole gradient, from this process's part."""
        return norm

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """From here on the states that it is asked about have this optimizer's."""

    def gather_state(self, state: dict) -> dict:
        """All of a state for process 0, from what each process holds."""
        return state

    def split_for_save(self, state: dict) -> tuple[dict, dict[str, Tensor]]:
        """A state without its large tensors, and this process's rows of those by their place."""
        pieces = {}

        def take(place: str, value: Any) -> Any:
            length = self._length(place, value)
            if length is None:
                return value
            pieces[place] = self._rows(value, length)
            return {ROWS: length}

        return within_large(state, take), pieces

    def local_part(self, state: dict) -> dict:
        """What this process loads of a state that was read."""
        return within_large(state, lambda place, value: value.whole() if isinstance(value, Parts) else value)

    def _length(self, place: str, value: Any) -> int | None:
        """Rows of the tensor at this place of a state; None for what all processes have whole."""
        return len(value) if isinstance(value, Tensor) and value.ndim else None

    def _rows(self, tensor: Tensor, length: int) -> Tensor:
        """This process's share of so many rows."""
        start, stop = span(length, self.process.rank, self.process.world_size)
        return tensor[start:stop]


def within_large(state: dict, change: Callable[[str, Any], Any]) -> dict:
    return {name: changed(value, change, name) if name in LARGE else value for name, value in state.items()}
