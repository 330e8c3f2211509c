"""Finds wrong labels with the predictions of finished runs, corrects the labels that you confirm, and undoes corrections.

    python scripts/sweep.py -cfg configs/finetune.yaml -data_path photos -folds 5 -output sweeps/folds
    python scripts/labels.py sweeps/folds
    python scripts/labels.py sweeps/folds -apply sweeps/folds/labels/labels.csv
    python scripts/labels.py sweeps/folds -undo

In a sweep with -folds, every image has a prediction by a model that was not trained on it. With a single run, only
the held-out images are judged. labels.csv lists images whose label the model doubts, equal or nearly equal images
with different labels, and copies of training images among the validation images; labels.png shows them. Write yes into
the column `confirmed`, and change the suggestion if another class is right. -apply moves these images to the folder of
their class, or changes their label in the CSV file of the data set. It never deletes or overwrites an image. -undo takes
all corrections back.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from engine.record.saved_run import SavedRun
from scripts.command_line import RUN_HELP, Parser
from scripts.sweeping.plan import FILE, read_sweep
from scripts.sweeping.results import DONE, ranked_points, read_result
from utils.errors import ConfigError
from utils.runs import folder_of


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from extras.labels.command import Source, apply, find, undo

    source = replace(find_source(arguments.source, Source), data_path=arguments.data_path)
    if arguments.undo:
        undo(source, arguments.data_path)
    elif arguments.apply:
        apply(source, arguments.data_path, arguments.apply, arguments.yes)
    else:
        find(source, arguments.data_path, arguments.output, not arguments.no_copies)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="run", help=f"{RUN_HELP}; or the folder of a sweep with -folds")
    add(
        "-output", type=Path, metavar="FOLDER", help="folder for labels.csv and labels.png [labels in the run's folder]"
    )
    add("-no_copies", action="store_true", help="do not look for copies (the search reads every image)")
    add("-apply", type=Path, metavar="FILE", help="correct the confirmed labels of this labels.csv")
    add("-undo", action="store_true", help="take back all corrections of the data set")
    add("-yes", action="store_true", help="apply without asking")
    add("-data_path", type=Path, metavar="PATH", help="where the data are now, if they were moved after the run")
    arguments = parser.parse_args(argv)
    if arguments.apply and arguments.undo:
        raise ConfigError("-apply and -undo are both given; leave one of them out")
    for flag, value in (("-output", arguments.output), ("-no_copies", arguments.no_copies)):
        if value and (arguments.apply or arguments.undo):
            raise ConfigError(f"{flag} has no effect with -apply or -undo; leave it out")
    if arguments.yes and not arguments.apply:
        raise ConfigError("-yes has no effect without -apply; leave it out")
    return arguments


def find_source(given: str, source: type):
    """Return the runs to read: the finished runs of the best point of a sweep, or a single run."""
    folder = folder_of(given)
    if not (folder / FILE).exists():
        return source(
            folder,
            [SavedRun.open(folder)],
            0,
            f"python main_single_gpu.py -cfg {shlex.quote(str(folder / 'config.yaml'))}",
        )
    sweep = read_sweep(folder)
    if not sweep.folds:
        raise ConfigError(
            f"{folder}: this sweep was started without -folds, so its runs do not judge every image; give one of its "
            "runs, or a sweep with -folds"
        )
    results = [read_result(folder / trial.name) for trial in sweep.trials]
    point = next((number for number, _ in ranked_points(sweep, results)), 0)
    trials = [trial for trial in sweep.trials if trial.point == point]
    done = [trial for trial in trials if results[trial.index].state == DONE]
    if not done:
        raise ConfigError(
            f"{folder}: no trial of this sweep is done; continue it: python scripts/sweep.py -output {shlex.quote(str(folder))}"
        )
    runs = [SavedRun.open(folder / trial.name) for trial in done]
    return source(folder, runs, len(trials) - len(done), sweep.command_of_point(sweep.points[point]), sweep.folds)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
