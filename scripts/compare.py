"""Compares runs: which settings differ, whether one is better by more than noise, and their curves over each other.

    python scripts/compare.py output/train-20260102-03-04-05 output/train-20260102-06-07-08
    python scripts/compare.py output                                     # all runs in a folder
    python scripts/compare.py 'output/lr-*' -output lr.md curves.png
    python scripts/compare.py output -metric macro_f1

Runs that differ only in their seed (or fold) are one group, with mean, standard deviation and number. Every group is compared
with the first: the difference and its standard error, paired by seed where the seeds are the same. Repeat runs with
-seed 1, -seed 2 ... to learn how much is noise; of single runs no program can tell.

The comparison is printed as Markdown. -output writes it to files: .md and .png (the curves). Runs on different data are compared by
top-1 on the validation images that all of them scored, and refused if there are none; -any_data compares their own figures, under
a warning. -json prints the verdict on the second against the first for a script; the exit code is then 0 for better, 4 for
worse, 5 where they cannot be told apart.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code

# isort: split
import numpy as np

from engine.evaluation.scores import TITLES
from scripts.command_line import RUN_HELP, Parser, check_writable
from scripts.comparing.groups import Group, group_runs
from scripts.comparing.runs import check_data, differing, find_runs, image_test
from scripts.comparing.statistics import BETTER, EQUAL, WORSE, difference, verdict
from scripts.comparing.tables import to_markdown
from utils.errors import ConfigError, cause_of
from utils.files import replacing, write_text
from utils.text import first_of

ENDINGS = (".md", ".png")
STYLES = ("-", "--", ":", "-.")  # each for matplotlib's ten colours
FEWEST_EPOCHS = (
    8  # of curves that are shown from their first quarter on, where a rise from nothing hides how the ends differ
)
LONGEST_NAME = 44
EXIT_CODES = {BETTER: 0, WORSE: 4, EQUAL: 5}  # with -json


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="run", help=f"{RUN_HELP}; a folder of runs; or a pattern")
    parser.add_argument(
        "-output", "-o", nargs="+", action="extend", default=[], type=Path, metavar="FILE", help="write .md, .png"
    )
    metric_help = f"compare by {', '.join(TITLES)} [as the runs did]"
    parser.add_argument("-metric", choices=TITLES, metavar="NAME", help=metric_help)
    parser.add_argument("-any_data", action="store_true", help="compare runs on different data, under a warning")
    json_help = "print what the second run (or pattern) is against the first as JSON, and end with its exit code"
    parser.add_argument("-json", action="store_true", help=json_help)
    arguments = parser.parse_args(argv)
    for path in arguments.output:
        if path.suffix.lower() not in ENDINGS:
            raise ConfigError(f"-output: {path} must end in {', '.join(ENDINGS)}, the formats that are written")
        check_writable("-output", path)
    if arguments.json:
        return print_verdict(arguments)
    runs, left_out = find_runs(arguments.runs)
    warning, common = check_data(runs, arguments.any_data)
    groups = group_runs(runs, arguments.metric, common)
    print(to_markdown(groups, warning, left_out), end="")
    pictures = [path for path in arguments.output if path.suffix.lower() == ".png"]
    for path in arguments.output:
        try:
            if path in pictures:
                write_curves(path, groups)
            else:  # it shows the pictures beside it
                beside = [each.name for each in pictures if each.parent == path.parent]
                write_text(path, to_markdown(groups, warning, left_out, beside))
        except OSError as error:
            raise ConfigError(f"-output: {path} cannot be written ({cause_of(error)}); choose another place") from None
        print(f"written: {path}", file=sys.stderr)
    return 0


def print_verdict(arguments: argparse.Namespace) -> int:
    """Print how the second of two runs, or groups over seeds, compares with the first. Returns the exit code."""
    if len(arguments.runs) != 2 or arguments.output:
        raise ConfigError("-json: give two runs, or for several seeds of each two patterns in quotes, and no -output")
    sides = [find_runs([each], fewest=1)[0] for each in arguments.runs]
    warning, common = check_data([*sides[0], *sides[1]], arguments.any_data)
    for runs, source in zip(sides, arguments.runs, strict=True):
        if len(group_runs(runs, arguments.metric, common)) > 1:
            raise ConfigError(
                f"-json: the runs of {source} differ in {first_of(differing(runs))}; give repetitions of one"
            )
    metric = group_runs([*sides[0], *sides[1]], arguments.metric, common)[0].metric
    one, two = (Group(number, {}, runs, metric, common) for number, runs in enumerate(sides, start=1))
    if not (one.best and two.best):
        raise ConfigError(f"-json: {arguments.runs[not one.best]} was never evaluated")
    found, is_loss = difference(two.best, one.best), metric == "loss"
    test = image_test(one.runs[0], two.runs[0]) if metric == "top1" else None
    word, facts = verdict(found.value, found.is_noise, is_loss), {"difference": found.value, "interval": None}
    if found.half_width is not None:
        facts["interval"] = [found.value - found.half_width, found.value + found.half_width]
        facts["test"] = "paired t, over seeds" if found.is_paired else "Welch's t, over seeds"
    elif test:
        word = verdict(test.value, test.p >= 0.05, is_loss)
        facts = {
            "difference": test.value,
            "interval": test.interval,
            "test": "McNemar's, exact, over images",
            "p": test.p,
        }
    if test:
        facts |= {"images": test.num_images, "first_alone": test.only_first, "second_alone": test.only_second}
    deviations = [float(np.std([*each.best.values()], ddof=1)) if len(each.best) > 1 else None for each in (one, two)]
    facts |= {"seeds": [len(one.best), len(two.best)], "deviation_of_seeds": deviations, "note": warning or None}
    print(json.dumps({"verdict": word, "metric": metric} | facts, indent=1, ensure_ascii=False))
    return EXIT_CODES[word]


def write_curves(path: Path, groups: Sequence[Group]) -> None:
    """Draw a PNG with a panel for the metric that is compared, and one for the loss: each run thin, the mean of a group thick."""
    from matplotlib.figure import Figure  # which needs no screen, other than pyplot

    metric = "top1" if groups[0].metric == "loss" else groups[0].metric
    figure = Figure(figsize=(12.4, 3.8 + 0.19 * -(-len(groups) // 3)), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, title in zip(panels, (metric, "loss"), (f"{TITLES[metric]}, %", "loss"), strict=True):
        _draw(axes, groups, f"eval_{column}")
        axes.set(xlabel="epoch", ylabel=f"validation {title}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    with replacing(path) as file:
        figure.savefig(file, dpi=130, format="png")


def _draw(axes, groups: Sequence[Group], column: str) -> None:
    shown = []
    for index, group in enumerate(groups):
        look = {"color": f"C{index % 10}", "linestyle": STYLES[index // 10 % len(STYLES)]}
        curves = [group.curve(run, column) for run in group.runs]
        for curve in curves if len(curves) > 1 else ():
            axes.plot(*zip(*curve, strict=True), **look, linewidth=0.7, alpha=0.45)
        points = tuple(zip(*group.mean_curve(column), strict=True)) or ([], [])  # so that each group is in the legend
        mark, name = "o" if len(points[0]) == 1 else "", group.name[:LONGEST_NAME].replace("$", r"\$")  # no formula
        axes.plot(*points, **look, linewidth=1.8, marker=mark, label=name)
        shown += [point for curve in curves for point in curve]
    last = max((epoch for epoch, _ in shown), default=0)
    if last >= FEWEST_EPOCHS:
        values = [value for epoch, value in shown if epoch > last / 4]
        margin = 0.05 * (max(values) - min(values)) or 1e-3
        axes.set_ylim(min(values) - margin, max(values) + margin)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
