"""FSDP2 (DIST.STRATEGY fsdp2): every process has some rows of each weight, its gradient and its optimizer state."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from engine.parallel.ddp import Parallel, within_large
from models.parts import has_running_statistics
from models.transforms.base import blocks_of
from models.weights.sharded import ROWS, Shards, span
from utils.distributed import Process
from utils.errors import ConfigError


class Sharded(Parallel):
    """FSDP2: every process has some rows of each weight. The weights of a block are whole only while it computes."""

    is_sharded = True

    def __init__(self, process: Process, half: torch.dtype | None, reduce: torch.dtype | None):
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(process)
        self._mesh = init_device_mesh(process.device.type, (process.world_size,))
        self._half, self._reduce = half, reduce
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._lengths: dict[str, int] = {}  # number of rows of each whole weight, by name
        self._moved: list[int] = []  # the same numbers, in the order of the optimizer's state
        # Autocast's cache would keep half-precision copies of all weights until the end of the forward pass.
        torch.set_autocast_cache_enabled(False)

    def share_memory(self, model: nn.Module) -> dict[int, Tensor]:
        """Return a memo of the blocks' tensors, so that the host never has two copies of the model in memory."""
        memory: dict[int, Tensor] = {}
        for block in gathered_blocks(model):
            memory |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in block.parameters()}
            memory |= {id(each): each.detach() for each in block.buffers()}
        return memory

    def place(self, *models: nn.Module) -> None:
        """Shard and move the model block by block, so that it is never whole on the device."""
        from torch.distributed.fsdp import fully_shard

        for block, *copies in zip(*map(gathered_blocks, models), strict=True):
            for copy in copies:
                for tensor in (*copy.parameters(), *copy.buffers()):
                    tensor.data = tensor.data.clone()
            for copy in (block, *copies):
                fully_shard(copy, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy(copy))
        for model in models:
            # Reshard the rest too. An evaluation has no backward pass that would free the gathered weights, so the next
            # evaluation would compute with these old weights.
            fully_shard(model, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy(model))
            if self.process.device.type == "cpu":  # gloo can sum but not average
                for module in model.modules():
                    if hasattr(module, "set_force_sum_reduction_for_comms"):
                        module.set_force_sum_reduction_for_comms(True)

    def _policy(self, module: nn.Module) -> Any:
        """Return the policy that sets the type in which weights are gathered.

        With autocast, weight matrices are gathered in the half type, to which autocast would cast them anyway. The
        results are the same, the traffic is halved, and no half-precision copies are kept until the backward pass.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # cast_forward_inputs would cast the residual stream between the blocks to the half type.
        policy = MixedPrecisionPolicy(reduce_dtype=self._reduce, cast_forward_inputs=False)
        if self._half is None or not hasattr(policy, "param_dtype_override_fn"):  # older torch has one type for all
            return policy
        from models.transforms.gpu_kernels import PatchConv2d  # imported here, because importing timm takes seconds

        # Compare types exactly: a layer in PRECISION.CUSTOM_*_LIST has a subclass, which casts as the list says.
        layers = [each for each in module.modules() if type(each) in (nn.Linear, nn.Conv2d, PatchConv2d)]
        matrices = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return MixedPrecisionPolicy(
            self._half,
            self._reduce or torch.float32,
            cast_forward_inputs=False,
            param_dtype_override_fn=lambda parameter: None if id(parameter) in matrices else parameter.dtype,
        )

    def wrap(self, model: nn.Module, accumulates: bool) -> nn.Module:
        return model  # `place` has sharded it

    def sync_gradients(self, replica: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        replica.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return plain tensors that share the memory of the local rows, for the optimizer and the GradScaler."""
        own = {}
        for name, parameter in model.named_parameters():
            own[name] = nn.Parameter(_local(parameter.detach()), parameter.requires_grad)
            self._lengths[name] = len(parameter)
            self._pairs.append((parameter, own[name]))
        return own

    def local_state(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: _local(tensor) for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def load(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        for name, local in self.local_state(model).items():
            local.copy_(state[name])

    def gradients_to_optimizer(self) -> None:
        for parameter, local in self._pairs:
            if parameter.grad is not None:
                local.grad, parameter.grad = _local(parameter.grad), None

    def sync_found_inf(self, found_inf: Tensor) -> None:
        self.process.max(found_inf)

    def norm(self, norm: Tensor) -> Tensor:
        return self.process.sum(norm.double().square()).sqrt().to(norm.dtype)

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        lengths = {id(mine): length for (_, mine), length in zip(self._pairs, self._lengths.values(), strict=True)}
        self._moved = [lengths[id(each)] for group in optimizer.param_groups for each in group["params"]]

    def gather_state(self, state: dict) -> dict:
        """Gather one tensor at a time, so that only process 0 has more than one whole tensor in memory."""

        def gather(place: str, value: Any) -> Any:
            length = self._length(place, value)
            return value if length is None else self.process.gather(value, length)

        return within_large(state, gather)

    def split_for_save(self, state: dict) -> tuple[dict, dict[str, Tensor]]:
        """Return the state without its large tensors, and {path: this process's rows of the tensor}."""
        pieces = {}

        def take(place: str, value: Any) -> Any:
            length = self._length(place, value)
            if length is None:
                return value
            pieces[place] = value
            return {ROWS: length}

        return within_large(state, take), pieces

    def local_part(self, state: dict) -> dict:
        def take(place: str, value: Any) -> Any:
            length = self._length(place, value)
            if length is None:
                return value.whole() if isinstance(value, Shards) else value
            start, stop = span(length, self.process.rank, self.process.world_size)
            return value.rows(start, stop) if isinstance(value, Shards) else value[start:stop]

        return within_large(state, take)

    def _length(self, place: str, value: Any) -> int | None:
        """Return the number of rows of the whole tensor at this path, or None if every process has the whole value."""
        if not isinstance(value, Tensor | Shards):
            return None
        section, _, rest = place.partition("/")
        if section == "optimizer":  # `rest` is a path such as state/3/exp_avg
            return self._moved[int(rest.split("/")[1])] if len(value.shape) else None
        return self._lengths.get(rest)


def gathered_blocks(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    """Return the blocks, which are gathered one by one. The rest of the model is gathered together."""
    # Imported here, because importing timm takes seconds.
    from models.transforms.kernels import ClassTokenVisionTransformer

    blocks = blocks_of(model, "DIST.STRATEGY is fsdp2", "DIST.STRATEGY ddp")
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "DIST.STRATEGY is fsdp2, but the model has BatchNorm, whose running statistics would differ between "
            "processes; use DIST.STRATEGY ddp"
        )
    # A last block that computes only the class token is not called as a module, so no hook would gather it.
    return blocks[:-1] if isinstance(model, ClassTokenVisionTransformer) else blocks


def _local(tensor: Tensor) -> Tensor:
    """Return this process's rows of a weight, or the whole tensor for a buffer."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
