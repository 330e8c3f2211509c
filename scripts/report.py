"""Writes report.html for a run: its result, curves, mistakes, times and settings on one page.

    halfstep report output/train-20260102-03-04-05
    halfstep report output/train-20260102-03-04-05 -output digits.html

With REPORT=true, a run writes this page into its folder when it ends. This script writes the page again, even if the
run was killed or is still running. The page is one file without scripts and loads nothing from elsewhere.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from engine.record.saved_run import SavedRun
from scripts.command_line import RUN_HELP, Parser
from utils.errors import ConfigError, cause_of
from utils.files import refuse_other_kind


def main(argv: list[str]) -> int:
    from engine.report.report import PAGE, REPORT, write_report

    parser = Parser(__doc__, "report")
    parser.add_argument("run", type=Path, help=RUN_HELP)
    parser.add_argument("-output", type=Path, metavar="FILE", help=f"the file to write [{REPORT} in the run's folder]")
    arguments = parser.parse_args(argv)
    run = SavedRun.open(arguments.run)
    path = arguments.output or run.folder / REPORT
    if path.is_dir():
        raise ConfigError(f"-output: {path} is a folder; name a file in it, such as {path / REPORT}")
    refuse_other_kind("-output", path, PAGE)
    try:
        write_report(run, path)
    except OSError as error:
        raise ConfigError(f"-output: cannot write {path} ({cause_of(error)}); choose another file") from error
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
