"""Reports the data type in which each module computes, as observed in one forward pass."""

import contextlib
import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.train.trainer import Trainer
from extras.doctor.trace import ModuleStack
from models.parts import unchanged_buffers
from utils.files import write_text
from utils.log import Log
from utils.seed import unchanged_random_state
from utils.text import align, counted, csv_text
from utils.torch_internals import TorchDispatchMode, inner_data, tree_leaves

# These operations move or convert numbers and do not compute new ones.
MOVES = frozenset(
    "_to_copy view _unsafe_view t transpose permute expand reshape select slice unbind split split_with_sizes chunk "
    "unsqueeze squeeze clone detach alias copy_ cat stack empty empty_like new_empty zeros zeros_like ones ones_like "
    "fill_ bernoulli_ random_ as_strided roll lift_fresh".split()
)
COLUMNS = ("module", "class", "computes_in", "takes", "returns", "weights", "operations")


@dataclass
class ModuleTypes:
    """The data types of one module, not counting its submodules."""

    path: str
    kind: str
    weights: set[torch.dtype]
    computes: set[torch.dtype] = field(default_factory=set)
    takes: set[torch.dtype] = field(default_factory=set)
    returns: set[torch.dtype] = field(default_factory=set)
    operations: dict[str, None] = field(default_factory=dict)

    def row(self) -> tuple[str, ...]:
        types = (self.computes, self.takes, self.returns, self.weights)
        return (self.path or "(model)", self.kind, *map(_names, types), " ".join(self.operations))


class TypeRecorder(TorchDispatchMode):
    """Records the input types of kernels. It works below autocast, so it sees the types after autocast's casts."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.modules = ModuleStack(model)
        self.seen: dict[str, ModuleTypes] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = _float_types((args, kwargs))
        if name not in MOVES and given and _float_types(output):
            path, module = self.modules.stack[-1]
            own = {parameter.dtype for parameter in module.parameters(recurse=False)}
            seen = self.seen.setdefault(path, ModuleTypes(path, type(module).__name__, own))
            widest = given[0]
            for other in given[1:]:  # a sum of a float32 and a half tensor is computed in float32
                widest = torch.promote_types(widest, other)
            seen.computes.add(widest)
            seen.operations[name.removeprefix("_").removeprefix("native_")] = None
        return output

    def note_module(self, path: str, inputs, output) -> None:
        if path in self.seen:
            self.seen[path].takes.update(_float_types(inputs))
            self.seen[path].returns.update(_float_types(output))


@torch.no_grad()
def record_types(model: nn.Module, images: Tensor, autocast: torch.autocast) -> list[ModuleTypes]:
    """Run one forward in training mode. Return the modules' types. Restore random state and BatchNorm statistics."""
    found = TypeRecorder(model)
    with (
        unchanged_random_state(next(model.parameters()).device),
        unchanged_buffers(model),
        found.modules.following(found.note_module),
        autocast,
        found,
    ):
        output = model.forward(images)  # not model(images): that would call the compiled model
    found.note_module("", images, output)
    return list(found.seen.values())


def explain(trainer: Trainer, log: Log, folder: Path) -> None:
    """Print the modules' data types as a table, one row per group of similar modules. Write all to precision.csv."""
    windows = trainer.data.windows(trainer.step, trainer.step + 1)
    with contextlib.closing(windows):
        batch = next(iter(next(windows).batches))
    images, _ = trainer.to_device(batch)
    precision = trainer.precision
    model = copy.deepcopy(precision.computing(trainer.model)).train()
    trainer.transforms.bypassing_modules().revert(model)
    rows = [seen.row() for seen in record_types(model, images, precision.autocast())]
    log.say(f"the types in which each module computes (one pass of {counted(len(batch.targets), 'image')}):")
    for line in align([COLUMNS, *collapse(rows)]):
        log.say(f"  {line}")
    trainer.process.first(lambda: write_text(folder / "precision.csv", csv_text([COLUMNS, *rows])))


def collapse(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge rows that differ only in one number of the module's name, for example into blocks.0-11.attn.qkv."""
    for position in range(max((row[0].count(".") for row in rows), default=0), -1, -1):
        groups: dict[tuple, list[int]] = {}
        for path, *cells in rows:
            parts = path.split(".")
            number = parts[position] if len(parts) > position and parts[position].isdigit() else None
            if number is not None:
                parts[position] = "*"
            groups.setdefault((number is None, *parts, "", *cells), []).append(int(number or 0))
        rows = []
        for (is_single, *rest), numbers in groups.items():
            end = rest.index("")
            parts, cells = rest[:end], rest[end + 1 :]
            if not is_single:
                parts[position] = _ranges(numbers)
            rows.append((".".join(parts), *cells))
    return rows


def _ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: 0-2,4 for 0, 1, 2, 4."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _float_types(tree) -> list[torch.dtype]:
    floats = [each for each in tree_leaves(tree) if isinstance(each, Tensor) and each.is_floating_point()]
    return [inner_data(each).dtype for each in floats]


def _names(types: set[torch.dtype]) -> str:
    return " ".join(sorted(str(kind).removeprefix("torch.") for kind in types))
