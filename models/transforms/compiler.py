"""Keeps torch's compiler out of a run that does not compile: importing it takes 0.8 s and 150 MB of memory.

torchvision and timm import it to ask what it can do, or to have it leave something out, and so does the first
optimizer. Here they do that when they need the answer, which without a compiler is never.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

COMPILER, UTILITIES = "torch._dynamo", "torch._dynamo.utils"


@contextlib.contextmanager
def compiler_put_off() -> Iterator[None]:
    """What is imported in here does not import the compiler."""
    if COMPILER in sys.modules:
        yield
        return
    utilities = ModuleType(UTILITIES)
    utilities.is_compile_supported = lambda device_type: _real("is_compile_supported")(device_type)
    utilities.__getattr__ = _real
    sys.modules[UTILITIES] = utilities
    disable, torch.compiler.disable = torch.compiler.disable, _disable_later
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules[UTILITIES] is utilities:
            del sys.modules[UTILITIES]


def _real(name: str) -> Any:
    """That name of the compiler's utilities."""
    if name.startswith("__"):  # whoever looks for a source file asks all modules
        raise AttributeError(name)
    if COMPILER not in sys.modules:
        sys.modules.pop(UTILITIES, None)
    return getattr(importlib.import_module(UTILITIES), name)


def _disable_later(function: Callable | None = None, recursive: bool = True, *, reason: str | None = None) -> Callable:
    """torch.compiler.disable, which imports the compiler when the function is called first."""
    return torch._disable_dynamo(function, recursive)


class WithoutCompiler:
    """Comes before a torch optimizer, whose methods would import the compiler only to be left out by it."""

    def __init__(self, *args, **kwargs):
        if COMPILER not in sys.modules:
            for method in vars(torch.optim.Optimizer).values():
                if hasattr(method, "__wrapped__"):
                    setattr(method.__wrapped__, "__dynamo_disable", method.__wrapped__)
        super().__init__(*args, **kwargs)

    @torch.no_grad()
    def step(self) -> None:
        inspect.unwrap(super().step)(self)
