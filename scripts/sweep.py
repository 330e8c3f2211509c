"""Trains many runs: a grid over settings, seeds and folds, or settings that optuna proposes; all other flags are the runs'.

    python scripts/sweep.py -cfg configs/vit_digits.yaml -amp -epochs 10 -over TRAIN.BASE_LR=1e-3,3e-3 MODEL.DEPTH=4,6 -seeds 0,1,2 -output sweeps/lr
    python scripts/sweep.py -cfg configs/vit_digits.yaml -amp -folds 5 -output sweeps/folds
    python scripts/sweep.py -cfg configs/vit_digits.yaml -amp -over TRAIN.BASE_LR=1e-4..1e-2:log MODEL.DEPTH=4..8 -optuna 20 -output sweeps/search
    python scripts/sweep.py -output sweeps/lr               goes on with a sweep that was stopped or killed
    python scripts/sweep.py -output sweeps/lr -table        prints where it is, and starts nothing

Each trial is a run in a folder of its own below that of the sweep, which also holds trials.csv, the table of the results
(summary.md) and the command line of each trial (commands.sh). What is finished is not repeated, and a trial that was cut
goes on from its last checkpoint. A sweep ends with exit code 0 if every trial is done, 3 if gradients of some were not
finite, 2 if a setting is wrong, otherwise 1.
"""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from scripts.command_line import Parser, at_least
from scripts.sweeping.plan import Plan, continued, lock, read_plan
from scripts.sweeping.progress import Progress
from scripts.sweeping.proposals import check_installed, proposed_trials
from scripts.sweeping.results import read_result, summary, table, write_trials
from scripts.sweeping.runner import Runner
from scripts.sweeping.slots import choose_slots
from scripts.sweeping.slurm import run_trial, submit, write_script
from scripts.sweeping.values import read_over
from utils.errors import ConfigError, cause_of
from utils.files import write_text
from utils.program import exit_code

OURS = "-h --help -output -over -seeds -folds -optuna -jobs -table -slurm -submit -run_trial".split()


def main(argv: list[str]) -> int:
    arguments, flags = parse(argv)
    if arguments.run_trial:
        folder, index = arguments.run_trial
        if not index.isdecimal():
            raise ConfigError(f"-run_trial: {index!r} is not the number of a trial")
        return run_trial(Path(folder), int(index))
    if arguments.output is None:
        raise ConfigError("-output is missing: the folder of the sweep; -h shows the flags")
    plan = _plan(arguments, flags)
    if arguments.table:
        print(_report(plan))
        return 0
    if arguments.optuna or plan.optuna:
        check_installed()
    jobs = arguments.jobs or 1
    slots, line = choose_slots(plan.load_point({}).config, jobs, os.environ)
    with lock(plan.path):
        plan.save()
        if not (arguments.slurm or arguments.submit):
            if line:
                print(line)
            return _run(plan, slots)
        script = write_script(plan, arguments.jobs)
        print(
            f"{script}: {plan.num_trials} tasks; afterwards: python scripts/sweep.py -output {shlex.quote(str(plan.folder))} -table"
        )
        return submit(script) if arguments.submit else 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own flags, and those of the runs."""
    ours, theirs = [], []
    target = theirs
    for word in argv:
        if word.startswith("-") and not re.match(r"-\.?[0-9]", word):
            name = word.partition("=")[0]
            target = ours if name in OURS else theirs
        target.append(word)
    return _parser().parse_args(ours), theirs


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("-output", type=Path, metavar="FOLDER", help="folder of the sweep; every trial has its own below it")
    add("-over", nargs="+", default=[], metavar="KEY=VALUES", help="settings to vary: KEY=A,B; for -optuna also KEY=LOW..HIGH, with :log or :STEP")  # fmt: skip
    add(
        "-seeds",
        type=_seeds,
        default=[],
        metavar="N,N",
        help="seeds of the runs; each point is trained with each of them",
    )
    add(
        "-folds",
        type=at_least(2),
        metavar="K",
        help="cross-validation: each point is trained on each of K folds (DATA.FOLD)",
    )
    add(
        "-optuna",
        type=at_least(1),
        metavar="N",
        help="N points that optuna proposes by the results so far, in place of a grid",
    )
    add(
        "-jobs",
        type=at_least(1),
        metavar="N",
        help="trials at a time, each with a device or share of the cores of its own (1)",
    )
    add("-table", action="store_true", help="print the table of the trials so far and start nothing")
    add("-slurm", action="store_true", help="write a Slurm script, slurm.sh in the folder, in place of running")
    add("-submit", action="store_true", help="as -slurm, and send it with sbatch")
    add("-run_trial", nargs=2, metavar=("FOLDER", "INDEX"), help="run one trial, as a task of the Slurm script does")
    return parser


def _seeds(text: str) -> list[int]:
    seeds = [at_least(0)(each.strip()) for each in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


def _plan(arguments: argparse.Namespace, flags: list[str]) -> Plan:
    """The plan that the folder holds, or the one that is asked for; both if they are the same."""
    then = read_plan(arguments.output)
    is_asked = bool(flags or arguments.over or arguments.seeds or arguments.folds or arguments.optuna)
    if then and not is_asked:
        return then
    if not is_asked:
        raise ConfigError(
            f"-output: {arguments.output} holds no sweep to go on with; for a new one give -over KEY=VALUE,VALUE, -seeds or -folds"
        )
    options = {"seeds": arguments.seeds, "folds": arguments.folds, "optuna": arguments.optuna}
    now = Plan.new(arguments.output, flags, read_over(arguments.over), **options)
    return continued(then, now) if then else now


def _run(plan: Plan, slots: list[dict[str, str]]) -> int:
    results = [read_result(plan.folder_of(trial)) for trial in plan.trials]
    show = Progress(plan, results)
    runner = Runner(plan, slots, show)
    try:
        code = runner.run(proposed_trials(runner) if plan.optuna else iter(plan.trials))
    finally:
        show.close()
    print(_report(runner.plan))
    folder = shlex.quote(str(plan.folder))
    if code >= 128:
        print(f"stopped; python scripts/sweep.py -output {folder} goes on")
    elif len(plan.trials) > 1:
        print(f"python scripts/compare.py {folder} shows their curves, and which differences are noise")
    return code


def _report(plan: Plan) -> str:
    """The table so far, which summary.md gets too."""
    results = [read_result(plan.folder_of(trial)) for trial in plan.trials]
    write_trials(plan, results, print)
    text = f"{summary(results)}\n\n{table(plan, results)}"
    try:
        write_text(plan.path / "summary.md", f"{text}\n")
    except OSError as error:
        print(f"warning: cannot write {plan.folder / 'summary.md'} ({cause_of(error)})")
    return text


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
