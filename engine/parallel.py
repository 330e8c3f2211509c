"""How the processes of a run hold the model: one process, whole on each (ddp) or in shards (fsdp2)."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import AUTO, Config
from models.parts import has_running_statistics
from models.transforms.base import blocks_of
from models.weights.sharded import ROWS, Parts, changed, span
from utils.distributed import Process
from utils.errors import ConfigError

LARGE = ("state_dict", "state_dict_ema", "optimizer")  # the parts of a state with large tensors
# torch.compile cuts its graph at every bucket: 13 pieces of a ViT-Base with torch's 25 MiB. On CUDA only, because among
# more than two processes the size decides about the last bit of an average.
BUCKET_MB = 100


class Parallel:
    """How the processes of a run hold a model; this one is for a single process, which has all of it."""

    is_sharded = False

    def __init__(self, process: Process | None = None):
        self.process = process

    def share_memory(self, model: nn.Module) -> dict[int, Tensor]:
        """What deepcopy takes in place of copies, by the ids of tensors: they are copied when the copy is placed."""
        return {}

    def place(self, *models: nn.Module) -> None:
        """Move the weights of a model, and of its copy, to their device; whole models are there already."""

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


class Sharded(Parallel):
    """Every process holds some rows of each weight, of its gradient and of its optimizer state. The weights of a block
    are gathered only while the block computes."""

    is_sharded = True

    def __init__(self, process: Process, half: torch.dtype | None, reduce: torch.dtype | None):
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(process)
        self._mesh = init_device_mesh(process.device.type, (process.world_size,))
        self._half, self._reduce = half, reduce
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._lengths: dict[str, int] = {}  # rows of each whole weight
        self._moved: list[int] = []  # the same, in the order of the optimizer's state
        # Autocast's cache would keep half copies of all weights until the end of the forward.
        torch.set_autocast_cache_enabled(False)

    def share_memory(self, model: nn.Module) -> dict[int, Tensor]:
        """The tensors of the blocks, so that the host never holds the model twice."""
        memory: dict[int, Tensor] = {}
        for block in gathered_blocks(model):
            memory |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in block.parameters()}
            memory |= {id(each): each.detach() for each in block.buffers()}
        return memory

    def place(self, *models: nn.Module) -> None:
        """Shard and move block by block: a model built on the host is never whole on the device."""
        from torch.distributed.fsdp import fully_shard

        for block, *copies in zip(*map(gathered_blocks, models), strict=True):
            for each in copies:
                for tensor in (*each.parameters(), *each.buffers()):
                    tensor.data = tensor.data.clone()
            for each in (block, *copies):
                fully_shard(each, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy(each))
        for model in models:
            # Reshard the rest too: an evaluation has no backward that would free its weights, and the next one would
            # compute with them.
            fully_shard(model, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._policy(model))
            if self.process.device.type == "cpu":  # gloo cannot average
                for module in model.modules():
                    if hasattr(module, "set_force_sum_reduction_for_comms"):
                        module.set_force_sum_reduction_for_comms(True)

    def _policy(self, module: nn.Module) -> Any:
        """The type in which weights are gathered. Under autocast, matrices in the half type to which it would cast them
        anyway: the same numbers, half the traffic, and no half copies kept until the backward.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # cast_forward_inputs would take autocast's sums between the blocks to the half type.
        policy = MixedPrecisionPolicy(reduce_dtype=self._reduce, cast_forward_inputs=False)
        if self._half is None or not hasattr(policy, "param_dtype_override_fn"):  # older torch: one type for all
            return policy
        from models.transforms.kernels import PatchConv2d  # local: importing timm takes seconds

        # By identity: a layer named by a list has another class, and casts as the list says.
        layers = [each for each in module.modules() if type(each) in (nn.Linear, nn.Conv2d, PatchConv2d)]
        matrices = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return MixedPrecisionPolicy(
            self._half,
            self._reduce or torch.float32,
            cast_forward_inputs=False,
            param_dtype_override_fn=lambda parameter: None if id(parameter) in matrices else parameter.dtype,
        )

    def sync_gradients(self, replica: nn.Module, now: bool) -> contextlib.AbstractContextManager:
        replica.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Plain tensors that share the memory of the local rows, for the optimizer and the GradScaler."""
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
        for name, mine in self.local_state(model).items():
            mine.copy_(state[name])

    def gradients_to_optimizer(self) -> None:
        for parameter, mine in self._pairs:
            if parameter.grad is not None:
                mine.grad, parameter.grad = _local(parameter.grad), None

    def sync_found_inf(self, found_inf: Tensor) -> None:
        self.process.max(found_inf)

    def norm(self, norm: Tensor) -> Tensor:
        return self.process.sum(norm.double().square()).sqrt().to(norm.dtype)

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        lengths = {id(mine): length for (_, mine), length in zip(self._pairs, self._lengths.values(), strict=True)}
        self._moved = [lengths[id(each)] for group in optimizer.param_groups for each in group["params"]]

    def gather_state(self, state: dict) -> dict:
        """Gather tensor by tensor: only process 0 ever holds more than one whole tensor."""

        def gather(place: str, value: Any) -> Any:
            length = self._length(place, value)
            return value if length is None else self.process.gather(value, length)

        return within_large(state, gather)

    def split_for_save(self, state: dict) -> tuple[dict, dict[str, Tensor]]:
        """The state without its large tensors, and this process's rows of them by path."""
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
                return value.whole() if isinstance(value, Parts) else value
            start, stop = span(length, self.process.rank, self.process.world_size)
            return value.rows(start, stop) if isinstance(value, Parts) else value[start:stop]

        return within_large(state, take)

    def _length(self, place: str, value: Any) -> int | None:
        """The number of rows of the whole tensor at this path; None for what every process holds whole."""
        if not isinstance(value, Tensor | Parts):
            return None
        section, _, rest = place.partition("/")
        if section == "optimizer":  # state/3/exp_avg
            return self._moved[int(rest.split("/")[1])] if len(value.shape) else None
        return self._lengths.get(rest)


def gathered_blocks(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    """The blocks that are gathered one by one; the rest of the model is gathered together."""
    from models.transforms.class_token_block import ClassTokenVisionTransformer  # importing timm takes seconds

    blocks = blocks_of(model, "DIST.STRATEGY is fsdp2", "DIST.STRATEGY ddp")
    if any(has_running_statistics(module) for module in model.modules()):
        raise ConfigError(
            "DIST.STRATEGY is fsdp2, but the model has BatchNorm, whose running statistics each process would keep "
            "for itself; use DIST.STRATEGY ddp"
        )
    # A last block for the class token alone is not called as a module, so no hook would gather it.
    return blocks[:-1] if isinstance(model, ClassTokenVisionTransformer) else blocks


def _local(tensor: Tensor) -> Tensor:
    """This process's rows; buffers are whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_strategy(config: Config) -> None:
    """Refuse settings that fsdp2 does not support."""
    if config.DIST.STRATEGY != "fsdp2":
        return
    precision = config.PRECISION
    is_auto, is_other = config.DATA.BATCH_SIZE == AUTO, config.AMP and precision.MODE != "autocast"
    unfit = (
        (is_auto, f"DATA.BATCH_SIZE is {AUTO}", "a number; -check estimates how many images fit"),
        (is_other, f"PRECISION.MODE is {precision.MODE}", "PRECISION.MODE autocast"),
        # Weights are gathered block by block, and a CUDA graph would read them where they were when it was recorded.
        (config.COMPILE not in (False, "blocks"), f"COMPILE is {str(config.COMPILE).lower()}", "COMPILE blocks"),
        (config.START.EXPLAIN, "PRECISION.EXPLAIN is true", "-explain_precision with DIST.STRATEGY ddp"),
    )
    for is_set, what, remedy in unfit:
        if is_set:
            raise ConfigError(f"DIST.STRATEGY is fsdp2 and {what}, which do not go together; use {remedy}")


def is_sharded(config: Config, process: Process) -> bool:
    """A single process does not shard."""
    return config.DIST.STRATEGY == "fsdp2" and process.world_size > 1


def choose_parallel(config: Config, process: Process, half: torch.dtype | None) -> Parallel:
    """The strategy for DIST.STRATEGY; `half`: autocast's type."""
    reduce = half if config.PRECISION.REDUCE == "half" and config.PRECISION.MODE != "naive" else None
    if is_sharded(config, process):
        return Sharded(process, half, reduce)
    if process.world_size == 1:
        return Parallel(process)
    return Replicated(process, reduce, BUCKET_MB if config.COMPILE and process.device.type == "cuda" else None)
