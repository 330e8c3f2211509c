"""What became of each trial, read from its folder: trials.csv, and the table at the end."""

import contextlib
import csv
import fcntl
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.comparing.statistics import deviation, mean
from scripts.sweeping.plan import Plan
from scripts.sweeping.values import describe
from utils.errors import cause_of
from utils.files import replacing
from utils.text import counted

WAITING, RUNNING, DONE, STOPPED, FAILED = "waiting", "running", "done", "stopped", "failed"
NON_FINITE = 3  # exit code of a run


@dataclass(frozen=True)
class Result:
    """Where a trial is. `best`: of the metric that decides which epoch is best."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    metric: str | None = None
    best: float | None = None
    epoch: int | None = None  # the best one
    seconds: float | None = None

    @property
    def is_final(self) -> bool:
        """Whether another start of the run would change nothing: it is done, or went wrong where it would again."""
        return self.state == DONE or (self.state == FAILED and self.exit_code == NON_FINITE)


def read_result(folder: Path) -> Result:
    """What the folder of a run says; a run that was killed is to go on."""
    status = read_status(folder)
    state = status.get("state")
    if not state:
        return Result(WAITING)
    metric, best = status.get("best_metric"), status.get("best")
    if not (isinstance(metric, str) and isinstance(best, dict) and isinstance(best.get(metric), int | float)):
        metric, best = None, {}  # no epoch yet, or a file that was changed by hand
    facts = {
        "reason": str(status.get("reason") or ""),
        "exit_code": status.get("exit_code"),
        "metric": metric,
        "best": best.get(metric),
        "epoch": best.get("epoch"),
        "seconds": _seconds(folder / "metrics.csv"),
    }
    if state == DONE:
        return Result(DONE, **facts)
    if is_locked(folder):
        return Result(RUNNING, **facts | {"exit_code": None})
    if facts["exit_code"] in (None, 0) or status.get("signal"):
        return Result(STOPPED, **facts)
    return Result(FAILED, **facts)


def is_locked(folder: Path) -> bool:
    """Whether a run is at work in the folder."""
    try:
        file = open(folder / ".lock")  # noqa: SIM115
    except OSError:  # none, or no folder, which the run will refuse
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a run; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _seconds(file: Path) -> float | None:
    """Time of all epochs, also of those before the run was stopped."""
    with contextlib.suppress(OSError, ValueError, KeyError), open(file, newline="") as rows:
        return sum(float(row["train_seconds"]) + float(row["eval_seconds"] or 0) for row in csv.DictReader(rows))
    return None


def is_better(metric: str | None, one: float, other: float) -> bool:
    return one < other if metric == "loss" else one > other


def write_trials(plan: Plan, results: Sequence[Result], warn: Callable[[str], None]) -> None:
    """trials.csv; that it cannot be written harms no trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", *plan.over, "seed", "fold", "state", "metric", "best", "epoch", "seconds", "folder"])
    for trial, result in zip(plan.trials, results, strict=True):
        seconds = None if result.seconds is None else round(result.seconds, 1)
        facts = [trial.seed, trial.fold, result.state, result.metric, result.best, result.epoch, seconds]
        writer.writerow([trial.index, *trial.settings.values(), *facts, trial.name])
    try:
        with replacing(plan.path / "trials.csv", shared=True) as file:
            file.write(text.getvalue().encode(errors="surrogateescape"))
    except OSError as error:
        warn(f"cannot write {plan.folder / 'trials.csv'} ({cause_of(error)}); the sweep goes on")


@dataclass(frozen=True)
class Point:
    """The settings of several trials, and what these came to."""

    settings: Mapping[str, str]
    values: Sequence[float]  # best metric of each trial that is done
    num_failed: int
    num_trials: int
    metric: str | None

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float | None:
        """Of single trials, with n - 1."""
        return deviation(self.values)


def collect(plan: Plan, results: Sequence[Result]) -> list[Point]:
    """The points that have a finished trial, the best mean first; those with failed trials behind the others."""
    trials, points = plan.trials, []
    for number, settings in enumerate(plan.points):
        of_point = [result for trial, result in zip(trials, results, strict=True) if trial.point == number]
        values = [each.best for each in of_point if each.state == DONE and each.best is not None]
        failed = sum(each.state == FAILED for each in of_point)
        metric = next((each.metric for each in of_point if each.metric), None)
        points.append(Point(settings, values, failed, len(of_point), metric))
    points = [point for point in points if point.values]
    sign = 1 if points and points[0].metric == "loss" else -1
    return sorted(points, key=lambda point: (len(point.values) < point.num_trials, sign * point.mean))


def table(plan: Plan, results: Sequence[Result]) -> str:
    """The points in Markdown, and the command line of the best one."""
    points = collect(plan, results)
    if not points:
        return "no trial is done"
    heads = ["settings", f"best {points[0].metric}", "+-", "trials", "failed"]
    rows = [
        [
            describe(point.settings) or "as given",
            f"{point.mean:.4g}" if point.metric == "loss" else f"{point.mean:.2f}",
            "" if point.deviation is None else f"{point.deviation:.2g}",
            f"{len(point.values)} of {point.num_trials}",
            str(point.num_failed or ""),
        ]
        for point in points
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [heads, *rows]]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    over = [*["seeds"] * (len(plan.seeds) > 1), *["folds"] * bool(plan.folds)]
    deviation = f"+-: standard deviation over {' and '.join(over)}. " if over else ""
    return "\n".join([*lines, "", f"{deviation}Best settings:", "", f"    {plan.command_of_point(points[0].settings)}"])


def summary(results: Sequence[Result]) -> str:
    """How many trials are in each state."""
    states = [each.state for each in results]
    found = {state: states.count(state) for state in (DONE, FAILED, STOPPED, RUNNING, WAITING) if state in states}
    return f"{counted(len(states), 'trial')}: " + ", ".join(f"{number} {state}" for state, number in found.items())
