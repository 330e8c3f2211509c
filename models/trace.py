"""Records the operations with which a model computes, and the module of each."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.transforms import ModelTransforms
from utils.errors import ConfigError
from utils.torch_internals import tree_leaves, tree_map

# These operations only move, allocate or describe tensors. The numbers in them were examined when they were computed.
MOVES = frozenset(
    "__get__ __set__ __getitem__ __len__ size dim stride numel is_floating_point is_contiguous view view_as reshape "
    "flatten permute transpose movedim unbind chunk split expand expand_as squeeze unsqueeze contiguous detach clone "
    "roll new_empty new_zeros new_ones empty_like zeros_like ones_like requires_grad_ register_hook".split()
)
MATMULS = frozenset("matmul __matmul__ bmm baddbmm einsum".split())
FUSED = "scaled_dot_product_attention"


class Location(NamedTuple):
    """The place of an operation: a leaf module, or the operation `part` of a module with submodules."""

    path: str
    part: str = ""

    def __str__(self) -> str:
        return f"{self.path or '(model)'} {self.part}".strip()


class Trace(TorchFunctionMode):
    """A record of one forward and backward: the outputs of operations, and the gradients of their inputs.

    Operations in MOVES, in-place operations and operations with the argument `out` are not recorded. Each recorded
    operation gets aliases of its inputs. So a gradient comes from one operation and is not the sum over all operations
    that use the tensor.
    """

    def __init__(self, model: nn.Module, reference: "Trace | None" = None):
        super().__init__()
        self.model = model
        self._running: list[tuple[str, nn.Module]] = []  # the modules whose forward is running, outermost first
        self.reference = reference  # the trace of a float32 pass over the same operations
        self.first_forward: Location | None = None  # the first place with a non-finite output
        self.first_backward: Location | None = None  # the first place with a non-finite gradient
        self.activations: dict[Location, float] = defaultdict(float)  # largest absolute value
        self.types: dict[Location, set[torch.dtype]] = defaultdict(set)  # types of the outputs
        self.gradients: dict[tuple, tuple[Location, float]] = {}  # {input: (place, largest absolute gradient)}
        self.in_half: set[tuple] = set()  # inputs in a half type, or of operations that return a half type
        self.nonzero: dict[tuple, Tensor] = {}  # {input: mask of non-zero gradients}; only without a reference
        # Numbers of gradients that are not zero in the reference: that are zero here, and all.
        self.num_underflowed: dict[Location, int] = defaultdict(int)
        self.num_nonzero_in_reference: dict[Location, int] = defaultdict(int)
        # {(module, function): number of calls so far}. The number identifies a call here and in the reference. Each
        # function has its own count, because a black list adds calls of other functions (casts) to one of the two.
        self._num_calls: dict[tuple[str, str], int] = defaultdict(int)
        self._softmaxed: set[tuple] = set()

    @contextlib.contextmanager
    def record_forward(self) -> Iterator[None]:
        """Record one forward inside the `with` block. Its backward may follow later."""
        self._softmaxed.clear()
        self._running = [("", self.model)]
        paths = {module: path for path, module in self.model.named_modules() if path}

        def enter(module, inputs) -> None:
            self._running.append((paths[module], module))

        def leave(module, inputs, output) -> None:
            self._running.pop()

        with contextlib.ExitStack() as hooks:
            for module in paths:
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            with self:
                yield

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        if name in MOVES or in_place or "out" in kwargs:
            return func(*args, **kwargs)
        place = self._place(name)
        if name == FUSED:
            self._note_logits(args)
        self._num_calls[place.path, name] += 1
        call = (place.path, name, self._num_calls[place.path, name])
        taken: list[tuple[tuple, Tensor]] = []

        def alias(tensor):
            if not (isinstance(tensor, Tensor) and tensor.requires_grad):
                return tensor
            key, own = (*call, len(taken)), tensor.view_as(tensor)
            is_weight = isinstance(tensor, nn.Parameter)
            own.register_hook(lambda gradient: self._see_gradient(place, key, is_weight, gradient))
            taken.append((key, own))
            return own

        output = func(*tree_map(alias, args), **tree_map(alias, kwargs))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                self._see_output(place, tensor)
                in_half = tensor.dtype.itemsize == 2
                self.in_half |= {key for key, own in taken if in_half or own.dtype.itemsize == 2}
        return output

    def _place(self, name: str) -> Location:
        path, module = self._running[-1]
        if not any(True for _ in module.children()):
            return Location(path)
        if hasattr(module, "attn_drop"):  # an attention module of timm
            if name in MATMULS:
                return Location(path, "attention x values" if path in self._softmaxed else "logits (q·k)")
            if name == "softmax":
                self._softmaxed.add(path)
            return Location(path, "attention core" if name == FUSED else name.strip("_"))
        return Location(path, name.strip("_"))

    @torch.no_grad()
    def _note_logits(self, args: tuple) -> None:
        """Record the largest q·k, which a fused kernel does not return and computes in a type of its own choice."""
        q, k = args[0].float(), args[1].float()
        largest = (q @ k.transpose(-2, -1)).abs().amax().item() * q.shape[-1] ** -0.5
        place = Location(self._running[-1][0], "logits (q·k)")
        self.activations[place] = larger(self.activations[place], largest)

    def _see_output(self, place: Location, output: Tensor) -> None:
        largest = output.detach().abs().amax().item()
        self.activations[place] = larger(self.activations[place], largest)
        self.types[place].add(output.dtype)
        if self.first_forward is None and not math.isfinite(largest):
            logits = Location(place.path, "logits (q·k)")
            is_cause = place.part == "attention core" and self.activations[logits] > torch.finfo(output.dtype).max
            self.first_forward = logits if is_cause else place

    def _see_gradient(self, place: Location, key: tuple, is_weight: bool, gradient: Tensor) -> None:
        if not gradient.numel():
            return
        largest = gradient.abs().amax().item()
        self.gradients[key] = (place, largest)
        if self.first_backward is None and not math.isfinite(largest):
            self.first_backward = place
        # Underflow is counted only in the gradients of weights, if the module has weights.
        if not is_weight and any(True for _ in self.model.get_submodule(place.path).parameters(recurse=False)):
            return
        if self.reference is None:
            self.nonzero[key] = gradient != 0
            return
        expected = self.reference.nonzero.get(key)
        if expected is not None and expected.shape == gradient.shape:
            self.num_underflowed[place] += int((expected & (gradient == 0)).sum())
            self.num_nonzero_in_reference[place] += int(expected.sum())

    @property
    def first_non_finite(self) -> Location | None:
        """Return the first place with a non-finite output, or else the first with a non-finite gradient."""
        return self.first_forward or self.first_backward

    def largest_gradients(self) -> dict[Location, float]:
        gradients: dict[Location, float] = defaultdict(float)
        for place, largest in self.gradients.values():
            gradients[place] = larger(gradients[place], largest)
        return gradients


def refuse_not_finite(
    source: str, model: nn.Module, transforms: ModelTransforms, forward: Callable[[], Any]
) -> NoReturn:
    """Raise ConfigError for weights whose outputs are not finite. The message names the place in the model.

    `source` names the weights, `transforms` are the model's transforms, and `forward` computes the outputs again.
    """
    # These transforms skip modules, whose hooks would then not run.
    transforms.that_bypass_modules().revert(model)
    trace = Trace(model)
    with torch.no_grad(), trace.record_forward():
        forward()
    where = f", first in {trace.first_forward}" if trace.first_forward else ""
    raise ConfigError(
        f"{source}: the model's outputs are not finite{where}; the weights are damaged, come from a run that diverged, "
        "or are too large for half precision: leave out -amp, or add -amp_dtype bfloat16"
    )


def larger(one: float, other: float) -> float:
    """Return the larger of two numbers. NaN counts as larger than any number."""
    return other if other != other or other > one else one
