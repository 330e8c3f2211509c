"""Runs that are repetitions of each other, as one group, and the figures of a group."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.evaluation.scores import TITLES, rank_of
from engine.record.saved_run import SavedRun
from scripts.comparing.runs import REPETITION, differing, value_of
from scripts.comparing.statistics import mean
from utils.errors import ConfigError
from utils.text import counted

LONGEST_NAME = 48  # of settings in the name of a group
Point = tuple[int, float]


@dataclass(frozen=True)
class Group:
    """Runs that differ in seed and fold only."""

    number: int  # from 1
    settings: dict[str, str]  # those in which groups differ, as written
    runs: list[SavedRun]
    metric: str

    @cached_property
    def name(self) -> str:
        """Its settings if they are few and short, else the folder of its first run."""
        words = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.settings.items())
        name = words if words and len(words) <= LONGEST_NAME else self.runs[0].folder.resolve().name
        return f"{self.number}: {name}"

    def by_repetition(self, figure: Callable[[SavedRun], float | None]) -> dict[Any, float]:
        """{what tells the run from others of its group: the figure}, for the runs that have it."""
        found: dict[Any, float] = {}
        for run in self.runs:
            if (value := figure(run)) is not None:
                key = tuple(str(run.settings[name]) for name in REPETITION)
                found[key if key not in found else (*key, str(run.folder))] = value
        return found

    def values(self, figure: Callable[[SavedRun], float | None]) -> list[float]:
        return list(self.by_repetition(figure).values())

    def best(self, run: SavedRun) -> float | None:
        """The value of the metric in the run's best epoch; None if it was never measured."""
        if run.metric == self.metric:
            return run.best.value if run.best.epoch else None
        found = [
            (rank_of(self.metric, row[name], 0.0), row[name])
            for row in run.epochs
            for name in (f"eval_{self.metric}{suffix}" for suffix in run.suffixes)
            if row.get(name) is not None
        ]
        return max(found)[1] if found else None

    @cached_property
    def suffix(self) -> str:
        """Of the columns of the weights that were best in most of its runs: raw or EMA."""
        return statistics.mode(run.best.suffix for run in self.runs)

    def curve(self, run: SavedRun, column: str) -> list[Point]:
        """(epoch from 1, value) of `eval_loss`, `eval_top1`..., of the group's kind of weights, or `train_loss`."""
        name = column + (self.suffix if column.startswith("eval_") and self.suffix in run.suffixes else "")
        return [(row["epoch"] + 1, row[name]) for row in run.epochs if row.get(name) is not None]

    def mean_curve(self, column: str) -> list[Point]:
        """The mean of the runs, over the epochs that all of them have."""
        curves = [dict(curve) for run in self.runs if (curve := self.curve(run, column))]
        common = sorted(set.intersection(*map(set, curves))) if curves else []
        return [(epoch, mean([curve[epoch] for curve in curves])) for epoch in common]


def final_loss(run: SavedRun) -> float | None:
    """Of the last evaluation: of raw weights or EMA, whichever is smaller."""
    for row in reversed(run.epochs):
        if found := [row[f"eval_loss{each}"] for each in run.suffixes if row.get(f"eval_loss{each}") is not None]:
            return min(found)
    return None


def num_epochs(run: SavedRun) -> int:
    return run.epochs[-1]["epoch"] + 1


def speed(run: SavedRun) -> float | None:
    """Images a second, the median of its epochs: the first is slower, and others may be disturbed."""
    found = [row["images_per_s"] for row in run.epochs if row.get("images_per_s")]
    return statistics.median(found) if found else None


def memory(run: SavedRun) -> float | None:
    """Peak in MB."""
    return max((row["memory_mb"] for row in run.epochs if row.get("memory_mb")), default=None)


def group_runs(runs: Sequence[SavedRun], metric: str | None) -> tuple[list[Group], list[str]]:
    """The groups in the order of their first runs, and the settings in which they differ."""
    keys, _ = differing(runs)
    metric = _metric_of(runs, metric)
    members: dict[tuple[str, ...], list[SavedRun]] = {}
    for run in runs:
        members.setdefault(tuple(value_of(run, key) for key in keys), []).append(run)
    groups = [
        Group(number, dict(zip(keys, values, strict=True)), each, metric)
        for number, (values, each) in enumerate(members.items(), start=1)
    ]
    return groups, keys


def _metric_of(runs: Sequence[SavedRun], asked: str | None) -> str:
    """What is compared: what all runs chose their best epoch by, else top-1."""
    chosen = {run.metric for run in runs}
    metric = asked or (chosen.pop() if len(chosen) == 1 else "top1")
    without = [run for run in runs if not any(f"eval_{metric}" in row for row in run.epochs)]
    if without and asked:
        name = TITLES.get(metric, metric)
        raise ConfigError(f"-metric {metric}: {without[0].folder} has no {name}; choose another, or leave the run out")
    return metric


def notes_on(groups: Sequence[Group]) -> list[str]:
    """What a reader has to know of single runs: how they ended, and what makes them incomparable."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if len({run.metric for run in runs}) > 1:
        notes.append(
            f"the runs chose their best epoch by different metrics (TRAIN.BEST_METRIC); compared is "
            f"{TITLES[groups[0].metric]}"
        )
    ends = {
        "killed": "was killed",
        "running": "is still going",
        "stopped": "was stopped",
        "failed": "ended with an error",
    }
    for run in runs:
        planned, done = run.settings["TRAIN.NUM_EPOCHS"], num_epochs(run)
        if done < planned and run.status.get("reason") != "early stop":
            how = ends.get(run.state, "ended")
            notes.append(f"{run.folder} {how} after epoch {done} of {planned}: it is compared up to there")
    for group in groups:
        seeds = [tuple(str(run.settings[name]) for name in REPETITION) for run in group.runs]
        if again := len(seeds) - len(set(seeds)):
            notes.append(
                f"group {group.number}: {counted(again, 'run')} of a seed that is there already: a repetition says nothing of "
                "the noise of seeds, and makes the deviation too small"
            )
    if len(devices := {str(run.about.get("device_name")) for run in runs}) > 1:
        notes.append(f"speed, time and memory are of different devices: {', '.join(sorted(devices))}")
    return notes
