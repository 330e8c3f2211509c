"""All private names of torch, torchvision and timm that halfstep uses, with the reason for each. Other files use none.

These names exist in torch 2.11 to 2.15 and timm 1.0.20 to 1.0.31. Before requirements.txt allows another version, run
tests/unit/utils/test_torch_internals.py with that version.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.utils import _python_dispatch, _pytree

TORCH_VERSIONS, TIMM_VERSIONS = ("2.11", "2.15"), ("1.0.20", "1.0.31")  # the oldest and the newest supported version
TorchDispatchMode = _python_dispatch.TorchDispatchMode  # sees the result of autocast, unlike torch.overrides
tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map  # torch has no public functions for nested containers
# These kernels write uint8 pixels into the batch. functional.interpolate would allocate new memory for its result.
RESIZE_KERNELS = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}
# These functions start one kernel for all tensors of a model, as torch.optim does. A loop would start hundreds.
foreach_copy_, foreach_sub = torch._foreach_copy_, torch._foreach_sub
foreach_mul_, foreach_add_ = torch._foreach_mul_, torch._foreach_add_
ALLOWED_IN_WEIGHTS = _weights_only_unpickler._get_allowed_globals()  # {name: function that weights files may call}
# Attributes with the labels of torchvision's data sets, so that reading the labels does not require reading all images.
LABELS = ("targets", "labels", "_labels")


COMPILER, COMPILER_UTILITIES = "torch._dynamo", "torch._dynamo.utils"


def import_compiler() -> None:
    """Import torch's compiler, so that a later import_timm() does not hide it."""
    from torch import _dynamo  # noqa: F401


def import_timm() -> ModuleType:
    """Return timm, imported with torchvision but without torch's compiler and wandb, which saves 2 s and 150 MB.

    timm and torchvision import the compiler only to query it, or to exclude a function from compilation. Here the
    compiler is imported at the first such call. They import wandb only to check whether it is installed.
    """
    if COMPILER in sys.modules or "timm" in sys.modules:
        import timm

        return timm

    def ask(name: str) -> Any:
        if name.startswith("__"):  # a search for source files looks at attributes of all modules
            raise AttributeError(name)
        if sys.modules.get(COMPILER_UTILITIES) is utilities:
            del sys.modules[COMPILER_UTILITIES]
        # By its name, because the hidden module was just removed while torch may be importing the package.
        return getattr(importlib.import_module(COMPILER_UTILITIES), name)

    utilities = ModuleType(COMPILER_UTILITIES)
    utilities.__getattr__ = ask
    utilities.is_compile_supported = lambda device: ask("is_compile_supported")(device)
    hidden = {COMPILER_UTILITIES: utilities} | ({} if "wandb" in sys.modules else {"wandb": None})
    disable = torch.compiler.disable
    sys.modules.update(hidden)
    torch.compiler.disable = lambda function=None, recursive=True, **_: torch._disable_dynamo(function, recursive)
    try:
        import timm

        return timm
    finally:
        torch.compiler.disable = disable
        for name, module in hidden.items():
            if sys.modules.get(name, module) is module:
                sys.modules.pop(name, None)


def without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return an optimizer class that is not excluded from compilation: the exclusion would import the compiler."""
    for method in vars(torch.optim.Optimizer).values():
        if wrapped := getattr(method, "__wrapped__", None):
            wrapped.__dynamo_disable = wrapped
    return type(cls.__name__, (cls,), {"step": torch.no_grad()(inspect.unwrap(cls.step))})


def scale_and_growth(scaler: GradScaler) -> tuple[Tensor, Tensor]:
    """Return the loss scale and the count of finite updates, on the device. get_scale() would wait for the device."""
    return scaler._check_scale_growth_tracker("update")


def found_inf(scaler: GradScaler) -> Tensor:
    """Return 1.0 if a gradient of the scaler's only optimizer is not finite, else 0.0. Valid until update()."""
    (state,) = scaler._per_optimizer_states.values()
    (is_infinite,) = state["found_inf_per_device"].values()
    return is_infinite


def set_found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer, is_infinite: Tensor) -> None:
    """Set found_inf without unscale_.

    If it is 1, step() skips the update. The optimizer unscales by its `grad_scale`.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    state.update(stage=OptState.UNSCALED, found_inf_per_device={is_infinite.device: is_infinite})


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass. Parameter hooks would run before DDP's own callback."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def allow_graphs(number: int) -> None:
    """Set the number of graphs after which torch.compile stops compiling a function. The default is 8."""
    torch._dynamo.config.recompile_limit = number


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward hooks. torch has no public list of hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return a stored parameter. get_parameter would call a property with this name in the module's class instead."""
    return module._parameters[name]


def add_position_embedding(model: nn.Module, patches: Tensor) -> Tensor:
    """Add class token and position embedding as timm's VisionTransformer does. timm's function is private."""
    return model._pos_embed(patches)


def events_of(profiled: Any) -> list[Any]:
    """Return the events of torch.autograd.profiler.profile by their start: its public lists lack those of memory."""
    return sorted(profiled.kineto_results.events(), key=lambda event: event.start_ns())
