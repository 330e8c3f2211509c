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
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import StopSignal, die_with_parent, exit_code  # isort: skip
from configs.flags import parse as parse_flags
from configs.load import LoadedConfig
from configs.tables import METRICS
from configs.translate.paddlevit import our_name
from configs.values import SETTINGS, convert
from engine.compare.statistics import spread
from engine.evaluation.scores import column_title, format_value
from engine.record.saved_files import read_table, read_text
from engine.record.saved_run import read_status
from engine.settings import chooses, load_settings
from scripts.command_line import Parser, at_least
from utils.commands import command
from utils.errors import ConfigError, ExitCode, cause_of, naming_output
from utils.files import FolderLock, creating, locked, write_text
from utils.runs import is_locked
from utils.text import counted, csv_text, format_time, markdown_table, warning

ROOT = Path(__file__).resolve().parent.parent
FILE, LOCK, VERSION = "sweep.json", ".sweep.lock", 3
MOST_TRIALS = 100_000
# Matches one of several values; commas in brackets and quotes do not separate values.
SPLIT = re.compile(r"""(?:\[[^\]]*\]|\([^)]*\)|"[^"]*"|'[^']*'|[^,])+""")
# {setting that the sweep sets for each trial: flag of the sweep for it}
DECIDED = {"SEED": "-seeds", "DATA.FOLD": "-folds", "SAVE": "-output", "NAME": "-output"}
OWN = "-h --help -output -o -out -over -seeds -folds -table -trial".split()
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
    own, of_runs = [], []
    target = of_runs
    for word in argv:
        if word.startswith("-") and not re.match(r"-\.?[0-9]", word):
            target = own if word.partition("=")[0] in OWN else of_runs
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
    return parser.parse_args(own), of_runs


def seeds(text: str) -> list[int]:
    """Parse the value of -seeds: seeds separated by commas."""
    values = [at_least(0)(each.strip()) for each in text.split(",")]
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice; name each seed once")
    return values


def find_sweep(arguments: argparse.Namespace, flags: list[str], folder: Path) -> "Sweep":
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


def run_trial(sweep: "Sweep", folder: Path, index: int) -> int:
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


def report(sweep: "Sweep", folder: Path) -> str:
    """Return the table so far, and rewrite trials.csv. Both include trials that array tasks have run."""
    results = [read_result(folder / trial.name) for trial in sweep.trials]
    write_trials(sweep, folder, results)
    return table(sweep, results)


# --- the plan of a sweep, in sweep.json ---


def read_over(words: Sequence[str]) -> dict[str, str]:
    """Return {setting: the text of its values} for KEY=VALUES words."""
    over: dict[str, str] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text.strip() or key in over:
            raise ConfigError(
                f"-over: {word!r} must be KEY=VALUE,VALUE as in TRAIN.BASE_LR=1e-3,3e-3; give each key only once"
            )
        if key in DECIDED:
            raise ConfigError(f"-over: {key} is set by {DECIDED[key]}; leave it out here")
        over[key] = text
    return over


def choices_of(key: str, text: str) -> list[str]:
    """Split the text of a setting's values into one text per value. Raise ConfigError if a value is wrong."""
    setting = SETTINGS.get(key)  # None: a constructor argument, or a wrong name, which load_settings reports
    values = [value.strip() for value in SPLIT.findall(text)]
    if len(values) != len(SPLIT.sub("x", text).split(",")) or "" in values:
        raise ConfigError(f"-over: {key}={text} has an empty value; write none to leave the setting unset")
    if setting and setting.is_list and any(value[0] not in "[(" and value.lower() != "none" for value in values):
        raise ConfigError(f"-over: {key} is a list; write each of its values in brackets, as in {key}=[a,b],[c,d]")
    values = [value[1:-1] if value[0] in "\"'" else value for value in values]
    for value in values if setting else ():
        convert(setting, value, "-over")
    return values


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `point`: the index of its settings; trials of other seeds and folds have the same."""

    index: int
    point: int
    settings: Mapping[str, str]
    seed: int | None = None
    fold: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the trial's folder."""
        return f"trial-{self.index:03d}"

    def __str__(self) -> str:
        facts = [each for each in (describe_point(self.settings),) if each]
        facts += [f"{name} {value}" for name, value in (("seed", self.seed), ("fold", self.fold)) if value is not None]
        return f"trial {self.index} ({', '.join(facts)})"


def describe_point(settings: Mapping[str, str]) -> str:
    """Return the settings of a trial as one line, without their sections: BASE_LR=0.001 DEPTH=4."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


@dataclass(frozen=True)
class Sweep:
    """The flags that all runs share, and the settings (`points`), seeds and folds that vary between the runs."""

    flags: list[str]  # flags of the runs, as typed
    over: dict[str, str]
    seeds: list[int]
    folds: int | None = None
    cwd: str = field(default_factory=os.getcwd)
    points: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, flags: list[str], over: dict[str, str], **options: Any) -> "Sweep":
        """Return a new sweep. Raise ConfigError if the settings of any point are wrong."""
        choices = [choices_of(key, text) for key, text in over.items()]
        points = [dict(zip(over, values, strict=True)) for values in itertools.product(*choices)]
        sweep = cls(flags, over, points=points, **options)
        sweep.check()
        sweep.load_point({})
        if sweep.num_trials > MOST_TRIALS:
            raise ConfigError(
                f"{sweep.num_trials:,} trials exceed the limit of {MOST_TRIALS:,}; give fewer values, seeds or folds"
            )
        for point in points:
            sweep.load_point(point)
        return sweep

    def check(self) -> None:
        if not (self.over or self.seeds or self.folds):
            raise ConfigError("nothing to sweep; give -over KEY=VALUE,VALUE, -seeds 0,1,2 or -folds 5")
        keys = {our_name(key) for layer in parse_flags(self.flags).layers for key in layer.texts}
        decided = dict.fromkeys(self.over, "-over") | DECIDED
        unused = {flag for flag, values in (("-seeds", self.seeds), ("-folds", self.folds)) if not values}
        for key, flag in decided.items():
            if key in keys and flag not in unused:
                raise ConfigError(
                    f"{key} is set for all trials, but {flag} sets it for each trial; leave one of the two out"
                )

    def load_point(self, point: Mapping[str, str]) -> LoadedConfig:
        """Return the settings of a trial of this point. Raise ConfigError if they are wrong."""
        seed, fold = self.seeds[0] if self.seeds else None, 0 if self.folds else None
        loaded = load_settings(self.words(Trial(0, 0, point, seed, fold)))
        config = loaded.config
        for flag, is_set in (("-eval", config.EVAL), ("-check", config.CHECK), ("-resume", config.MODEL.RESUME)):
            if is_set:
                raise ConfigError(f"{flag}: a sweep only trains, and resumes its own trials; leave {flag} out")
        if chooses(config.MODEL.PRETRAINED):
            raise ConfigError(
                "MODEL.PRETRAINED: the images would choose again for each trial; choose once with halfstep models, "
                "and name the weights"
            )
        return loaded

    @cached_property
    def trials(self) -> list[Trial]:
        """Return the trials in order: all seeds and folds of a point, then of the next point."""
        folds = range(self.folds) if self.folds else [None]
        products = itertools.product(enumerate(self.points), self.seeds or [None], folds)
        return [Trial(index, number, point, seed, fold) for index, ((number, point), seed, fold) in enumerate(products)]

    @property
    def num_trials(self) -> int:
        return len(self.points) * max(len(self.seeds), 1) * (self.folds or 1)

    def words(self, trial: Trial) -> list[str]:
        """Return the flags of a trial, without the flags for its folder."""
        options = [f"{key}={value}" for key, value in trial.settings.items()]
        options += [] if trial.fold is None else [f"DATA.FOLD={trial.fold}/{self.folds}"]
        seed = [] if trial.seed is None else ["-seed", str(trial.seed)]
        return [*self.flags, *seed, *(["-opts", *options] if options else [])]

    @cached_property
    def program(self) -> str:
        """Return the name of the program that runs the trials."""
        return "main_multi_gpu.py" if (self.load_point({}).config.NGPUS or 1) > 1 else "main_single_gpu.py"

    def command(self, trial: Trial, folder: Path) -> list[str]:
        """Return the command line that starts or resumes a trial, without the interpreter."""
        place = ["-output", str(folder), "-name", trial.name, "-resume", "auto"]
        return [str(ROOT / self.program), *self.words(trial), *place]

    def command_of_point(self, point: Mapping[str, str]) -> str:
        """Return the command that trains with these settings outside the sweep."""
        return command("train", *self.words(Trial(0, 0, point)))

    def save(self, folder: Path) -> None:
        with naming_output(folder):
            write_text(folder / FILE, json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    def or_saved(self, former: "Sweep", folder: Path) -> "Sweep":
        """Return `former`, the sweep saved in the folder. Raise ConfigError if it differs from this one.

        If no trial of the saved sweep has started, for example because a setting was wrong, return this sweep,
        which replaces the saved one.
        """
        if not any((folder / trial.name).exists() for trial in former.trials):
            return self
        names = ("flags", "over", "seeds", "folds", "cwd")
        changed = [name for name in names if getattr(former, name) != getattr(self, name)]
        if changed:
            lines = (f"  {name}: {getattr(former, name)} -> {getattr(self, name)}" for name in changed)
            raise ConfigError(f"-output: {folder} has another sweep; name another folder:\n" + "\n".join(lines))
        return former


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep if it does not exist. Raise ConfigError if it has other contents."""
    with naming_output(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists() and any(each.name[0] != "." for each in folder.iterdir()):
            raise ConfigError(f"-output: {folder} is not empty, but has no {FILE}; give a new folder")
        with open(folder / LOCK, "r+b", opener=creating):  # fails if the lock file is a link or a pipe
            pass


def read_sweep(folder: Path) -> Sweep | None:
    """Read the sweep in a folder. Return None if there is none."""
    if not (folder / FILE).exists():
        return None
    try:
        facts = json.loads(read_text(folder / FILE))
        if facts.pop("version") != VERSION:
            raise ValueError("another version of halfstep wrote it, and 2.3.0 is the last one that reads sweeps of 2.x")
        return Sweep(**facts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read {folder / FILE} ({error}); give -output another folder") from error


# --- results ---


ONE_TRIAL = (
    "A single trial says nothing about its settings, only about its weights; repeat the sweep with -seeds 0,1,2 and "
    "another -output to compare settings."
)
WAITING, RUNNING, DONE, STOPPED, FAILED = "waiting", "running", "done", "stopped", "failed"


@dataclass(frozen=True)
class Result:
    """The state and result of a trial. `metric` decides which epoch is best; `best` is its value in that epoch."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    metric: str | None = None
    best: float | None = None
    epoch: int | None = None  # number of the best epoch
    seconds: float | None = None

    @property
    def is_final(self) -> bool:
        """Return whether another start would change nothing: the trial is done, or would fail again in the same way."""
        return self.state == DONE or (self.state == FAILED and self.exit_code == ExitCode.NON_FINITE)


def read_result(folder: Path) -> Result:
    """Return the result in the folder of a run. A killed run counts as stopped, so it will be resumed."""
    try:
        status = read_status(folder)
    except ConfigError:
        status = {}
    if not status.get("state"):
        return Result(WAITING)
    metric, best = status.get("best_metric"), status.get("best", {})
    if metric not in METRICS or metric not in best:
        metric, best = None, {}  # no epoch has ended, or status.json was changed by hand
    code = status.get("exit_code")
    state = DONE
    if status["state"] != DONE:
        state = RUNNING if is_locked(folder) else FAILED
    if state == FAILED and (code in (None, 0) or status.get("signal")):
        state = STOPPED
    seconds = None
    with contextlib.suppress(ConfigError, ValueError, KeyError):
        rows = read_table(folder / "metrics.csv")
        seconds = sum(float(row["train_seconds"]) + float(row["eval_seconds"] or 0) for row in rows)
    return Result(state, str(status.get("reason") or ""), code, metric, best.get(metric), best.get("epoch"), seconds)


def write_trials(sweep: Sweep, folder: Path, results: Sequence[Result]) -> None:
    """Write trials.csv. If that fails, only print a warning, since no trial depends on the file."""
    rows = [["index", *sweep.over, "seed", "fold", "state", "metric", "best", "epoch", "seconds", "folder"]]
    for trial, result in zip(sweep.trials, results, strict=True):
        seconds = None if result.seconds is None else round(result.seconds, 1)
        facts = [trial.seed, trial.fold, result.state, result.metric, result.best, result.epoch, seconds]
        rows.append([trial.index, *trial.settings.values(), *facts, trial.name])
    try:
        write_text(folder / "trials.csv", csv_text(rows))
    except OSError as error:
        print(warning(f"cannot write {folder / 'trials.csv'} ({cause_of(error)}); the sweep continues"))


def table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per point, and the command of the best point.

    The best mean comes first; points with unfinished trials come last.
    """
    states = [each.state for each in results]
    numbers = {state: states.count(state) for state in (DONE, FAILED, STOPPED, RUNNING, WAITING)}
    summary = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    summary = f"{counted(len(states), 'trial')}: {summary}\n\n"
    ranked, per_point = ranked_points(sweep, results), len(results) // len(sweep.points)
    if not ranked:
        return f"{summary}no trial is done"
    metric = metric_of(results)
    digits = METRICS[metric].digits
    points = [
        [describe_point(sweep.points[number]) or "as given", spread(values, digits), f"{len(values)} of {per_point}"]
        for number, values in ranked
    ]
    rows = markdown_table(["settings", column_title(metric), "trials"], points)
    command = sweep.command_of_point(sweep.points[ranked[0][0]])
    limit = f" {ONE_TRIAL}" if len(ranked) > 1 and any(len(values) < 2 for _, values in ranked[:2]) else ""
    note = f"±: standard deviation over seeds and folds.{limit} Settings of the first row:"
    return f"{summary}{rows}\n\n{note}\n\n    {command}"


def metric_of(results: Sequence[Result]) -> str | None:
    return next((each.metric for each in results if each.metric), None)


def ranked_points(sweep: Sweep, results: Sequence[Result]) -> list[tuple[int, list[float]]]:
    """Return (point, best values of its finished trials), the best mean first.

    Points with unfinished trials come last.
    """
    metric, points, per_point = metric_of(results), [], len(results) // len(sweep.points)
    sign = 1 if metric and METRICS[metric].smaller_is_better else -1
    for number in range(len(sweep.points)):
        of_point = results[number * per_point : (number + 1) * per_point]
        values = [each.best for each in of_point if each.state == DONE and each.best is not None]
        if values:
            points.append((len(values) < len(of_point), sign * sum(values) / len(values), number, values))
    return [(number, values) for *_, number, values in sorted(points, key=lambda point: point[:3])]


# --- running the trials ---


SECONDS_BETWEEN_LOOKS = 0.1


def start(arguments: list[str], output: Path, cwd: str) -> subprocess.Popen:
    """Start a run that appends its output to a file."""
    with open(output, "ab", opener=creating) as file:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=cwd,
            process_group=0,  # so that Ctrl-C reaches only the sweep, which signals its trial once
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # the trial saves on SIGTERM
        )


class Runner:
    """Starts one trial after another, and records their results."""

    def __init__(self, sweep: Sweep, folder: Path, lock: FolderLock):
        self.sweep, self.folder, self.lock = sweep, folder, lock
        self.results = {trial.index: read_result(folder / trial.name) for trial in sweep.trials}
        self.stop = StopSignal()
        self.seconds = [each.seconds for each in self.results.values() if each.seconds]  # durations of ended trials

    @property
    def num_left(self) -> int:
        return self.sweep.num_trials - sum(each.is_final for each in self.results.values())

    def _time_left(self) -> str:
        """Return the estimated time left as text, or "" before the first trial is done."""
        if not (self.seconds and self.num_left):
            return ""
        return f", about {format_time(statistics.fmean(self.seconds) * self.num_left)} left"

    def run(self) -> int:
        """Run the trials that are not finished. Return the exit code.

        The code is 0 if every trial is done, 3 if the gradients of some trials were not finite and all others are
        done, and 1 otherwise. If a signal stopped the sweep, it is 128 plus the signal's number.
        """
        of, place = f"{self.num_left} of {counted(self.sweep.num_trials, 'trial')}", self.folder / "trial-000.txt"
        print(f"{of} to run, one after another{self._time_left()}; their output: {place} ...", flush=True)
        for trial in self.sweep.trials:
            while is_locked(self.folder / trial.name) and not self.stop.number:
                time.sleep(SECONDS_BETWEEN_LOOKS)  # a run that outlived an earlier sweep still writes there
            if self.stop.number:
                break
            self.lock.check()  # by now the folder may belong to another sweep
            if not self.results[trial.index].is_final:
                self._record_end(trial, self._run(trial))
        if self.stop.number:
            return 128 + self.stop.number
        codes = {0 if each.state == DONE else each.exit_code or 1 for each in self.results.values()}
        return max(codes) if codes <= {0, ExitCode.NON_FINITE} else 1

    def _run(self, trial: Trial) -> int:
        """Run the trial and return its exit code. After a signal to the sweep, make the trial save and end."""
        try:
            command = [sys.executable, *self.sweep.command(trial, self.folder)]
            program = start(command, self._output(trial), self.sweep.cwd)
        except OSError as error:
            raise ConfigError(
                f"-output: cannot start {trial} in {self.folder} ({cause_of(error)}); choose another folder"
            ) from error
        began, is_signalled = time.monotonic(), False
        while (code := program.poll()) is None:
            if self.stop.number and not is_signalled:
                program.terminate()
                is_signalled = True
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if code == 0:
            self.seconds.append(time.monotonic() - began)
        return code

    def _output(self, trial: Trial) -> Path:
        """Return the file with the output of the trial."""
        return self.folder / f"{trial.name}.txt"

    def _record_end(self, trial: Trial, code: int) -> None:
        """Write the result of a trial. Raise ConfigError if the other trials would fail in the same way."""
        self.lock.check()
        result, error = read_result(self.folder / trial.name), last_error(self._output(trial))
        is_refused = code == 2 and result.state == WAITING
        if result.state != DONE:
            was_stopped = code == 0 or (self.stop.number and code == 128 + signal.SIGTERM)
            why = f"killed by signal {-code}" if code < 0 else result.reason or error
            changes = {"state": STOPPED} if was_stopped else {"state": FAILED, "exit_code": code, "reason": why}
            result = replace(result, **changes)
        self.results[trial.index] = result
        write_trials(self.sweep, self.folder, [*self.results.values()])
        number = self.sweep.num_trials - self.num_left
        outcome = f"{result.state} {result.reason}".strip()
        if result.state == DONE and result.best is not None:
            outcome = (
                f"{METRICS[result.metric].title} {format_value(result.metric, result.best)} in epoch {result.epoch}"
            )
        print(f"[{number}/{self.sweep.num_trials}] {trial}: {outcome}{self._time_left()}", flush=True)
        if is_refused:  # the trial ended before training
            raise ConfigError(f"{trial}: {error}\nits output: {self._output(trial)}")


def last_error(output: Path) -> str:
    """Return the last error in the output of a run."""
    try:
        printed = output.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "see its output"
    _, mark, error = f"\n{printed}".rpartition("\nerror: ")
    return error.strip() if mark else (printed.splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
