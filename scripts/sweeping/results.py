"""Reads the results of the trials from their folders, writes trials.csv, and formats a table with a row per point."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.evaluation.scores import TITLES
from engine.record.saved_files import read_table
from engine.record.saved_run import read_status
from scripts.comparing.statistics import spread
from scripts.sweeping.plan import Sweep, describe
from utils.errors import ConfigError, ExitCode, cause_of
from utils.files import locked, write_text
from utils.text import counted, csv_text, markdown_table

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
    if metric not in TITLES or metric not in best:
        metric, best = None, {}  # no epoch has ended, or status.json was changed by hand
    code = status.get("exit_code")
    state = DONE if status["state"] == DONE else RUNNING if is_locked(folder) else FAILED
    if state == FAILED and (code in (None, 0) or status.get("signal")):
        state = STOPPED
    seconds = None
    with contextlib.suppress(ConfigError, ValueError, KeyError):
        rows = read_table(folder / "metrics.csv")
        seconds = sum(float(row["train_seconds"]) + float(row["eval_seconds"] or 0) for row in rows)
    return Result(state, str(status.get("reason") or ""), code, metric, best.get(metric), best.get("epoch"), seconds)


def is_locked(folder: Path) -> bool:
    """Return whether a run is using the folder. A missing lock file means that no run has used it."""
    if not (folder / ".lock").exists():
        return False
    with contextlib.suppress(OSError), locked(folder / ".lock") as file:
        return file is None
    return False


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
        print(f"warning: cannot write {folder / 'trials.csv'} ({cause_of(error)}); the sweep continues")


def table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a Markdown table with one row per point, and the command of the best point.

    The best mean comes first; points with unfinished trials come last.
    """
    states = [each.state for each in results]
    numbers = {state: states.count(state) for state in (DONE, FAILED, STOPPED, RUNNING, WAITING)}
    summary = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    summary = f"{counted(len(states), 'trial')}: {summary}\n\n"
    metric = next((each.metric for each in results if each.metric), None)
    digits = 4 if metric == "loss" else 2
    ranked, points = ranked_points(sweep, results), []
    for number, values in ranked:
        of_point = sum(trial.point == number for trial in sweep.trials)
        row = [describe(sweep.points[number]) or "as given", spread(values, digits), f"{len(values)} of {of_point}"]
        points.append((number, row))
    if not points:
        return f"{summary}no trial is done"
    title = f"best {TITLES[metric]}{'' if metric == 'loss' else ', %'}"
    rows = markdown_table(["settings", title, "trials"], [row for _, row in points])
    command = sweep.command_of_point(sweep.points[points[0][0]])
    limit = f" {ONE_TRIAL}" if len(ranked) > 1 and any(len(values) < 2 for _, values in ranked[:2]) else ""
    note = f"±: standard deviation over seeds and folds.{limit} Settings of the first row:"
    return f"{summary}{rows}\n\n{note}\n\n    {command}"


def ranked_points(sweep: Sweep, results: Sequence[Result]) -> list[tuple[int, list[float]]]:
    """Return (point, best values of its finished trials), the best mean first. Points with unfinished trials come last."""
    metric = next((each.metric for each in results if each.metric), None)
    sign, points = 1 if metric == "loss" else -1, []
    for number in range(len(sweep.points)):
        of_point = [result for trial, result in zip(sweep.trials, results, strict=True) if trial.point == number]
        values = [each.best for each in of_point if each.state == DONE and each.best is not None]
        if values:
            points.append((len(values) < len(of_point), sign * sum(values) / len(values), number, values))
    return [(number, values) for *_, number, values in sorted(points, key=lambda point: point[:3])]
