"""What became of each trial, read from its folder: trials.csv, and the table of the points."""

import contextlib
import csv
import fcntl
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.comparing.statistics import deviation, mean
from scripts.sweeping.plan import Plan, describe
from utils.errors import cause_of
from utils.files import write_text
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
    if not status.get("state"):
        return Result(WAITING)
    metric, best = status.get("best_metric"), status.get("best")
    if not (isinstance(metric, str) and isinstance(best, dict) and isinstance(best.get(metric), int | float)):
        metric, best = None, {}  # no epoch yet, or a file that was changed by hand
    code = status.get("exit_code")
    state = DONE if status["state"] == DONE else RUNNING if is_locked(folder) else FAILED
    if state == FAILED and (code in (None, 0) or status.get("signal")):
        state = STOPPED
    reason = str(status.get("reason") or "")
    return Result(state, reason, code, metric, best.get(metric), best.get("epoch"), _seconds(folder / "metrics.csv"))


def is_locked(folder: Path) -> bool:
    """Whether a run is at work in the folder."""
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or no folder, which the run will refuse
        return False
    return False


def read_status(folder: Path) -> dict[str, Any]:
    """status.json of a run; {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        if isinstance(status, dict):
            return status
    return {}


def _seconds(file: Path) -> float | None:
    """Time of all epochs, also of those before the run was stopped."""
    with contextlib.suppress(OSError, ValueError, KeyError), open(file, newline="") as rows:
        return sum(float(row["train_seconds"]) + float(row["eval_seconds"] or 0) for row in csv.DictReader(rows))
    return None


def write_trials(plan: Plan, folder: Path, results: Sequence[Result]) -> None:
    """Write trials.csv; that it cannot be written harms no trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", *plan.over, "seed", "fold", "state", "metric", "best", "epoch", "seconds", "folder"])
    for trial, result in zip(plan.trials, results, strict=True):
        seconds = None if result.seconds is None else round(result.seconds, 1)
        facts = [trial.seed, trial.fold, result.state, result.metric, result.best, result.epoch, seconds]
        writer.writerow([trial.index, *trial.settings.values(), *facts, trial.name])
    try:
        write_text(folder / "trials.csv", text.getvalue())
    except OSError as error:
        print(f"warning: cannot write {folder / 'trials.csv'} ({cause_of(error)}); the sweep goes on")


def table(plan: Plan, results: Sequence[Result]) -> str:
    """The points in Markdown, the best mean first, those with missing trials last; and the command of the best one."""
    states = [each.state for each in results]
    numbers = {state: states.count(state) for state in (DONE, FAILED, STOPPED, RUNNING, WAITING)}
    summary = ", ".join(f"{number} {state}" for state, number in numbers.items() if number)
    lines = [f"{counted(len(states), 'trial')}: {summary}", ""]
    metric = next((each.metric for each in results if each.metric), None)
    sign, digits = (1, 4) if metric == "loss" else (-1, 2)
    points = []
    for number, settings in enumerate(plan.points):
        of_point = [result for trial, result in zip(plan.trials, results, strict=True) if trial.point == number]
        values = [each.best for each in of_point if each.state == DONE and each.best is not None]
        if values:
            points.append((len(values) < len(of_point), sign * mean(values), number, settings, values, len(of_point)))
    if not points:
        return "\n".join([*lines, "no trial is done"])
    lines += [f"| settings | best {metric} | +- | trials |", "|---|---|---|---|"]
    for *_, settings, values, count in sorted(points, key=lambda point: point[:3]):
        width = "" if (found := deviation(values)) is None else f"{found:.2g}"
        figures = f"{mean(values):.{digits}f} | {width} | {len(values)} of {count}"
        lines.append(f"| {describe(settings) or 'as given'} | {figures} |")
    best = min(points, key=lambda point: point[:3])[3]
    return "\n".join(
        [
            *lines,
            "",
            "+-: standard deviation over seeds and folds. Best settings:",
            "",
            f"    {plan.command_of_point(best)}",
        ]
    )
