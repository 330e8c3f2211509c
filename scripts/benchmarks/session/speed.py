"""How fast the step is: precisions, compiled or not, model sizes, and timm's own step."""

import importlib.util
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.benchmarks.parts.common import GIB, MODES, ROOT, Refused, StepWorker, spread
from scripts.benchmarks.parts.peaks import nominal_peak
from scripts.benchmarks.parts.turns import Measured, Turns, take_turns
from scripts.benchmarks.session.plan import Context

NO_DROPOUT = ("MODEL.DROPOUT=0", "MODEL.ATTENTION_DROPOUT=0", "MODEL.DROPPATH=0")
TOGETHER = 4  # processes that compile at once: each takes cores and, while it computes, memory of the GPU
TINY = ("DATA.IMAGE_SIZE=32", "MODEL.EMBED_DIM=48", "MODEL.DEPTH=2", "MODEL.NUM_HEADS=2", "DEVICE=cpu")
TINY_OF_TIMM = ("MODEL.NAME=test_vit", "DATA.IMAGE_SIZE=160")


@dataclass(frozen=True)
class Case:
    """One row of a table: what a StepWorker measures."""

    name: str
    model: str  # of the recipe
    batch: int
    mode: str = "bf16"
    compiled: str = ""  # COMPILE_SCOPE, if it is
    options: tuple[str, ...] = NO_DROPOUT
    role: str = "step"

    @property
    def title(self) -> str:
        return f"{self.name}, batch {self.batch}"

    def worker(self, context: Context) -> StepWorker:
        batch = context.pick(self.batch, 8)
        words = [*self.options, *MODES[self.mode].options, f"DATA.SYNTHETIC_SIZE={20 * batch}"]
        words += ["COMPILE=true", f"COMPILE_SCOPE={self.compiled}"] if self.compiled else []
        flags = ["-cfg", ROOT / f"configs/{self.model}.yaml", "-dataset", "synthetic", "-batch_size", batch]
        tiny = [*TINY, *(TINY_OF_TIMM if self.role == "timm" else ())]
        return StepWorker([*flags, "-opts", *words, *context.pick((), tiny)], role=self.role)


def measure_small(context: Context) -> None:
    small = "vit_small_patch16_224"
    modes = ("bf16", "fp32", "tf32", "fp16", "bf16-residual", "naive-bf16")
    measure(context, [Case(f"S {mode}", small, 256, mode) for mode in modes])
    pairs = [(mode, batch) for batch in (256, 512) for mode in ("bf16", "bf16-residual")]
    measure(context, [Case(f"S {mode} compiled", small, batch, mode, "model") for mode, batch in pairs])
    measure(context, [Case("S bf16 compiled, the recipe with dropout", small, 256, "bf16", "model", ())])


def measure_large(context: Context) -> None:
    base, large = "vit_base_patch16_224", "vit_large_patch16_224"
    ours = Case("B bf16", base, 256), Case("B bf16-residual compiled", base, 256, "bf16-residual", "model")
    timm = Case("B timm", base, 256, role="timm"), Case("B timm compiled", base, 256, compiled="model", role="timm")
    measure(context, [*ours, *timm])
    blocks = Case("L bf16-residual, compiled blocks", large, 128, "bf16-residual", "blocks")
    measure(context, [Case("L bf16", large, 128), blocks])


def measure_float8(context: Context) -> None:
    base = "vit_base_patch16_224"
    cases = [Case(f"B {mode} compiled", base, 256, mode, "model") for mode in ("bf16", "float8")]
    if importlib.util.find_spec("torchao"):
        measure(context, cases)
    else:
        for case in cases:
            context.journal.row(**figures(case.title, None, None, "needs torchao"))


def measure(context: Context, cases: list[Case]) -> None:
    """A row for each case. They compile together; then they take turns."""
    known = {case.title: case for case in cases}
    reasons = leave_out(known) if context.dry else {}
    workers = {name: case.worker(context) for name, case in known.items() if name not in reasons}
    reasons |= start(workers)
    turns = Turns(context.pick(3, 1), 3, context.pick(1.0, 0.0))
    measured, more = take_turns(workers, turns, {name: "bfloat16" for name in list(workers)[:1]})
    base = next(iter(measured.values()), None)
    for name in known:
        context.journal.row(**figures(name, measured.get(name), base, (reasons | more).get(name)))


def leave_out(cases: dict[str, Case]) -> dict[str, str]:
    """Why a dry run measures one case of ours and timm's: compiling takes a CPU a minute each, and float16 as long."""
    reasons = {}
    for number, (name, case) in enumerate(cases.items()):
        if case.compiled or case.mode == "fp16" or "cpu" not in MODES[case.mode].kinds:
            reasons[name] = "needs CUDA"
        elif case.role == "step" and (number or case.batch < 256):
            reasons[name] = "not in a dry run"
    return reasons


def start(workers: dict[str, StepWorker]) -> dict[str, str]:
    """The first updates of all. Why some could not; they are taken out."""

    def warm_up(name: str) -> str:
        try:
            workers[name].iterate(1)
        except Refused as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(TOGETHER) as pool:
        reasons = {name: reason for name, reason in zip(workers, pool.map(warm_up, workers), strict=True) if reason}
    for name in reasons:
        workers.pop(name).close()
    return reasons


def figures(name: str, each: Measured | None, base: Measured | None, reason: str | None) -> dict:
    """The values of a row. Of the nominal and of the measured product in bfloat16, whatever the case computes in."""
    row = dict.fromkeys(("images/s", "TFLOP/s", "% of nominal", "% of measured product", "GiB"))
    if each is None:
        return {"case": name, **row, "note": reason}
    row["images/s"], row["GiB"] = spread(each.images_per_second), each.memory / GIB
    if base.peak:
        flops = 3 * base.forward_flops * statistics.median(each.images_per_second)
        nominal = nominal_peak(each.hello["device"], "bfloat16")
        row["TFLOP/s"], row["% of measured product"] = flops / 1e12, 100 * flops / base.peak
        row["% of nominal"] = 100 * flops / nominal if nominal else None
    return {"case": name, **row, "note": f"product {base.peak / 1e12:.4g} TFLOP/s" if each is base else ""}
