"""Finds the first module at which half precision breaks on one batch, and settings that prevent it."""

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from configs.schema import Precision as Settings
from datasets import Batch, Mixed
from engine.first_passes import unchanged_buffers
from engine.precision import Precision
from models.trace import Location, Trace
from models.transforms import ModelTransforms
from models.transforms.operator_lists import OpOverrides
from utils.seed import seed_update
from utils.text import align

HEADROOM = 2  # factor by which the largest gradient stays below the maximum of the half type
MAX_SCALE = 2.0**24  # a larger scale has no benefit
# A gradient above this multiple of the median is an outlier. No scale fits both it and the others, so its module is
# black-listed.
OUTLIER = 1024
MAX_REPLAYS = 40


@dataclass
class Case:
    """One update of a run, ready to be replayed."""

    model: nn.Module
    precision: Precision
    transforms: ModelTransforms  # already applied to the model
    loss: Callable[[Tensor, Tensor | Mixed], Tensor]
    prepare: Callable[[Batch], tuple[Tensor, Tensor | Mixed]]
    batches: list[tuple[Batch, float]]  # each with its weight in the update's loss
    scale: float
    seed: tuple[int, int, int] = (0, 0, 0)  # the run's seed, step, rank


@dataclass(frozen=True)
class ReportRow:
    """A row of the report, for one module or one operation of an attention module."""

    place: Location
    types: str
    activation: float  # largest absolute value, in the float32 replay
    gradient: float  # largest absolute gradient, times the loss scale
    underflow: float | None  # fraction in [0, 1] of gradients that are zero only in half precision


@dataclass(frozen=True)
class Vanishing:
    """A parameter, buffer or number that becomes zero in the half type."""

    name: str
    value: float
    share: float  # fraction of its elements that become zero
    in_half: bool  # whether its module computes in the half type


@dataclass
class Diagnosis:
    """The first module that breaks, and the settings that keep the update finite."""

    half: torch.dtype
    scale: float
    first_non_finite: Location | None = None  # the first place with a non-finite output or gradient
    is_forward: bool = True
    breaks_in_float32: bool = False
    rows: list[ReportRow] = field(default_factory=list)
    vanishing: list[Vanishing] = field(default_factory=list)
    black_list: list[str] = field(default_factory=list)
    best_scale: float = 1.0
    is_fixed: bool = True  # whether a replay with black list and scale is finite

    def prescription(self, present: Settings) -> dict[str, str]:
        """Return {key under PRECISION: value}: settings that keep the update finite. `present`: the run's settings."""
        if self.breaks_in_float32:
            return {}
        changed = {}
        if present.MODE == "naive":
            changed["MODE"] = "autocast"
        if self.black_list:
            entries = dict.fromkeys((*present.CUSTOM_BLACK_LIST, *self.black_list))
            changed["CUSTOM_BLACK_LIST"] = f"[{', '.join(entries)}]"
        if present.CUSTOM_WHITE_LIST:
            changed["CUSTOM_WHITE_LIST"] = "[]"
        if self.first_non_finite and self.half is torch.float16:
            scale = min(self.best_scale, present.MAX_LOSS_SCALING or math.inf)
            changed["INIT_LOSS_SCALING"] = f"{scale:.1f}"
            if scale < present.MIN_LOSS_SCALING:
                changed["MIN_LOSS_SCALING"] = f"{scale:.1f}"
        return changed

    def finding(self) -> str:
        """Return one sentence that says where and how the update breaks."""
        name, limit = str(self.half).removeprefix("torch."), torch.finfo(self.half).max
        if self.first_non_finite is None:
            scale = f"at loss scale {self.scale:g}"
            return f"nothing breaks: in {name} all activations and gradients of this batch are finite, {scale}"
        row = next((row for row in self.rows if row.place == self.first_non_finite), None)
        if self.breaks_in_float32:
            kind = "output" if self.is_forward else "gradient"
            return (
                f"{self.first_non_finite}: the first {kind} that is not finite, even in float32, so precision is not "
                "the cause. Look at the weights and the images; lower TRAIN.BASE_LR"
            )
        if self.is_forward:
            size = f", which reaches {row.activation:.4g} in float32 ({name} limit: {limit:.5g})" if row else ""
            return f"{self.first_non_finite}: the first output that is not finite{size}"
        size = f" (up to {row.gradient:.4g} in the float32 replay; {name} limit: {limit:.5g})" if row else ""
        at = f"at loss scale {self.scale:g}{size}; forward is finite"
        return f"{self.first_non_finite}: the first gradient that is not finite, {at}"

    def lines(self) -> list[str]:
        """Return the report for the console."""
        limit = torch.finfo(self.half).max
        table = [("module", "returns", "max |activation|", f"of {limit:.5g}", "max |gradient| scaled", "underflow", "")]
        for row in self.rows:
            reached = f"{row.activation / limit:.1%}" if limit < 1e6 else ""
            underflow = "" if row.underflow is None else f"{row.underflow:.1%}"
            figures = f"{row.activation:.4g}", reached, f"{row.gradient:.4g}", underflow
            mark = "<- first" if row.place == self.first_non_finite else ""
            table.append((str(row.place), row.types, *figures, mark))
        lines = [*align(table), ""]
        for value in self.vanishing:
            where = "half precision" if value.in_half else "float32, so it does no harm"
            share = f" ({value.share:.0%} of its elements)" if value.share < 1 else ""
            lines.append(
                f"vanishes: {value.name} = {value.value:.3g} is 0 in {self.half}{share}; its module computes in {where}"
            )
        lines.append(f"first: {self.finding()}")
        if self.first_non_finite and not self.breaks_in_float32:
            other = "-amp_dtype bfloat16" if self.half is torch.float16 else "a lower TRAIN.BASE_LR"
            broken = f"not fixed: with the settings below this batch still breaks; try {other}"
            fixed = "fixed: with the settings below a replay of this batch is finite"
            lines.append(fixed if self.is_fixed else broken)
        return lines


def diagnose(case: Case) -> Diagnosis:
    """Replay the update in float32 and in half precision.

    If only the half-precision replay is not finite, look for settings that make it finite.
    """
    half = case.precision.half or torch.float32
    diagnosis = Diagnosis(half, case.scale)
    exact = replay(case, in_half=False, scale=1.0)
    trace = as_run = replay(case, in_half=True, scale=case.scale, reference=exact)
    diagnosis.first_non_finite = trace.first_non_finite
    diagnosis.is_forward = trace.first_forward is not None
    diagnosis.breaks_in_float32 = bool(diagnosis.first_non_finite and exact.first_non_finite)
    diagnosis.best_scale = best_scale(exact, trace, half) if not diagnosis.breaks_in_float32 else case.scale
    if diagnosis.first_non_finite and not diagnosis.breaks_in_float32:
        trace = _find_fix(case, diagnosis, exact, trace)
    gradients = exact.largest_gradients()
    for place, activation in exact.activations.items():
        types = " ".join(sorted(str(kind).removeprefix("torch.") for kind in as_run.types[place]))
        num_nonzero = trace.num_nonzero_in_reference[place]
        underflow = trace.num_underflowed[place] / num_nonzero if num_nonzero else None
        diagnosis.rows.append(ReportRow(place, types, activation, case.scale * gradients[place], underflow))
    diagnosis.vanishing = vanishing(case.model, half, as_run)
    return diagnosis


def _find_fix(case: Case, diagnosis: Diagnosis, exact: Trace, trace: Trace) -> Trace:
    """Extend the black list or lower the scale until a replay is finite. Return the last replay's trace."""
    scale, names = case.scale, []
    for _ in range(MAX_REPLAYS):
        first = trace.first_non_finite
        if first is None:
            break
        diagnosis.best_scale = best_scale(exact, trace, diagnosis.half)
        path = first.path
        # If the module is already black-listed, its output is too large for half precision, so black-list its parent.
        while is_inside(path, names):
            path = path.rpartition(".")[0]
        largest = exact.largest_gradients()
        is_outlier = largest[first] > OUTLIER * statistics.median(largest.values())
        stands_out = trace.first_forward is not None or is_outlier
        if not stands_out and diagnosis.best_scale < scale:
            scale = diagnosis.best_scale
        elif path and path == first.path or "." in path:  # never list all blocks or the whole model
            names = [name for name in names if not is_inside(name, [path])] + [path]
        else:
            break
        trace = replay(case, in_half=True, scale=scale, reference=exact, floats=names)
    diagnosis.black_list = merged(case.model, names)
    # Replay once more with exactly the recommended settings.
    diagnosis.best_scale = best_scale(exact, trace, diagnosis.half)
    last = replay(case, in_half=True, scale=diagnosis.best_scale, floats=diagnosis.black_list, reference=exact)
    diagnosis.is_fixed = last.first_non_finite is None
    return last


def replay(case: Case, in_half: bool, scale: float, reference: Trace | None = None, floats: list[str] = ()) -> Trace:
    """Run and trace the update's forward and backward, with the run's dropout. The weights do not change.

    `floats`: paths of modules that compute in float32.
    """
    model = case.model
    case.transforms.that_bypass_modules().revert(model)
    trace = Trace(model, reference)
    model.train()
    seed_update(*case.seed, case.precision.device)
    overrides = OpOverrides(tuple(floats), (), case.precision.device.type, case.precision.half)
    overrides.apply(model)
    with unchanged_buffers(model):
        for batch, weight in case.batches:
            images, targets = case.prepare(batch)  # one after the other, as in training, so that the device holds one
            with case.precision.autocast() if in_half else contextlib.nullcontext(), trace.record_forward():
                logits = model(images)
            if trace.first_forward is None:  # after an overflow in the forward, gradients are useless
                (case.loss(logits, targets) * (weight * scale)).backward()
    overrides.revert(model)
    model.zero_grad(set_to_none=True)
    return trace


def best_scale(exact: Trace, trace: Trace, half: torch.dtype) -> float:
    """Return the largest power of two that keeps all gradients in the half type below its maximum, with headroom."""
    if half is not torch.float16:
        return 1.0
    known = trace.in_half & exact.gradients.keys()
    largest = max((exact.gradients[key][1] for key in known), default=0.0)
    room = torch.finfo(half).max / HEADROOM
    if not largest or not math.isfinite(largest):
        return MAX_SCALE if not largest else 1.0
    return min(max(2.0 ** math.floor(math.log2(room / largest)), 1.0), MAX_SCALE)


def vanishing(model: nn.Module, half: torch.dtype, trace: Trace) -> list[Vanishing]:
    """Return the parameters, buffers and numbers such as `eps` that become zero in the half type.

    A tensor is listed if at least half of its elements become zero. A few of millions of trained weights always do.
    """
    vanished = []
    halves = {place.path for place, kinds in trace.types.items() if half in kinds}
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        own += [(name, torch.tensor(value)) for name, value in vars(module).items() if type(value) is float]
        for name, value in own:
            if not value.is_floating_point() or not value.numel():
                continue
            value = value.detach().float()
            share = float(((value != 0) & (value.to(half) == 0)).float().mean())
            if share >= 0.5:
                full = f"{path}.{name}" if path else name
                vanished.append(Vanishing(full, float(value.abs().max()), share, path in halves))
    return vanished


def is_inside(path: str, names: list[str]) -> bool:
    """Return whether the module at `path` is one of the modules `names`, or inside one of them."""
    return any(path == name or path.startswith(name + ".") for name in names)


def merged(model: nn.Module, names: list[str]) -> list[str]:
    """Replace modules by their parent if no other child has weights: mlp.fc1 and mlp.fc2 become mlp."""
    names = list(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        inside = [name for name in names if name.rpartition(".")[0] == parent]
        children = model.get_submodule(parent).named_children() if parent else ()
        weighty = {f"{parent}.{name}" for name, child in children if any(True for _ in child.parameters())}
        if parent and len(inside) > 1 and weighty <= set(inside):
            names = [parent if name == inside[0] else name for name in names if name not in inside[1:]]
    return names
