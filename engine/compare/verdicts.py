"""Says whether the runs of a second side are better than those of a first, as plain values for scripts."""

import statistics
from collections.abc import Sequence
from typing import Any

from configs.tables import METRICS
from engine.compare.runs import (
    DataSet,
    Group,
    by_data,
    check_data,
    differing,
    find_runs,
    group_runs,
    image_test,
    task_of,
)
from engine.compare.statistics import EQUAL, ONE_RUN, difference, verdict
from engine.evaluation.groups import GroupTest
from engine.record.saved_run import SavedRun
from utils.errors import ConfigError
from utils.text import first_of

SAME_SETTINGS = (
    "Both sides have the same settings, so the verdict is about their weights and says nothing about settings"
)


def verdict_of(sources: Sequence[str], metric: str | None, any_data: bool) -> dict[str, Any]:
    """Return whether the runs of the second source are better than those of the first, and how this was measured.

    With several data sets, return a verdict for each of them, and their common verdict or `inconclusive`. `any_data`:
    compare runs on different data.
    """
    sides = [find_runs([source], fewest=1)[0] for source in sources]
    verdicts = []
    for data_set in by_data([*sides[0], *sides[1]], any_data):
        of_data = [[run for run in side if run in data_set.runs] for side in sides]
        if not all(of_data):  # raises the error that says how the data differ
            check_data([*sides[0], *sides[1]], any_data)
        verdicts.append({"data": data_set.name} | _on_data_set(data_set, of_data, sources, metric))
    if len(verdicts) == 1:
        del verdicts[0]["data"]
        return verdicts[0]
    distinct = {facts["verdict"] for facts in verdicts}
    return {"verdict": distinct.pop() if len(distinct) == 1 else EQUAL, "data_sets": verdicts}


def _on_data_set(
    data_set: DataSet, sides: Sequence[list[SavedRun]], sources: Sequence[str], metric: str | None
) -> dict[str, Any]:
    """Return whether the runs of the second side are better, and how this was measured.

    `sides`: runs on one data set.
    """
    warning, common = data_set.warning, data_set.common
    for runs, source in zip(sides, sources, strict=True):
        if len(group_runs(runs, metric, common)) > 1:
            raise ConfigError(
                f"-json: the runs of {source} differ in {first_of([*differing(runs)])}; give repetitions of one run"
            )
    metric = group_runs([*sides[0], *sides[1]], metric, common)[0].metric
    one, two = (Group(number, {}, runs, metric, common) for number, runs in enumerate(sides, start=1))
    if not (one.best and two.best):
        source = sources[1] if one.best else sources[0]
        raise ConfigError(f"-json: {source} was never evaluated; give another run")
    gap, smaller = difference(two.best, one.best), METRICS[metric].smaller_is_better
    test = image_test(one.runs[0], two.runs[0]) if metric == task_of(one.runs[0]).metric_of_images else None
    word, facts = verdict(gap.value, gap.is_noise, smaller), {"difference": gap.value, "interval": None}
    if gap.half_width is not None:
        facts["interval"] = [gap.value - gap.half_width, gap.value + gap.half_width]
        facts["test"] = "paired t, over seeds" if gap.is_paired else "Welch's t, over seeds"
    elif test:
        word = verdict(test.value, test.p >= 0.05, smaller)
        name = "McNemar's, exact, over images" if metric == "top1" else "paired, with random signs, over images"
        name = "paired, with signs, over groups" if isinstance(test, GroupTest) else name
        facts = {"difference": test.value, "interval": test.interval, "test": name, "p": test.p}
    if test:
        facts |= {"images": test.num_images}
        if isinstance(test, GroupTest):
            facts["groups"] = test.num_groups
        if metric == "top1":
            facts |= {"first_alone": test.only_first, "second_alone": test.only_second}
    deviations = [statistics.stdev(side.best.values()) if len(side.best) > 1 else None for side in (one, two)]
    facts |= {"seeds": [len(one.best), len(two.best)], "deviation_of_seeds": deviations}
    limit = ONE_RUN if gap.half_width is None else ""
    if not differing([*sides[0], *sides[1]]):
        limit = SAME_SETTINGS
    facts["note"] = "; ".join(reason for reason in (warning, limit) if reason) or None
    what_differs = "weights" if limit else "settings"
    return {"verdict": word, "about": what_differs, "metric": metric} | facts
