"""A table of steps that took turns: their speed, their memory, and how much of the device's peak they use."""

import statistics

from scripts.benchmarks.parts.common import GIB, Panel, Table, spread
from scripts.benchmarks.parts.peaks import nominal_peak
from scripts.benchmarks.parts.turns import Measured


def speed_table(title: str, kinds: dict[str, str], measured: dict[str, Measured], reasons: dict[str, str]) -> Table:
    """`kinds`: of the matrix products that bound each case, the first being what the others are held against;
    `reasons`: why others were not measured."""
    base = next(iter(kinds), "-")
    columns = ["mode", "memory, GiB", "iterations/s", "images/s", f"against {base}", f"memory against {base}"]
    columns += ["FLOPs utilisation, %", "of the nominal peak, %"]
    flops = max((3 * each.forward_flops for each in measured.values()), default=0)  # of a training image
    peaks = {kinds[case]: each.peak for case, each in measured.items() if each.peak}
    rows = []
    for case, each in measured.items():
        rates, memory = each.images_per_second, each.memory / GIB
        row = [case, f"{memory:.2f}", f"{1 / statistics.median(each.seconds):.4g}", spread(rates)]
        row.append(spread(each.ratios, 2) if each.ratios else "-")
        row.append(f"{each.memory / measured[base].memory:.2f}" if base in measured else "-")
        for peak in (peaks.get(kinds[case]), nominal_peak(each.hello["device"], kinds[case])):
            row.append(f"{100 * flops * statistics.median(rates) / peak:.3g}" if peak else "-")
        rows.append(row)
    rows += [[case, reason, *["-"] * (len(columns) - 2)] for case, reason in reasons.items()]
    products = ", ".join(f"{kind} {peak / 1e9:.4g}" for kind, peak in peaks.items())
    note = f"Utilisation: {flops / 1e9:.4g} GFLOP for a training image (3 x forward) against matmul peaks, GFLOP/s: "
    bars = {case: statistics.median(each.images_per_second) for case, each in measured.items()}
    memories = {case: each.memory / GIB for case, each in measured.items()}
    panels = [Panel("images/s", bars), Panel("memory, GiB", memories)]
    return Table(title, columns, rows, [f"{note}{products}."] if peaks else [], panels)
