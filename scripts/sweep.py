"""Trains many runs: a grid over settings, seeds and folds. All other flags are passed to the runs.

    halfstep sweep -cfg vit_digits -amp -over TRAIN.BASE_LR=1e-3,3e-3 MODEL.DEPTH=4,6 -seeds 0,1,2 -output sweeps/lr
    halfstep sweep -cfg vit_digits -amp -folds 5 -output sweeps/folds
    halfstep sweep -output sweeps/lr               continues a sweep that was stopped or killed
    halfstep sweep -output sweeps/lr -table        prints the table so far, and starts nothing

Each trial is a run in its own folder below the sweep's folder, which also has trials.csv. Finished trials are not
repeated, and an interrupted trial continues from its last checkpoint. A sweep ends with exit code 0 if every trial is
done, 3 if the gradients of some trials were not finite, 2 if a setting is wrong, otherwise 1. -trial K runs only trial
K, so that each task of a Slurm array can run one trial.
"""

import argparse
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import Parser, at_least
from scripts.sweeping import (
    DONE,
    LOCK,
    Runner,
    Sweep,
    make_folder,
    read_over,
    read_result,
    read_sweep,
    table,
    write_trials,
)
from utils.commands import command
from utils.errors import ConfigError
from utils.files import FolderLock, locked

OURS = "-h --help -output -o -out -over -seeds -folds -table -trial".split()
# Variables of an srun task. A run that starts its own processes (-ngpus) would read its rank from them.
SLURM_RANKS = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")


def main(argv: list[str]) -> int:
    arguments, flags = parse(argv)
    if arguments.output is None:
        raise ConfigError("-output is missing; give the folder of the sweep; -h shows the flags")
    folder = arguments.output.absolute()
    sweep = find_sweep(arguments, flags, folder)
    if arguments.table:
        print(report(sweep, folder))
        return 0
    if arguments.trial is not None:
        return run_trial(sweep, folder, arguments.trial)
    make_folder(folder)
    with locked(folder / LOCK) as lock:
        if lock is None:
            raise ConfigError(f"-output: another sweep is running in {folder}; wait for it or stop it")
        sweep.save(folder)
        code = Runner(sweep, folder, FolderLock(folder, LOCK, "-output")).run()
        print(report(sweep, folder))
    if code >= 128:
        print(f"stopped; {command('sweep', '-output', arguments.output)} continues the sweep")
    else:
        print(f"{command('compare', arguments.output)} shows which differences are noise")
        if sweep.folds:
            print(f"{command('labels', arguments.output)} lists images whose label is probably wrong")
    return code


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the sweep's own flags, and the flags of the runs."""
    ours, theirs = [], []
    target = theirs
    for word in argv:
        if word.startswith("-") and not re.match(r"-\.?[0-9]", word):
            target = ours if word.partition("=")[0] in OURS else theirs
        target.append(word)
    parser = Parser(__doc__, "sweep")
    add = parser.add_argument
    add(
        "-output",
        "-o",
        "-out",
        type=Path,
        metavar="FOLDER",
        help="folder of the sweep; every trial has its own folder in it",
    )
    add("-over", nargs="+", action="extend", default=[], metavar="KEY=VALUES", help="settings to vary: KEY=A,B")
    seeds_help = "seeds of the runs; each combination of the -over settings is trained once with each seed"
    add("-seeds", type=seeds, default=[], metavar="N,N", help=seeds_help)
    folds_help = "cross-validation: each combination is trained on each of K folds"
    add("-folds", type=at_least(2), metavar="K", help=folds_help)
    add("-table", action="store_true", help="print the table of the trials so far and start nothing")
    add("-trial", type=at_least(0), metavar="K", help="run only the trial with this number")
    return parser.parse_args(ours), theirs


def seeds(text: str) -> list[int]:
    """Parse the value of -seeds: seeds separated by commas."""
    values = [at_least(0)(each.strip()) for each in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice; name each seed once")
    return values


def find_sweep(arguments: argparse.Namespace, flags: list[str], folder: Path) -> Sweep:
    """Return the sweep saved in the folder, or a new one from the flags. Sweep.or_saved compares them if both exist."""
    former = read_sweep(folder)
    if not (flags or arguments.over or arguments.seeds or arguments.folds):
        if former:
            return former
        raise ConfigError(
            f"-output: {arguments.output} has no sweep to continue; to start one, give -over KEY=VALUE,VALUE, -seeds "
            "or -folds"
        )
    sweep = Sweep.new(flags, read_over(arguments.over), seeds=arguments.seeds, folds=arguments.folds)
    return sweep.or_saved(former, folder) if former else sweep


def run_trial(sweep: Sweep, folder: Path, index: int) -> int:
    """Replace this process with the run of a trial, so that signals reach it. Return 0 if the trial is done already."""
    if index >= len(sweep.trials):
        raise ConfigError(f"-trial: {index} is out of range; {folder} has trials 0 to {len(sweep.trials) - 1}")
    make_folder(folder)
    sweep.save(folder)  # each task of an array writes the same sweep
    trial = sweep.trials[index]
    if read_result(folder / trial.name).state == DONE:
        print(f"{trial} is done already")
        return 0
    sys.stdout.flush()
    os.chdir(sweep.cwd)
    environment = {name: value for name, value in os.environ.items() if name not in SLURM_RANKS}
    os.execve(sys.executable, [sys.executable, *sweep.command(trial, folder)], environment)


def report(sweep: Sweep, folder: Path) -> str:
    """Return the table so far, and rewrite trials.csv. Both include trials that array tasks have run."""
    results = [read_result(folder / trial.name) for trial in sweep.trials]
    write_trials(sweep, folder, results)
    return table(sweep, results)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
