"""The private names of torch, torchvision and timm that are used, each with the reason; no other file has any.

They exist in torch 2.11 to 2.15 and timm 1.0.20 to 1.0.31. Before requirements.txt allows another version, run
tests/utils/test_torch_internals.py with it.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.utils import _python_dispatch, _pytree

TORCH_VERSIONS, TIMM_VERSIONS = ("2.11", "2.15"), ("1.0.20", "1.0.31")  # supported: oldest and newest
TorchDispatchMode = _python_dispatch.TorchDispatchMode  # sees what autocast made: torch.overrides is above it
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map  # nests of tensors: torch has no public ones
# functional.interpolate allocates its result, where these write uint8 pixels into the batch.
RESIZE_KERNELS = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
# One kernel for all tensors of a model, as torch.optim does it; a loop starts hundreds.
foreach_copy_, foreach_sub = torch._foreach_copy_, torch._foreach_sub
foreach_mul_, foreach_add_ = torch._foreach_mul_, torch._foreach_add_


def foreach_put_back_(tensors: list[Tensor], former: list[Tensor], skipped: Tensor) -> None:
    """Copy `former`, which is lost, to the tensors where `skipped` on the device is 1: in one kernel, which else does nothing.

    As a first momentum fused SGD takes the gradient as it is, which is `former` here. All have one floating-point type.
    """
    rates = dict.fromkeys(("lr", "weight_decay", "dampening"), 0.0)
    flags = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_(former, former, tensors, momentum=1.0, found_inf=1 - skipped, **rates, **flags)


ALLOWED_IN_WEIGHTS = _weights_only_unpickler._get_allowed_globals()  # by their names: what such files may call
LABELS = ("targets", "labels", "_labels")  # where torchvision's data sets keep them; else every image has to be read


COMPILER, COMPILER_UTILITIES = "torch._dynamo", "torch._dynamo.utils"


def import_compiler() -> None:
    """Import torch's compiler, so that import_timm() leaves everything as it is."""
    importlib.import_module(COMPILER)


def import_timm() -> ModuleType:
    """timm, imported with torchvision but without torch's compiler and without wandb: 2 s and 150 MB.

    They import the compiler to ask it something, or to have it leave a function out; here that waits for the first such
    call. wandb they import to see whether it is there.
    """
    if COMPILER in sys.modules or "timm" in sys.modules:
        return importlib.import_module("timm")

    def ask(name: str) -> Any:
        if name.startswith("__"):  # whoever looks for a source file asks all modules
            raise AttributeError(name)
        if sys.modules.get(COMPILER_UTILITIES) is utilities:
            del sys.modules[COMPILER_UTILITIES]
        return getattr(importlib.import_module(COMPILER_UTILITIES), name)

    utilities = ModuleType(COMPILER_UTILITIES)
    utilities.__getattr__ = ask
    utilities.is_compile_supported = lambda device: ask("is_compile_supported")(device)
    hidden = {COMPILER_UTILITIES: utilities} | ({} if "wandb" in sys.modules else {"wandb": None})
    disable = torch.compiler.disable
    sys.modules.update(hidden)
    torch.compiler.disable = lambda function=None, recursive=True, **_: torch._disable_dynamo(function, recursive)
    try:
        return importlib.import_module("timm")
    finally:
        torch.compiler.disable = disable
        for name, module in hidden.items():
            if sys.modules.get(name, module) is module:
                sys.modules.pop(name, None)


def without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer of torch whose methods do not import the compiler only to be left out by it."""
    for method in vars(torch.optim.Optimizer).values():
        if wrapped := getattr(method, "__wrapped__", None):
            wrapped.__dynamo_disable = wrapped
    return type(cls.__name__, (cls,), {"step": torch.no_grad()(inspect.unwrap(cls.step))})


def scale_and_growth(scaler: GradScaler) -> tuple[Tensor, Tensor]:
    """The loss scale and the count of good updates, on the device: get_scale() waits for it."""
    return scaler._check_scale_growth_tracker("update")


def found_infs(scaler: GradScaler) -> list[Tensor]:
    """What every unscale_ since the last update found: step() asks the same, and tells only by not stepping."""
    states = scaler._per_optimizer_states.values()
    return [each for state in states for each in state["found_inf_per_device"].values()]


def found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """1.0 where unscale_ met a gradient of this optimizer that is not finite; gone after update()."""
    (found,) = scaler._found_inf_per_device(optimizer).values()
    return found


def set_found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer, found: Tensor) -> None:
    """Put this in place of what unscale_ would have found: step() then skips by it, and leaves unscaling to the optimizer's `grad_scale`."""
    state = scaler._per_optimizer_states[id(optimizer)]
    state.update(stage=OptState.UNSCALED, found_inf_per_device={found.device: found})


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs now; hooks of parameters run before DDP's own callback."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def allow_graphs(number: int) -> None:
    """Graphs that torch.compile makes of one function before it leaves the rest uncompiled; the default is 8."""
    torch._dynamo.config.recompile_limit = number


def has_hooks(module: nn.Module) -> bool:
    """Whether anything waits for the module's forward: torch has no public list of hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The weight itself where the module's class has a property of that name, which get_parameter would call."""
    return module._parameters[name]


def add_position_embedding(model: nn.Module, patches: Tensor) -> Tensor:
    """Class token and position embedding of timm's VisionTransformer, between its public modules."""
    return model._pos_embed(patches)


def inner_data(tensor: Any) -> Any:
    """What a tensor of torchao's is computed with: its dtype is the one that it was converted from."""
    return getattr(tensor, "_data", tensor)


def end_restarts_after(is_final: Callable[[Collection], bool]) -> None:
    """Have torchrun's agent start processes again only if they did not fail like this, however many restarts are left."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor = LocalElasticAgent._monitor_workers

    def monitor_and_judge(agent: LocalElasticAgent, group: Any) -> Any:
        result = monitor(agent, group)
        if result.failures and is_final(result.failures.values()):
            agent._remaining_restarts = 0
        return result

    LocalElasticAgent._monitor_workers = monitor_and_judge
