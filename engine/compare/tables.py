"""Writes a comparison as sentences and tables in Markdown."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from configs.tables import METRICS
from engine.compare.runs import DataSet, Group, by_data, check_data, find_runs, group_runs, image_test, task_of
from engine.compare.statistics import ONE_RUN, Difference, difference, spread, verdict
from engine.evaluation.groups import GroupTest
from engine.evaluation.image_test import ErrorTest, ImageTest
from engine.evaluation.scores import column_title
from utils.text import counted, first_of, format_bytes, format_duration, markdown_table, one_line, printable

ENDS = {"killed": "was killed", "running": "is still going", "stopped": "was stopped", "failed": "ended with an error"}
HOW_TO_READ = {
    "±": "± after a mean is the standard deviation over the runs of the group (its seeds and folds)",
    "against": "against group 1: the difference of the means ± its standard error; within noise: its 95% interval "
    "contains 0 (Student's t, paired by seed if both groups have the same seeds, otherwise Welch's)",
    "images": "x : y images, p: of the images that both scored, only the first run of the group is right about x, "
    "and only the first run of group 1 about y; p is from McNemar's exact test. A small p says that the "
    "weights of these two runs differ on images like these; it says nothing about the settings",
    "errors": "on images, p: the mean absolute error of the first run of the group minus that of the first run of "
    "group 1, on the images that both scored, with its 95% interval; p is from a paired test with random signs. A "
    "small p says that the weights of these two runs differ on images like these; it says nothing about the settings",
    "groups": "on images in groups: the difference of the first run of the group from the first run of group 1, on the "
    "images that both scored, with its 95% interval (none below 5 groups) and p of random signs. Both count groups: "
    "the values of DATA.GROUP_BY, and copies. A small p says that the weights of these two runs differ on images of "
    "groups like these; it says nothing about the settings",
}


def compare(sources: Sequence[str], metric: str | None, any_data: bool) -> str:
    """Return the comparison of the runs of these sources as Markdown, with a page for each data set.

    `any_data`: compare runs on different data.
    """
    runs, left_out = find_runs(sources)
    are_chosen = len(runs) == len(sources)  # the user wants to compare exactly these
    data_sets = [DataSet(runs, *check_data(runs, any_data))] if are_chosen else by_data(runs, any_data)
    compared = [data_set for data_set in data_sets if len(data_set.runs) > 1]
    alone = [data_set for data_set in data_sets if len(data_set.runs) == 1]
    left_out += [f"left out: {one.runs[0].folder}: no other run has its data ({one.name})" for one in alone]
    pages = []
    for data_set in compared:
        groups = group_runs(data_set.runs, metric, data_set.common)
        is_last, data = data_set is compared[-1], data_set.name if len(data_sets) > 1 else ""
        pages.append(to_markdown(groups, data_set.warning, left_out if is_last else [], data))
    return "\n".join(pages)


def to_markdown(groups: Sequence[Group], warning: str, left_out: Sequence[str], data: str = "") -> str:
    """Return the comparison as a Markdown page.

    `warning`: about different data. `left_out`: why runs are left out. `data`: the data set, if there are several
    pages.
    """
    first, others = groups[0], groups[1:]
    differences = {each.number: difference(each.best, first.best) for each in others if first.best and each.best}
    tests = {each.number: test for each in others if (test := _image_test(first, each))}
    notes = _notes(groups)
    notes += [HOW_TO_READ["±"]] if any(len(group.runs) > 1 for group in groups) else []
    notes += [HOW_TO_READ["against"]] if any(each.error is not None for each in differences.values()) else []
    notes += [HOW_TO_READ[kind] for kind in dict.fromkeys(map(_kind_of, tests.values()))]
    counts = f"{counted(sum(len(group.runs) for group in groups), 'run')} in {counted(len(groups), 'group')}"
    parts = [f"# {_text(f'{data}: {counts}' if data else counts)}"]
    parts += [f"**Warning: {_text(warning)}**"] if warning else []
    parts += [_text(_answer(groups, differences)), "## Results", _results(groups, differences, tests)]
    parts += ["\n".join(f"- {_text(note)}" for note in [*notes, *left_out])] if notes or left_out else []
    if first.settings:
        rows = [[str(group.number), *group.settings.values()] for group in groups]
        parts += ["## Settings that differ", _table(["group", *first.settings], rows)]
    parts += ["## Runs", _runs(groups)]
    return "\n\n".join(parts) + "\n"


def _image_test(first: Group, group: Group) -> ImageTest | ErrorTest | GroupTest | None:
    """Return the test on common images if either group has only one run, so that its noise is unknown."""
    if first.metric != task_of(first.runs[0]).metric_of_images or min(len(first.best), len(group.best)) > 1:
        return None
    return image_test(first.runs[0], group.runs[0])


def _kind_of(test: ImageTest | ErrorTest | GroupTest) -> str:
    """Return the key of the note that explains a test."""
    if isinstance(test, GroupTest):
        return "groups"
    return "images" if isinstance(test, ImageTest) else "errors"


def _best_group(groups: Sequence[Group]) -> Group | None:
    """Return the group with the best mean, or None if nothing was measured or all means are equal."""
    means = {group.number: np.mean(list(group.best.values())) for group in groups if group.best}
    if len(means) > 1 == len(set(means.values())):
        return None
    number = (min if METRICS[groups[0].metric].smaller_is_better else max)(means, key=means.get, default=None)
    return groups[number - 1] if number else None


def _answer(groups: Sequence[Group], differences: Mapping[int, Difference]) -> str:
    """Return a sentence that names the best group, and says whether its lead is more than noise."""
    best, metric = _best_group(groups), groups[0].metric
    if best is None:
        is_measured = any(group.best for group in groups)
        return f"All groups have the same {METRICS[metric].title}." if is_measured else "Nothing was evaluated yet."
    if len(groups) == 1:
        return "All runs have the same settings except for seed and fold."
    extreme = "lowest" if METRICS[metric].smaller_is_better else "highest"
    start = f"Group {best.name} has the {extreme} {METRICS[metric].title}"
    is_first = best is groups[0]
    rivals = differences
    if differences and not is_first:
        rivals = {best.number: differences[best.number]}
    if near := [number for number, each in rivals.items() if each.is_noise]:
        names = [f"group {number}" for number in near] if is_first else ["group 1"]
        return f"{start}; its lead over {first_of(names, limit=6)} may be noise between repetitions."
    if any(each.is_noise is None for each in rivals.values()):
        return f"{start}. {ONE_RUN}"
    if is_first:
        return f"{start}; every other group is worse by more than the noise between repetitions."
    return f"{start}, by more than the noise between repetitions." if rivals else f"{start}."


def _results(
    groups: Sequence[Group],
    differences: Mapping[int, Difference],
    tests: Mapping[int, ImageTest | ErrorTest | GroupTest],
) -> str:
    metric, best = groups[0].metric, _best_group(groups)
    shared = "" if groups[0].common is None else " of common images"
    title = column_title(metric, shared)
    header = ["group", "runs", title, "against group 1", "epochs", "images/s", "time", "memory"]
    rows = []
    for group in groups:
        cells = [group.name, str(len(group.runs)), spread(list(group.best.values()), METRICS[metric].digits)]
        of_images = f"; {test}" if (test := tests.get(group.number)) else ""
        against = _describe(differences.get(group.number), metric) + of_images
        epochs = sorted({run.num_epochs for run in group.runs})
        cells += [
            against if group is not groups[0] else "",
            " to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))),
        ]
        cells += [spread(_figures(group, "speed"), 0), _mean(group, "seconds", format_duration)]
        cells.append(_mean(group, "memory", format_bytes))
        is_best = group is best and len(groups) > 1
        rows.append([f"**{_text(cell)}**" if is_best and cell else _text(cell) for cell in cells])
    shown = [column for column in range(len(header)) if column < 3 or any(row[column] not in ("", "-") for row in rows)]
    return markdown_table([header[column] for column in shown], [[row[column] for column in shown] for row in rows])


def _figures(group: Group, name: str) -> list[float]:
    """Return a figure (speed, seconds or memory) of each run that has it."""
    return [value for run in group.runs if (value := getattr(run, name)) is not None]


def _mean(group: Group, name: str, to_text: Callable[[float], str]) -> str:
    values = _figures(group, name)
    return to_text(float(np.mean(values))) if values else "-"


def _describe(gap: Difference | None, metric: str) -> str:
    if gap is None:
        return "-"
    value = f"{gap.value:+.{METRICS[metric].digits}f}"
    if gap.error is None:
        return f"{value} (noise unknown)"
    word = "within noise" if gap.is_noise else verdict(gap.value, False, METRICS[metric].smaller_is_better)
    return f"{value} ± {gap.error:.{METRICS[metric].digits}f} ({word}{', paired' if gap.is_paired else ''})"


def _runs(groups: Sequence[Group]) -> str:
    metric, rows = groups[0].metric, []
    for group in groups:
        for run in group.runs:
            seed, fold, value = run.settings["SEED"], run.settings["DATA.FOLD"], group.best_of(run)
            figure = "-" if value is None else f"{value:.{METRICS[metric].digits}f}"
            epoch = run.best.epoch if run.metric == metric and run.best.exists else "-"
            repetition = f"{seed}, fold {fold}" if fold else seed
            rows.append([group.number, repetition, figure, epoch, run.state, one_line(str(run.folder))])
    return _table(["group", "seed", f"best {METRICS[metric].title}", "in epoch", "state", "folder"], rows)


def _notes(groups: Sequence[Group]) -> list[str]:
    """Return notes on the runs: how they ended, and why they may not be comparable."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if len({run.metric for run in runs}) > 1:
        name = METRICS[groups[0].metric].title
        notes.append(
            f"the runs chose their best epoch by different metrics (TRAIN.BEST_METRIC); the comparison uses {name}"
        )
    for run in runs:
        planned, done = run.planned_epochs, run.num_epochs
        if done < planned and run.status.get("reason") != "early stop":
            how, name = ENDS.get(run.state, "ended"), one_line(str(run.folder))
            notes.append(f"{name} {how} after epoch {done} of {planned}: only these epochs are compared")
    for group in groups:
        if again := sum(len(key) > 2 for key in group.repetitions):
            notes.append(
                f"group {group.number}: {counted(again, 'run')} with the seed of an earlier run; repeating a seed "
                "does not measure the noise of seeds, and makes the deviation too small"
            )
    if len(devices := {run.run_facts.get("device_name") or "an unknown device" for run in runs}) > 1:
        notes.append(f"speed, time and memory come from different devices: {', '.join(sorted(devices))}")
    return notes


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return markdown_table([_text(cell) for cell in header], [[_text(cell) for cell in row] for row in rows])


def _text(cell: object) -> str:
    """Escape a string, so that any file name or value stays plain text in one table cell."""
    return re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(printable(str(cell)).split()))
