"""Makes modules and operators compute in float32 or in half precision, regardless of autocast's choice."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.parts import classifier_names, covers, has_running_statistics
from models.transforms.base import ModelTransform, wrap
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import own_parameter

BLACK, WHITE = "PRECISION.CUSTOM_BLACK_LIST", "PRECISION.CUSTOM_WHITE_LIST"
LOSS = "softmax_with_cross_entropy"

# The functions that an attention module calls between its layers. All of them get the same type, because a softmax in
# float32 cannot repair products that overflowed in half precision, and a fused kernel has one type for all of them.
ATTENTION = frozenset(
    {F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.softmax, Tensor.softmax, F.softmax}
    | {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm, torch.einsum}
)

# {Paddle's operator: the classes that compute it here}
OPERATORS = {
    "matmul_v2": {"Linear", "attention's operations"},
    "softmax": {"Softmax", "attention's operations"},
    "layer_norm": {"LayerNorm"},
    "conv2d": {"Conv2d"},
    "gelu": {"GELU", "GELUTanh", "QuickGELU"},
}


@dataclass(frozen=True, eq=False)
class Node:
    """A module, or the operations between the layers of an attention module, treated as a submodule."""

    path: str
    parent: "Node | None"
    names: frozenset[str]  # names of the module's class and its base classes
    module: nn.Module | None = None

    def is_named_by(self, text: str) -> bool:
        """Return whether an entry names this node. An entry that matches a path does not name the modules inside it."""
        if text in OPERATORS:
            return bool(OPERATORS[text] & self.names)
        inside = self.parent is not None and covers(text, self.parent.path)
        return text in self.names or covers(text, self.path) and not inside


@dataclass(frozen=True)
class OpOverrides(ModelTransform):
    """Applies the black and the white list under autocast with the type `half`. If `half` is None, only checks them.

    With `has_exact_head`, the layer that returns the outputs is in float32, unless an entry names it: outputs that are
    numbers would lose digits in half precision.
    """

    black: tuple[str, ...]
    white: tuple[str, ...]
    device_type: str
    half: torch.dtype | None
    has_exact_head: bool = False

    def apply(self, model: nn.Module) -> list[str]:
        if LOSS in self.white:
            raise ConfigError(
                f"{WHITE}: {LOSS} is always computed in float32, since the sum over classes overflows and rounds in "
                "half precision; remove it"
            )
        nodes = list(_nodes(model))
        settings = self._choose(nodes, classifier_names(model) if self.has_exact_head else [])
        if self.half is None or not any(settings.values()):
            return []
        dtypes = {BLACK: torch.float32, WHITE: self.half, None: None}
        attention = {node.parent: dtypes[setting] for node, setting in settings.items() if node.module is None}
        for node, setting in settings.items():
            if node.module is not None and (setting or attention.get(node)):
                weights = _weights_to_cast(node.module) if setting == WHITE else ()
                wrap(node.module, self, dtypes[setting], weights, attention.get(node))
        if not (self.black or self.white):
            return []
        counts = {each: sum(each == setting for setting in settings.values()) for each in (BLACK, WHITE)}
        names = {BLACK: "float32", WHITE: str(self.half).removeprefix("torch.")}
        changes = [f"modules and attention cores in {names[each]} ({each}): {n}" for each, n in counts.items() if n]
        return [f"lists: {', '.join(changes)}"]

    def _choose(self, nodes: list[Node], heads: list[str]) -> dict[Node, str | None]:
        """Return {node: BLACK, WHITE or None} from the most specific entry for the node, or from its parent.

        `heads`: the paths of layers that are in float32 without an entry.
        """
        entries = [(text, BLACK) for text in self.black] + [(text, WHITE) for text in self.white]
        named = {entry: [node for node in nodes if node.is_named_by(entry[0])] for entry in entries if entry[0] != LOSS}
        settings: dict[Node, str | None] = {}
        for node in nodes:
            own = [entry for entry, its_nodes in named.items() if node in its_nodes]
            best = [each for each in own if _specificity(each[0], node) == max(_specificity(e[0], node) for e in own)]
            if len({setting for _, setting in best}) > 1:
                both = " and ".join(f"{text} ({setting})" for text, setting in best)
                raise ConfigError(f"{both} both name {node.path}; list {node.path} itself in one of the two lists")
            otherwise = BLACK if node.path in heads else settings.get(node.parent)
            settings[node] = best[0][1] if best else otherwise
        for (text, setting), its_nodes in named.items():
            if not its_nodes:
                others = [each for each in OPERATORS if each != text]
                classes = frozenset().union(*(node.names for node in nodes))
                known = [*others, LOSS, *sorted(classes), *(node.path for node in nodes if node.path)]
                raise ConfigError(
                    f"{setting}: {text} names no module (such as blocks.0.attn or blocks.0.*) and no class (such as "
                    f"LayerNorm) of this model, and no operator that it computes ({', '.join(others)})"
                    f"{did_you_mean(text.strip('*.'), known)}"
                )
        return settings

    def subclass(
        self, cls: type, dtype: torch.dtype | None, weights: tuple[str, ...], attention: torch.dtype | None
    ) -> type:
        """Return a subclass of `cls` that computes in the given types.

        `dtype`: the type of the inputs and of the parameters named in `weights` (None: unchanged); `attention`: the
        type of attention's operations. In half precision, autocast is on inside a module with submodules, because these
        may mix types. In a module without submodules, autocast is off and the weights are in half precision, because
        autocast would compute a norm or softmax in float32.
        """
        device_type = self.device_type

        def forward(self, *args, **kwargs):
            contexts = [contextlib.nullcontext(), contextlib.nullcontext()]
            if dtype is not None:
                args = [_cast(each, dtype) for each in args]
                kwargs = {name: _cast(each, dtype) for name, each in kwargs.items()}
                autocasts = dtype is not torch.float32 and _has_children(self)
                contexts[0] = torch.autocast(device_type, dtype=dtype if autocasts else None, enabled=autocasts)
            if attention is not None:
                contexts[1] = AttentionIn(attention, device_type)
            with contexts[0], contexts[1]:
                return super(overridden, self).forward(*args, **kwargs)

        def in_half(name: str) -> property:
            # forward reads this property as self.weight. The parameter itself is still trained and saved. fsdp2 reads
            # it too, while it is sharded (a DTensor, which has full_tensor), and must get it unchanged.
            def read(self) -> torch.Tensor:
                own = own_parameter(self, name)
                return own if hasattr(own, "full_tensor") else _cast(own, dtype)

            return property(read)

        members = {"forward": forward, **{name: in_half(name) for name in weights}}
        overridden = type(f"{cls.__name__}Overridden", (cls,), members)
        return overridden


def _nodes(model: nn.Module) -> Iterator[Node]:
    """Yield the nodes of a model, parents before the modules inside them."""
    nodes: dict[str, Node] = {}
    for path, module in model.named_modules():
        parent = nodes[path.rpartition(".")[0]] if path else None
        names = frozenset(cls.__name__ for cls in type(module).__mro__) - {"Module", "object"}
        nodes[path] = node = Node(path, parent, names, module)
        yield node
        if _is_attention(module):
            yield Node(path, node, frozenset({"attention's operations"}))


def _is_attention(module: nn.Module) -> bool:
    """Return whether this module itself, and no submodule, computes attention's matrix products."""

    def looks_like_it(module: nn.Module) -> bool:
        name = type(module).__name__
        return hasattr(module, "fused_attn") or (_has_children(module) and ("Attention" in name or "Attn" in name))

    return looks_like_it(module) and not any(looks_like_it(each) for each in module.modules() if each is not module)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _specificity(text: str, node: Node) -> tuple[bool, ...]:
    """Return a sort key for entries: operators are the least specific, followed by classes, patterns and paths."""
    # In attention, softmax outranks matmul_v2, because people list softmax to change the type of attention's products.
    return text not in OPERATORS, text == "softmax", text not in node.names, not set("*?[") & set(text)


def _weights_to_cast(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights to cast in a module that computes in half precision without autocast.

    BatchNorm's weights are not cast: with float32 statistics it accepts half inputs only if its weights are float32.
    """
    alone = not _has_children(module) and not has_running_statistics(module)
    return tuple(name for name, _ in module.named_parameters(recurse=False)) if alone else ()


def _cast(value, dtype: torch.dtype):
    """Cast floating-point tensors, also in lists and tuples. Leave float64 unchanged, as autocast does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    if type(value) in (list, tuple):
        return type(value)([_cast(each, dtype) for each in value])
    return value


class AttentionIn(TorchFunctionMode):
    """Runs attention's operations (matmul, softmax, fused attention) in one type, with autocast off.

    torch.compile can trace this class.
    """

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
