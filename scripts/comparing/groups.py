"""Groups runs that repeat each other, and computes the figures of each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engine.evaluation.scores import TITLES, rank_of
from engine.record.saved_run import SavedRun
from scripts.comparing.runs import Common, differing, value_of
from utils.errors import ConfigError
from utils.text import one_line

REPETITION = ("SEED", "DATA.FOLD")  # runs that differ in nothing else are one group
LONGEST_NAME = 48  # maximum characters of settings in a group's name


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed and fold."""

    number: int  # counted from 1
    settings: dict[str, str]  # the settings that differ between groups, with their values in this group
    runs: list[SavedRun]
    metric: str
    common: Common | None = None  # the images to compare; None: all images

    @cached_property
    def name(self) -> str:
        """Return the group's number, with its settings if they are short, or else with the folder of its first run."""
        words = one_line(", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.settings.items()))
        name = words if words and len(words) <= LONGEST_NAME else one_line(self.runs[0].folder.resolve().name)
        return f"{self.number}: {name}"

    @cached_property
    def repetitions(self) -> list[Any]:
        """Return a key for each run: seed and fold, plus the folder if an earlier run has the same seed and fold."""
        found: list[Any] = []
        for run in self.runs:
            key = tuple(str(run.settings[name]) for name in REPETITION)
            found.append(key if key not in found else (*key, str(run.folder)))
        return found

    @cached_property
    def best(self) -> dict[Any, float]:
        """Return {repetition: best value of the metric} for the runs that measured it."""
        values = zip(self.repetitions, map(self.best_of, self.runs), strict=True)
        return {key: value for key, value in values if value is not None}

    def best_of(self, run: SavedRun) -> float | None:
        """Return the run's best value of the metric, or None if it was never measured."""
        if self.common is not None:
            return 100 * float(np.mean([*self.common[run.folder].values()]))
        if run.metric == self.metric:
            return run.best.value if run.best.epoch else None
        names = [f"eval_{self.metric}{suffix}" for suffix in run.suffixes]
        values = [row[name] for row in run.epochs for name in names if row.get(name) is not None]
        return max(values, key=lambda value: rank_of(self.metric, value, 0.0), default=None)

    def values(self, figure: str) -> list[float]:
        """Return a figure (speed, seconds or memory) of each run that has it."""
        return [value for run in self.runs if (value := getattr(run, figure)) is not None]


def group_runs(runs: Sequence[SavedRun], metric: str | None, common: Common | None = None) -> list[Group]:
    """Return the groups in the order of their first runs.

    Without `metric`, the metric of the runs is used, or top-1 if the runs have different metrics. For `common` images,
    only top-1 is known.
    """
    chosen = {run.metric for run in runs} if common is None else {"top1"}
    compared = metric or (chosen.pop() if len(chosen) == 1 else "top1")
    if common is not None and compared != "top1":
        raise ConfigError(
            f"-metric {metric}: these runs use different data, and on their common images only top1 is known; leave "
            "-metric out, or add -any_data"
        )
    without = [run for run in runs if not any(f"eval_{compared}" in row for row in run.epochs)]
    if without and metric:
        name = f"{without[0].folder} has no {TITLES.get(metric, metric)}"
        raise ConfigError(f"-metric {metric}: {name}; choose another metric, or leave the run out")
    keys = differing(runs)
    members: dict[tuple[str, ...], list[SavedRun]] = {}
    for run in runs:
        members.setdefault(tuple(value_of(run, key) for key in keys), []).append(run)
    return [
        Group(number, dict(zip(keys, values, strict=True)), each, compared, common)
        for number, (values, each) in enumerate(members.items(), start=1)
    ]
