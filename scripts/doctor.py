"""Finds the first module that overflows in half precision on one batch of a run, and writes settings that prevent it.

    halfstep doctor output/train-20260102-03-04-05

Replays the batch on which the run stopped (overflow-batch.pth in its folder, with its weights), or otherwise the run's
next batch. Given a checkpoint instead of the folder, it uses the weights of that checkpoint. Prints a table of all
modules, names the first one that overflows, and writes doctor.yaml to the run's folder: settings for -cfg that prevent
the overflow. The exit code is 0 whatever is found, and 2 for a mistake on the command line.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import RUN_HELP, Parser


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "doctor")
    parser.add_argument("source", metavar="run", help=RUN_HELP)
    parser.add_argument("-cfg", metavar="FILE", help="settings file to use instead of the run's settings")
    parser.add_argument("-batch", metavar="FILE", type=Path, help="the batch to replay, a file like overflow-batch.pth")
    half_help = "the half-precision type to examine, instead of the run's"
    parser.add_argument("-amp_dtype", choices=("float16", "bfloat16"), help=half_help)
    arguments = parser.parse_args(argv)

    from engine.doctor.overflow import replay_run

    replay_run(arguments.source, arguments.batch, arguments.cfg, arguments.amp_dtype)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
