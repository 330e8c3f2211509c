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
settings or only about its weights. With -json, the exit code is 0 for better, 4 for worse, 5 for inconclusive. If two
patterns have runs on several data sets, `data_sets` lists a verdict for each of them.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from configs.tables import METRICS
from scripts.command_line import RUN_HELP, Parser
from utils.errors import ConfigError

EXIT_CODES = {"better": 0, "worse": 4, "inconclusive": 5}  # exit codes of -json


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "compare")
    parser.add_argument("runs", nargs="+", metavar="run", help=f"{RUN_HELP}; a folder of runs; or a pattern")
    metric_help = f"compare by {', '.join(METRICS)} [the metric of the runs]"
    parser.add_argument("-metric", choices=[*METRICS], metavar="NAME", help=metric_help)
    parser.add_argument("-any_data", action="store_true", help="compare runs on different data, with a warning")
    json_help = "compare the second run (or pattern) with the first, print JSON, and exit with the verdict's code"
    parser.add_argument("-json", action="store_true", help=json_help)
    arguments = parser.parse_args(argv)
    if not arguments.json:
        from engine.compare.tables import compare  # local: importing torch takes seconds

        print(compare(arguments.runs, arguments.metric, arguments.any_data), end="")
        return 0
    if len(arguments.runs) != 2:
        raise ConfigError("-json: give two runs, or two patterns in quotes for several seeds of each")
    from engine.compare.verdicts import verdict_of

    facts = verdict_of(arguments.runs, arguments.metric, arguments.any_data)
    print(json.dumps(facts, indent=1, ensure_ascii=False))
    return EXIT_CODES[facts["verdict"]]


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
