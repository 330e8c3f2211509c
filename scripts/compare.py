"""Compares runs: which settings differ, and whether one is better by more than noise.

    halfstep compare output/train-20260102-03-04-05 output/train-20260102-06-07-08
    halfstep compare output                                     # all runs in a folder
    halfstep compare 'output/lr-*' > lr.md
    halfstep compare output -metric macro_f1

Runs that differ only in their seed or fold form a group. The table shows each group's mean, standard deviation and
number of runs, and the difference of its mean from the first group's, with the standard error (paired by seed if the
seeds are the same). Repeat runs with -seed 1, -seed 2 ... to measure how much of a difference is noise: single runs
can only show which weights are better, not which settings. In a folder of runs, the oldest run comes first.

The comparison is printed as Markdown. Runs on different data are compared by top-1 on the validation images that all of
them scored. If there are no such images, the runs of a folder or a pattern get a table for each data set, and runs that
are given one by one are refused. -any_data compares the figures of all runs as they are, with a warning. -json prints
JSON for scripts, which says whether the second run is better than the first, and whether this verdict is about its
settings or only about its weights. With -json, the exit code is 0 for better, 4 for worse, 5 for inconclusive. If two patterns have runs on several data sets, `data_sets` lists a verdict for each of them.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from configs.tables import METRICS
from engine.evaluation.groups import GroupTest
from engine.record.saved_run import SavedRun
from scripts.command_line import RUN_HELP, Parser
from scripts.comparing.runs import (
    DataSet,
    Group,
    by_data,
    check_data,
    differing,
    find_runs,
    group_runs,
    image_test,
    task_of,
)
from scripts.comparing.statistics import BETTER, EQUAL, ONE_RUN, WORSE, difference, verdict
from scripts.comparing.tables import to_markdown
from utils.errors import ConfigError
from utils.text import first_of

SAME_SETTINGS = (
    "Both sides have the same settings, so the verdict is about their weights and says nothing about settings"
)
EXIT_CODES = {BETTER: 0, WORSE: 4, EQUAL: 5}  # exit codes of -json


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "compare")
    parser.add_argument("runs", nargs="+", metavar="run", help=f"{RUN_HELP}; a folder of runs; or a pattern")
    metric_help = f"compare by {', '.join(METRICS)} [the metric of the runs]"
    parser.add_argument("-metric", choices=[*METRICS], metavar="NAME", help=metric_help)
    parser.add_argument("-any_data", action="store_true", help="compare runs on different data, with a warning")
    json_help = "compare the second run (or pattern) with the first, print JSON, and exit with the verdict's code"
    parser.add_argument("-json", action="store_true", help=json_help)
    arguments = parser.parse_args(argv)
    if arguments.json:
        return print_verdict(arguments)
    runs, left_out = find_runs(arguments.runs)
    if len(runs) == len(arguments.runs):  # the user wants to compare exactly these
        data_sets = [DataSet(runs, *check_data(runs, arguments.any_data))]
    else:
        data_sets = by_data(runs, arguments.any_data)
    compared = [each for each in data_sets if len(each.runs) > 1]
    alone = [each for each in data_sets if len(each.runs) == 1]
    left_out += [f"left out: {each.runs[0].folder}: no other run has its data ({each.name})" for each in alone]
    pages = []
    for each in compared:
        groups = group_runs(each.runs, arguments.metric, each.common)
        is_last, data = each is compared[-1], each.name if len(data_sets) > 1 else ""
        pages.append(to_markdown(groups, each.warning, left_out if is_last else [], data))
    print("\n".join(pages), end="")
    return 0


def print_verdict(arguments: argparse.Namespace) -> int:
    """Print whether the second run (or group of seeds) is better than the first. Return the exit code.

    With several data sets, print a verdict for each of them, and their common verdict or `inconclusive`.
    """
    if len(arguments.runs) != 2:
        raise ConfigError("-json: give two runs, or two patterns in quotes for several seeds of each")
    sides = [find_runs([each], fewest=1)[0] for each in arguments.runs]
    found = []
    for each in by_data([*sides[0], *sides[1]], arguments.any_data):
        of_data = [[run for run in side if run in each.runs] for side in sides]
        if not all(of_data):  # raises the error that says how the data differ
            check_data([*sides[0], *sides[1]], arguments.any_data)
        found.append({"data": each.name} | verdict_on(each, of_data, arguments))
    if len(found) == 1:
        del found[0]["data"]
        facts = found[0]
    else:
        words = {each["verdict"] for each in found}
        facts = {"verdict": words.pop() if len(words) == 1 else EQUAL, "data_sets": found}
    print(json.dumps(facts, indent=1, ensure_ascii=False))
    return EXIT_CODES[facts["verdict"]]


def verdict_on(data_set: DataSet, sides: Sequence[list[SavedRun]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return whether the runs of the second side are better, and how this was measured. `sides`: runs on one data set."""
    warning, common = data_set.warning, data_set.common
    for runs, source in zip(sides, arguments.runs, strict=True):
        if len(group_runs(runs, arguments.metric, common)) > 1:
            raise ConfigError(
                f"-json: the runs of {source} differ in {first_of([*differing(runs)])}; give repetitions of one run"
            )
    metric = group_runs([*sides[0], *sides[1]], arguments.metric, common)[0].metric
    one, two = (Group(number, {}, runs, metric, common) for number, runs in enumerate(sides, start=1))
    if not (one.best and two.best):
        raise ConfigError(f"-json: {arguments.runs[bool(one.best)]} was never evaluated; give another run")
    found, smaller = difference(two.best, one.best), METRICS[metric].smaller_is_better
    test = image_test(one.runs[0], two.runs[0]) if metric == task_of(one.runs[0]).metric_of_images else None
    word, facts = verdict(found.value, found.is_noise, smaller), {"difference": found.value, "interval": None}
    if found.half_width is not None:
        facts["interval"] = [found.value - found.half_width, found.value + found.half_width]
        facts["test"] = "paired t, over seeds" if found.is_paired else "Welch's t, over seeds"
    elif test:
        word = verdict(test.value, test.p >= 0.05, smaller)
        name = "McNemar's, exact, over images" if metric == "top1" else "paired, with random signs, over images"
        name = "paired, with signs, over groups" if isinstance(test, GroupTest) else name
        facts = {"difference": test.value, "interval": test.interval, "test": name, "p": test.p}
    if test:
        facts |= {"images": test.num_images}
        if isinstance(test, GroupTest):
            facts["groups"] = test.num_groups
        if metric == "top1":
            facts |= {"first_alone": test.only_first, "second_alone": test.only_second}
    deviations = [statistics.stdev(each.best.values()) if len(each.best) > 1 else None for each in (one, two)]
    facts |= {"seeds": [len(one.best), len(two.best)], "deviation_of_seeds": deviations}
    limit = SAME_SETTINGS if not differing([*sides[0], *sides[1]]) else ONE_RUN if found.half_width is None else ""
    facts["note"] = "; ".join(each for each in (warning, limit) if each) or None
    about = "weights" if limit else "settings"
    return {"verdict": word, "about": about, "metric": metric} | facts


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
