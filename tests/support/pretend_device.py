"""A device without hardware. Its tensors are in host memory, but it refuses what a GPU refuses, and counts waits.

An operation that mixes tensors of host and device raises. `waits()` counts operations that make the host wait for the
device: reading a value on the host, an output whose shape depends on values, a copy that is not `non_blocking` or whose
host memory is not page-locked, and synchronize(). Non-blocking copies to the host are done at the next such wait.
Not simulated: a GPU's numerics, speed and memory, races between streams, several processes.

`torch.tensor(..., device=DEVICE)` raises, because on a GPU it waits. torch cannot unregister such a device, or register
one after the first backward, so a test of it runs in its own process:

    @on_pretend_device
    def test_a_sum_is_read_once(tmp_path):
        with waits() as seen:
            torch.ones(3, device=DEVICE).sum().item()
        assert seen == {"item": 1}
"""

import collections
import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.optim import optimizer
from torch.utils import backend_registration

from tests.support.runs import run
from utils.torch_internals import TorchDispatchMode, tree_leaves, tree_map

NAME = "pretend"
DEVICE = f"{NAME}:0"
aten = torch.ops.aten
WAITS: collections.Counter[str] = collections.Counter()
PINNED: list[torch.Tensor] = []  # all page-locked memory that was ever allocated
QUEUED: list[tuple[torch.Tensor, torch.Tensor]] = []  # unfinished copies to the host: targets and values
NAMES = {"_local_scalar_dense": "item", "_to_copy": "blocking copy", "copy_": "blocking copy"}
# The most common operations that CUDA's autocast computes in half precision and in float32.
IN_HALF = "conv2d linear matmul addmm bmm mm baddbmm scaled_dot_product_attention".split()
IN_FLOAT32 = "layer_norm softmax.int log_softmax.int cross_entropy_loss nll_loss".split()


def on_pretend_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process that has the device. The test's arguments must be picklable."""

    @functools.wraps(test)
    def start(**arguments) -> None:
        words = test.__module__, test.__name__, pickle.dumps(arguments).hex()
        run("tests.support.programs.pretend_device_test", *words).done()

    return start


@contextlib.contextmanager
def waits() -> Iterator[dict[str, int]]:
    """Count the operations inside that make the host wait, by kind. Read the counts afterwards."""
    before, seen = WAITS.copy(), {}
    yield seen
    seen.update(WAITS - before)


@contextlib.contextmanager
def pretend_device() -> Iterator[None]:
    """Register the device for the rest of this process. Its operations run only inside this context."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    libraries = register_autocast()
    optimizer._foreach_supported_types.append(Elsewhere)  # let optimizers update all weights at once, as on a GPU
    # Otherwise module.to() moves a wrapper's data, but not the tensor that it wraps.
    torch.__future__.set_swap_module_params_on_conversion(True)
    stream = mock.patch("torch.accelerator.current_stream", lambda device=None: Stream(DEVICE))
    with Operations(), stream, mock.patch("torch.tensor", functools.partial(make_tensor, torch.tensor)):
        yield
    del libraries  # the libraries must live until here, because their kernels are removed with them


class Elsewhere(torch.Tensor):
    """A tensor on the device; `values` is the host tensor with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor):
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, values.size(), device=DEVICE, **layout)
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def tolist(self) -> list:
        wait("tolist")
        return self.values.tolist()

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, **options) -> str:
        return f"Elsewhere({tuple(self.shape)}, {self.dtype})"


class Operations(TorchDispatchMode):
    """Intercepts every operation below autograd, including operations that create a tensor or copy one to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func: torch._ops.OpOverload, args: tuple, kwargs: dict):
    """Run one operation, on the values of the device's tensors if there are any."""
    if func is aten._pin_memory.default:
        return pinned(args[0].clone())
    if kwargs.get("pin_memory"):
        return pinned(func(*args, **{**kwargs, "pin_memory": False}))
    is_ours = any(isinstance(each, Elsewhere) for each in tree_leaves((args, kwargs)))
    target = kwargs.get("device")
    goes_there = target is not None and torch.device(target).type == NAME
    if not (is_ours or goes_there):
        return func(*args, **kwargs)
    if func is aten.record_stream.default:  # it computes nothing; it only delays the reuse of memory
        return None
    if host_waits(func, args, kwargs, goes_there):
        name = func.overloadpacket.__name__
        wait(NAMES.get(name, name))
    elif func is aten.copy_.default and not isinstance(args[0], Elsewhere):
        QUEUED.append((args[0], args[1].values.clone()))
        return args[0]
    on_host = functools.partial(to_host, name=str(func), may_mix=goes_there or func is aten.copy_.default)
    inner_args, inner_kwargs = (tree_map(on_host, each) for each in (args, kwargs))
    output = func(*inner_args, **inner_kwargs)
    if any(each.alias_info and each.alias_info.is_write for each in func._schema.returns):
        return kwargs.get("out", args[0])  # an in-place operation returns its argument
    leaves_device = target is not None and not goes_there
    return output if leaves_device else tree_map(to_device, output)


def to_device(value):
    return Elsewhere(value) if isinstance(value, torch.Tensor) else value


def to_host(value, name: str, may_mix: bool):
    """Convert an argument for the host operation: device tensors become host tensors, the device becomes the CPU."""
    if isinstance(value, Elsewhere):
        return value.values
    if isinstance(value, torch.Tensor) and value.dim() and not may_mix:  # GPUs also accept host scalars
        raise RuntimeError(f"{name}: a host tensor {tuple(value.shape)} among tensors of another device")
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def host_waits(func: torch._ops.OpOverload, args: tuple, kwargs: dict, goes_there: bool) -> bool:
    """Return whether the host needs a value from the device, or waits for a copy."""
    if func is aten._to_copy.default:
        moves = isinstance(args[0], Elsewhere) != goes_there and kwargs.get("device") is not None
        # For copies to the host, torch itself uses page-locked memory.
        return moves and not (kwargs.get("non_blocking") and (not goes_there or is_pinned(args[0])))
    if func is aten.copy_.default:
        on_host = [each for each in args[:2] if not isinstance(each, Elsewhere)]
        return bool(on_host) and not (args[2:] == (True,) and is_pinned(on_host[0]))
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(each is not None and each.dtype is torch.bool for each in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def wait(kind: str) -> None:
    """Let the host wait until the device has finished all its work."""
    WAITS[kind] += 1
    for target, values in QUEUED:
        target.copy_(values)
    QUEUED.clear()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark this tensor as page-locked and return it."""
    PINNED.append(tensor)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    starts = ((each.data_ptr(), each.nbytes) for each in PINNED)
    return any(start <= tensor.data_ptr() < start + size for start, size in starts)


def make_tensor(make: Callable, data, pin_memory: bool = False, **options) -> torch.Tensor:
    """Call torch.tensor, and record its page-locked memory, which no dispatch mode sees."""
    tensor = make(data, **options)
    return pinned(tensor) if pin_memory else tensor


class Backend(backend_registration._DummyBackendModule):
    """The functions that torch expects in torch.pretend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device=None) -> None:
        wait("synchronize")

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device=None) -> None:
        torch.set_rng_state(state)


class Stream(torch.Stream):
    def synchronize(self) -> None:
        wait("synchronize")

    def record_event(self, event=None) -> "Event":
        return Event()


class Event:
    """An event. Waiting for it does not wait for later work, so such waits are counted separately, as `event`."""

    def synchronize(self) -> None:
        wait("event")


def register_autocast() -> list[torch.library.Library]:
    """Register autocast for the device."""
    others, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(value, dtype: torch.dtype):
        changes = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if changes else value

    def casting(name: str, in_half: bool) -> Callable:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(aten, packet), overload or "default")

        def call(*args, **kwargs):
            dtype = torch.get_autocast_dtype(NAME) if in_half else torch.float32
            with torch._C._ExcludeDispatchKeyGuard(autocast):
                args, kwargs = tree_map(lambda each: cast(each, dtype), (args, kwargs))
                return operation(*args, **kwargs)

        return call

    for names, in_half in ((IN_HALF, True), (IN_FLOAT32, False)):
        for name in names:
            kernels.impl(name, casting(name, in_half), "AutocastPrivateUse1")
    return [others, kernels]
