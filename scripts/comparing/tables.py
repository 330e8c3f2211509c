"""Writes a comparison as sentences and tables in Markdown."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from engine.evaluation.scores import TITLES
from scripts.comparing.runs import Group, image_test
from scripts.comparing.statistics import ONE_RUN, Difference, difference, spread, verdict
from utils.text import counted, first_of, format_bytes, format_duration, markdown_table, one_line, printable

ENDS = {"killed": "was killed", "running": "is still going", "stopped": "was stopped", "failed": "ended with an error"}


def to_markdown(groups: Sequence[Group], warning: str, left_out: Sequence[str]) -> str:
    """Return the comparison as a Markdown page. `warning`: about different data. `left_out`: why runs are left out."""
    runs = [run for group in groups for run in group.runs]
    notes = [*_notes(groups), *_how_to_read(groups), *left_out]
    parts = [f"# {counted(len(runs), 'run')} in {counted(len(groups), 'group')}"]
    parts += [f"**Warning: {_text(warning)}**"] if warning else []
    parts += [_text(_answer(groups)), "## Results", _results(groups)]
    parts += ["\n".join(f"- {_text(note)}" for note in notes)] if notes else []
    if keys := list(groups[0].settings):
        rows = [[str(group.number), *map(_shortened, group.settings.values())] for group in groups]
        parts += ["## Settings that differ", _table(["group", *keys], rows)]
    parts += ["## Runs", _runs(groups)]
    return "\n\n".join(parts) + "\n"


def _against_first(groups: Sequence[Group]) -> dict[int, Difference]:
    """Return {group number: difference of the group's best metric from the first group's}."""
    first = groups[0].best
    return {each.number: difference(each.best, first) for each in groups[1:] if first and each.best}


def _best_row(groups: Sequence[Group]) -> int | None:
    """Return the row of the best mean, or None if nothing was measured or all means are equal."""
    means = {row: np.mean(list(group.best.values())) for row, group in enumerate(groups) if group.best}
    if len(means) > 1 == len(set(means.values())):
        return None
    return (min if groups[0].metric == "loss" else max)(means, key=means.get, default=None)


def _answer(groups: Sequence[Group]) -> str:
    """Return a sentence that names the best group, and says whether its lead is more than noise."""
    row, metric = _best_row(groups), groups[0].metric
    if row is None:
        is_measured = any(group.best for group in groups)
        return f"All groups have the same {TITLES[metric]}." if is_measured else "Nothing was evaluated yet."
    if len(groups) == 1:
        return "All runs have the same settings except for seed and fold."
    best, found = groups[row], _against_first(groups)
    start = f"Group {best.name} has the {'lowest' if metric == 'loss' else 'highest'} {TITLES[metric]}"
    rivals = found if row == 0 else {number: each for number, each in found.items() if number == best.number}
    if near := [number for number, each in rivals.items() if each.is_noise]:
        names = [f"group {number}" for number in near] if row == 0 else ["group 1"]
        return f"{start}; its lead over {first_of(names, limit=6)} may be noise between repetitions."
    if any(each.is_noise is None for each in rivals.values()):
        return f"{start}. {ONE_RUN}"
    if row == 0:
        return f"{start}; every other group is worse by more than the noise between repetitions."
    return f"{start}, by more than the noise between repetitions." if rivals else f"{start}."


def _results(groups: Sequence[Group]) -> str:
    is_loss = groups[0].metric == "loss"
    digits, best, differences = 4 if is_loss else 2, _best_row(groups), _against_first(groups)
    shared = "" if groups[0].common is None else " of common images"
    title = f"best {TITLES[groups[0].metric]}{shared}{'' if is_loss else ', %'}"
    header = ["group", "runs", title, "against group 1", "epochs", "images/s", "time", "memory"]
    rows = []
    for row, group in enumerate(groups):
        epochs = sorted({run.num_epochs for run in group.runs})
        cells = [group.name, str(len(group.runs)), spread(list(group.best.values()), digits)]
        found = differences.get(group.number)
        cells.append(_describe(found, digits, is_loss) + _of_images(groups, group) if row else "")
        cells.append(" to ".join(map(str, dict.fromkeys((epochs[0], epochs[-1])))))
        cells += [spread(group.values("speed"), 0), _mean(group, "seconds", format_duration)]
        cells.append(_mean(group, "memory", format_bytes))
        is_best = row == best and len(groups) > 1
        rows.append([f"**{_text(cell)}**" if is_best and cell else _text(cell) for cell in cells])
    shown = [column for column in range(len(header)) if column < 3 or any(row[column] not in ("", "-") for row in rows)]
    return markdown_table([header[column] for column in shown], [[row[column] for column in shown] for row in rows])


def _mean(group: Group, figure: str, to_text: Callable[[float], str]) -> str:
    values = group.values(figure)
    return to_text(float(np.mean(values))) if values else "-"


def _of_images(groups: Sequence[Group], group: Group) -> str:
    """Return the result of the image test if either group has only one run, so that its noise is unknown; else ''."""
    if groups[0].metric != "top1" or min(len(groups[0].best), len(group.best)) > 1:
        return ""
    test = image_test(groups[0].runs[0], group.runs[0])
    return f"; {test.only_second} : {test.only_first} images, p {test.p:.2g}" if test else ""


def _describe(found: Difference | None, digits: int, is_loss: bool) -> str:
    if found is None:
        return "-"
    if found.error is None:
        return f"{found.value:+.{digits}f} (noise unknown)"
    word = "within noise" if found.is_noise else verdict(found.value, False, is_loss)
    return f"{found.value:+.{digits}f} ± {found.error:.{digits}f} ({word}{', paired' if found.is_paired else ''})"


def _runs(groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        for run in group.runs:
            seed, fold, value = run.settings["SEED"], run.settings["DATA.FOLD"], group.best_of(run)
            figure = "-" if value is None else f"{value:.{4 if group.metric == 'loss' else 2}f}"
            epoch = run.best.epoch if run.metric == group.metric and run.best.epoch else "-"
            repetition = f"{seed}, fold {fold}" if fold else seed
            rows.append([group.number, repetition, figure, epoch, run.state, one_line(str(run.folder))])
    return _table(["group", "seed", f"best {TITLES[groups[0].metric]}", "in epoch", "state", "folder"], rows)


def _notes(groups: Sequence[Group]) -> list[str]:
    """Return notes on the runs: how they ended, and why they may not be comparable."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if len({run.metric for run in runs}) > 1:
        name = TITLES[groups[0].metric]
        notes.append(
            f"the runs chose their best epoch by different metrics (TRAIN.BEST_METRIC); the comparison uses {name}"
        )
    for run in runs:
        planned, done = run.planned_epochs, run.num_epochs
        if done < planned and run.status.get("reason") != "early stop":
            how = ENDS.get(run.state, "ended")
            name = one_line(str(run.folder))
            notes.append(f"{name} {how} after epoch {done} of {planned}: only these epochs are compared")
    for group in groups:
        if again := sum(len(key) > 2 for key in group.repetitions):
            notes.append(
                f"group {group.number}: {counted(again, 'run')} with the seed of an earlier run; repeating a seed "
                "does not measure the noise of seeds, and makes the deviation too small"
            )
    if len(devices := {run.about.get("device_name") or "an unknown device" for run in runs}) > 1:
        notes.append(f"speed, time and memory come from different devices: {', '.join(sorted(devices))}")
    return notes


def _how_to_read(groups: Sequence[Group]) -> list[str]:
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append("± after a mean is the standard deviation over the runs of the group (its seeds and folds)")
    if any(each.error is not None for each in _against_first(groups).values()):
        notes.append(
            "against group 1: the difference of the means ± its standard error; within noise: its 95% interval contains "
            "0 (Student's t, paired by seed if both groups have the same seeds, otherwise Welch's)"
        )
    if any(_of_images(groups, group) for group in groups[1:]):
        notes.append(
            "x : y images, p: of the images that both scored, only the first run of the group classifies x correctly, "
            "and only the first run of group 1 classifies y correctly; p is from McNemar's exact test. A small p says "
            "that the weights of these two runs differ on images like these; it says nothing about the settings"
        )
    return notes


def _shortened(value: str) -> str:
    """Shorten a SHA-256 to its first digits, which are enough to distinguish it. Return other values unchanged."""
    return value.strip('"')[:8] if re.fullmatch('"?[0-9a-f]{64}"?', value) else value


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return markdown_table([_text(cell) for cell in header], [[_text(cell) for cell in row] for row in rows])


def _text(cell: object) -> str:
    """Escape a string, so that any file name or value stays plain text in one table cell."""
    return re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(printable(str(cell)).split()))
