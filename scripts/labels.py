"""Finds wrong labels with the predictions of finished runs, and lists the images with the labels that you confirm.

    python scripts/sweep.py -cfg configs/finetune.yaml -data_path photos -folds 5 -output sweeps/folds
    python scripts/labels.py sweeps/folds
    python scripts/labels.py sweeps/folds -apply sweeps/folds/labels/labels.csv

In a sweep with -folds, every image has a prediction by a model that was not trained on it. With a single run, only
the held-out images are judged. labels.csv lists images whose label the model doubts, equal or nearly equal images
with different labels, and copies of training images among the validation images; labels.png shows them. Write yes into
the column `confirmed`, and change the suggestion if another class is right. -apply writes train.csv and val.csv, which
list all images with the corrected labels, and prints the command that trains from them. It changes no file of the data.
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
from scripts.sweeping import DONE, FILE, ranked_points, read_result, read_sweep
from utils.errors import ConfigError
from utils.runs import folder_of


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    from extras.labels.command import Source, apply, find

    source = replace(find_source(arguments.source, Source), data_path=arguments.data_path)
    if arguments.apply:
        apply(source, arguments.data_path, arguments.apply, arguments.output)
    else:
        find(source, arguments.data_path, arguments.output, not arguments.no_copies)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="run", help=f"{RUN_HELP}; or the folder of a sweep with -folds")
    add(
        "-output",
        type=Path,
        metavar="FOLDER",
        help="folder for labels.csv and labels.png [labels in the run's folder]; with -apply, for the lists [corrected "
        "in the folder of FILE]",
    )
    add("-no_copies", action="store_true", help="do not look for copies (the search reads every image)")
    add("-apply", type=Path, metavar="FILE", help="write lists with the confirmed labels of this labels.csv")
    add("-data_path", type=Path, metavar="PATH", help="where the data are now, if they were moved after the run")
    arguments = parser.parse_args(argv)
    if arguments.no_copies and arguments.apply:
        raise ConfigError("-no_copies has no effect with -apply; leave it out")
    return arguments


def find_source(given: str, source: type):
    """Return the runs to read: the finished runs of the best point of a sweep, or a single run."""
    folder = folder_of(given)
    if not (folder / FILE).exists():
        return source(folder, [SavedRun.open(folder)], 0)
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
    return source(folder, runs, len(trials) - len(done), sweep.folds)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
