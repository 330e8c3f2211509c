"""Modules and operators that compute in float32, or in half, whatever autocast would choose for them."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from configs.schema import Precision
from utils.errors import ConfigError, did_you_mean

BLACK, WHITE = "PRECISION.CUSTOM_BLACK_LIST", "PRECISION.CUSTOM_WHITE_LIST"
LOSS = "softmax_with_cross_entropy"

# What an attention module computes between its layers: functions, so no modules that could be listed. They are one unit:
# a softmax in float32 of products that overflowed in half saves nothing, and the fused kernels have one type for all.
ATTENTION = frozenset(
    {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.softmax, Tensor.softmax, F.softmax}
    | {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm, torch.einsum}
)

# Paddle's operators, and the classes that compute them here.
OPERATORS = {
    "matmul_v2": {"Linear", "attention's functions"},
    "softmax": {"Softmax", "attention's functions"},
    "layer_norm": {"LayerNorm"},
    "conv2d": {"Conv2d"},
    "gelu": {"GELU", "GELUTanh", "QuickGELU"},
}


@dataclass(frozen=True, eq=False)
class Node:
    """A module, or the functions of an attention module as if they were a module inside."""

    path: str
    parent: "Node | None"
    names: frozenset[str]  # of the module's classes
    module: nn.Module | None = None


@dataclass(frozen=True)
class Entry:
    """One word of a list."""

    text: str
    setting: str  # BLACK or WHITE

    @property
    def is_pattern(self) -> bool:
        return any(sign in self.text for sign in "*?[")

    def names(self, node: Node) -> int:
        """How exactly this names the node: 0 not, 1 by operator, 3 by class, 4 by pattern, 5 by path."""
        if self.text in OPERATORS:
            # 2: in attention softmax decides over matmul_v2, since its products are what a softmax is listed for.
            return (1 + (self.text == "softmax")) if OPERATORS[self.text] & node.names else 0
        if node.module is None:
            return 0
        if self.is_pattern:
            # blocks.* is about blocks.0, and so about what is inside; else blocks.0.attn could not be an exception.
            inside = node.parent is not None and self.names(node.parent)
            return 4 if inside or node.path and fnmatchcase(node.path, self.text) else 0
        return 5 if node.path == self.text else 3 * (self.text in node.names)


def apply_lists(model: nn.Module, settings: Precision, device_type: str, half: torch.dtype | None) -> list[str]:
    """Make the model compute as the two lists say, under autocast to `half`. Returns what the log should tell.

    Each module gets a class of its own that wraps its forward. That goes along with copy.deepcopy, DDP and
    torch.compile, and leaves the names of weights alone. Rejected: hooks, which cannot hold an autocast open around
    forward without leaking it when forward raises, and module.forward = ..., which deepcopy ties to the old module.
    Safe to repeat on a model, for the next weights.
    """
    for module in model.modules():
        module.__class__ = getattr(type(module), "without_lists", type(module))
    entries = [Entry(text, BLACK) for text in settings.CUSTOM_BLACK_LIST]
    entries += [Entry(text, WHITE) for text in settings.CUSTOM_WHITE_LIST]
    _refuse_twice(settings)
    entries, lines = _without_loss(entries)
    if not entries:
        return lines
    lists = _choose_lists(list(_nodes(model)), entries)
    if half is None:
        return lines
    for node, setting in lists.items():
        if node.module is not None:
            listing = _listing(node, lists, half, device_type)
            if setting or listing.attention_dtype:
                node.module.__class__ = _listed_class(type(node.module), listing)
    counts = {each: sum(each == setting for setting in lists.values()) for each in (BLACK, WHITE)}
    names = {BLACK: "float32", WHITE: str(half).removeprefix("torch.")}
    told = [f"{count} modules and attention cores in {names[each]} ({each})" for each, count in counts.items() if count]
    return [*lines, f"lists: {', '.join(told)}"]


def _refuse_twice(settings: Precision) -> None:
    for text in settings.CUSTOM_BLACK_LIST:
        if text in settings.CUSTOM_WHITE_LIST:
            raise ConfigError(f"{BLACK}: {text} is in {WHITE} too; take it out of one of them")


def _without_loss(entries: list[Entry]) -> tuple[list[Entry], list[str]]:
    """The entries that are about the model, and a line where one is about the loss."""
    lines = []
    for entry in entries:
        if entry.text == LOSS and entry.setting == WHITE:
            raise ConfigError(
                f"{WHITE}: {LOSS} is always computed in float32, since the sum over classes overflows and rounds in "
                "half precision; remove it"
            )
        if entry.text == LOSS:
            lines.append(f"{BLACK}: {LOSS} is computed in float32 anyway, so the entry changes nothing")
    return [entry for entry in entries if entry.text != LOSS], lines


def _nodes(model: nn.Module) -> Iterator[Node]:
    """Parents before what is inside them."""
    nodes: dict[str, Node] = {}
    for path, module in model.named_modules():
        parent = nodes[path.rpartition(".")[0]] if path else None
        names = frozenset(cls.__name__ for cls in type(module).__mro__) - {"Module", "object"}
        nodes[path] = node = Node(path, parent, names, module)
        yield node
        if _is_attention(module):
            yield Node(f"{path}'s functions", node, frozenset({"attention's functions"}))


def _is_attention(module: nn.Module) -> bool:
    """Whether the products of attention are computed right here, and not in a module inside."""

    def looks_like_it(module: nn.Module) -> bool:
        name = type(module).__name__
        return hasattr(module, "fused_attn") or (bool(module._modules) and ("Attention" in name or "Attn" in name))

    return looks_like_it(module) and not any(looks_like_it(each) for each in module.modules() if each is not module)


def _choose_lists(nodes: list[Node], entries: list[Entry]) -> dict[Node, str | None]:
    """BLACK, WHITE or None for every node: its own list, else that of what it is in."""
    lists: dict[Node, str | None] = {}
    won, matched = set(), set()
    for node in nodes:
        found = {
            entry: exactness
            for entry in entries
            if (exactness := entry.names(node))
            and not (entry.is_pattern and node.parent is not None and entry.names(node.parent))
        }
        matched |= found.keys()
        best = [entry for entry, exactness in found.items() if exactness == max(found.values())]
        if len({entry.setting for entry in best}) > 1:
            words = " and ".join(f"{entry.text} ({entry.setting})" for entry in best)
            raise ConfigError(f"{BLACK}: {words} both name {node.path}; list {node.path} itself where it should be")
        lists[node] = best[0].setting if best else lists.get(node.parent)
        won |= {entry for entry in found if entry.setting == lists[node]}
    for entry in entries:
        if entry not in matched:
            raise ConfigError(f"{entry.setting}: {entry.text} {_nothing(entry.text, nodes)}")
        if entry not in won:
            raise ConfigError(
                f"{entry.setting}: {entry.text} has no effect, since everything it names is named more exactly by the "
                "other list; remove it there or here"
            )
    return lists


def _nothing(text: str, nodes: list[Node]) -> str:
    if text in OPERATORS:
        return "is an operator that this model has no module for; remove it"
    modules = [node for node in nodes if node.module is not None]
    known: Iterable[str] = [*OPERATORS, LOSS, *sorted(set().union(*(node.names for node in modules)))]
    known = [*known, *(node.path for node in modules if node.path)]
    return (
        "names nothing: no module (blocks.0.attn, blocks.0.*), no class (LayerNorm) and no operator that can be listed "
        f"({', '.join(OPERATORS)}){did_you_mean(text.strip('*.'), known)}"
    )


def _cast(value, dtype: torch.dtype):
    """Floating tensors, also those in a list or tuple. Like autocast, it leaves float64 alone."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    if type(value) in (list, tuple):
        return type(value)([_cast(each, dtype) for each in value])
    return value


class AttentionIn(TorchFunctionMode):
    """Computes the functions of attention in one type, with autocast off. torch.compile traces it like anything else."""

    def __init__(self, dtype: torch.dtype, device_type: str):
        super().__init__()
        self.dtype, self.device_type = dtype, device_type

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in ATTENTION:
            return function(*args, **kwargs)
        with torch.autocast(self.device_type, enabled=False):
            arguments = [_cast(each, self.dtype) for each in args]
            return function(*arguments, **{name: _cast(each, self.dtype) for name, each in kwargs.items()})


@dataclass(frozen=True)
class Listing:
    """How one module computes; equal ones of a class share a class."""

    device_type: str
    dtype: torch.dtype | None  # of inputs; None: as they come
    weights: tuple[str, ...]  # seen in that type
    attention_dtype: torch.dtype | None


def _listing(node: Node, lists: dict[Node, str | None], half: torch.dtype, device_type: str) -> Listing:
    dtypes = {BLACK: torch.float32, WHITE: half, None: None}
    attention = next((lists[each] for each in lists if each.module is None and each.parent is node), None)
    module, dtype = node.module, dtypes[lists[node]]
    # Where nothing is inside, autocast is off (see _listed_class). BatchNorm computes half inputs with float32 weights,
    # and knows no other mixture with its float32 statistics.
    alone = lists[node] == WHITE and not module._modules and not isinstance(module, _NormBase)
    weights = tuple(name for name, _ in module.named_parameters(recurse=False)) if alone else ()
    return Listing(device_type, dtype, weights, dtypes[attention])


@functools.cache
def _listed_class(cls: type, listing: Listing) -> type:
    """The same module, computing as the listing says.

    In half, autocast is on within a module that holds others, for whatever mixes types there; a module that holds none
    has it off and its weights in half, since autocast would take a norm or softmax back to float32.
    """
    device_type, dtype, attention_dtype = listing.device_type, listing.dtype, listing.attention_dtype

    def forward(self, *args, **kwargs):
        if dtype is None:
            return compute(self, *args, **kwargs)
        args = [_cast(each, dtype) for each in args]
        kwargs = {name: _cast(each, dtype) for name, each in kwargs.items()}
        autocasts = dtype is not torch.float32 and len(self._modules) > 0
        with torch.autocast(device_type, dtype=dtype if autocasts else None, enabled=autocasts):
            return compute(self, *args, **kwargs)

    def compute(self, *args, **kwargs):
        if attention_dtype is None:
            return super(listed, self).forward(*args, **kwargs)
        with AttentionIn(attention_dtype, device_type):
            return super(listed, self).forward(*args, **kwargs)

    def in_half(name: str) -> property:
        # What forward reads as self.weight; the weight itself, to save and to train, is in _parameters as ever.
        return property(lambda self: _cast(self._parameters[name], dtype))

    halved = {name: in_half(name) for name in listing.weights}
    listed = type(f"{cls.__name__}Listed", (cls,), {"forward": forward, "without_lists": cls, **halved})
    return listed
