"""Compares runs: which settings differ, whether one is better by more than noise, and their curves over each other.

    python scripts/compare.py output/train-20260102-03-04-05 output/train-20260102-06-07-08
    python scripts/compare.py output                                     # all runs in a folder
    python scripts/compare.py 'output/lr-*' -output lr.md curves.png
    python scripts/compare.py output -metric macro_f1

Runs that differ only in their seed (or fold) are one group, with mean, standard deviation and number. Every group is compared
with the first: the difference and its standard error, paired by seed where the seeds are the same. Repeat runs with
-seed 1, -seed 2 ... to learn how much is noise; of single runs no program can tell.

The comparison is printed as Markdown. -output writes it to files: .md and .png (the curves). Runs on different data, classes or
validation images are refused; -any_data compares them all the same, under a warning.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from engine.evaluation.scores import TITLES
from scripts.command_line import Parser, check_writable
from scripts.comparing.curves import write_curves
from scripts.comparing.groups import group_runs
from scripts.comparing.runs import find_runs, refuse_other_data
from scripts.comparing.tables import to_markdown
from utils.errors import ConfigError, cause_of
from utils.files import write_text
from utils.program import exit_code

ENDINGS = (".md", ".png")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="run", help="the folder of a run, a folder of runs, or a pattern")
    parser.add_argument(
        "-output", "-o", nargs="+", action="extend", default=[], type=Path, metavar="FILE", help="write .md, .png"
    )
    metric_help = f"compare by {', '.join(TITLES)} [as the runs did]"
    parser.add_argument("-metric", choices=TITLES, metavar="NAME", help=metric_help)
    parser.add_argument("-any_data", action="store_true", help="compare runs on different data, under a warning")
    arguments = parser.parse_args(argv)
    for path in arguments.output:
        if path.suffix.lower() not in ENDINGS:
            raise ConfigError(f"-output: {path} must end in {', '.join(ENDINGS)}, the formats that are written")
        check_writable("-output", path)
    runs, left_out = find_runs(arguments.runs)
    warning = refuse_other_data(runs, arguments.any_data)
    groups = group_runs(runs, arguments.metric)
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


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
