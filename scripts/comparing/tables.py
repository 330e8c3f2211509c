"""What a comparison says, as tables and sentences, and how they are written as Markdown."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.evaluation.scores import TITLES
from engine.record.saved_run import SavedRun
from scripts.comparing.groups import Group, final_loss, memory, notes_on, num_epochs, speed
from scripts.comparing.runs import differing, value_of
from scripts.comparing.statistics import Difference, deviation, difference, mean
from utils.text import counted, first_of, format_bytes, format_duration

MANY = 5  # comparisons, among which one may seem certain by chance


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; `strong`: the numbers of rows that stand out."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """All of it, in the order of reading."""

    title: str
    groups: Sequence[Group]
    warning: str  # of different data, '' if there is none
    result: str  # the sentence that answers the question
    tables: Sequence[Table] = field(default_factory=list)
    notes: Sequence[str] = field(default_factory=list)


def compare(groups: Sequence[Group], keys: Sequence[str], warning: str, left_out: Sequence[str]) -> Comparison:
    """`keys`: the settings in which groups differ."""
    runs = [run for group in groups for run in group.runs]
    tables = [_results(groups)]
    if keys:
        tables.append(_settings(groups, keys))
    tables.append(_runs(groups))
    notes = [*notes_on(groups), *_how_to_read(groups), *left_out]
    _, without = differing(runs)
    if shown := [key for key in without if key not in ("SAVE", "NAME", "DATA.DATA_PATH")]:
        values = (f"{key} ({first_of(sorted({value_of(run, key) for run in runs}), limit=3)})" for key in shown)
        notes.append(f"settings that also differ, without effect on what is learned: {', '.join(values)}")
    title = f"{counted(len(runs), 'run')} in {counted(len(groups), 'group')}"
    return Comparison(title, groups, warning, _answer(groups), tables, notes)


def _best_of(group: Group) -> dict:
    return group.by_repetition(group.best)


def _against_first(groups: Sequence[Group]) -> dict[int, Difference]:
    """{number of the group: how its best metric differs from the first group's}."""
    first = _best_of(groups[0])
    return {each.number: difference(found, first) for each in groups[1:] if first and (found := _best_of(each))}


def _number_of_best(groups: Sequence[Group]) -> int:
    """The row of the best mean; -1 if nothing was measured."""
    means = {row: mean(list(_best_of(group).values())) for row, group in enumerate(groups)}
    means = {row: value for row, value in means.items() if value is not None}
    return (min if groups[0].metric == "loss" else max)(means, key=means.get, default=-1)


def _answer(groups: Sequence[Group]) -> str:
    """Which group is best, and whether that is more than noise."""
    row = _number_of_best(groups)
    if row < 0:
        return "Nothing was evaluated yet."
    if len(groups) == 1:
        return "All runs have the same settings but for seed and fold."
    best, metric, found = groups[row], groups[0].metric, _against_first(groups)
    start = f"Group {best.name} has the {'lowest' if metric == 'loss' else 'highest'} {TITLES[metric]}"
    rivals = found if row == 0 else {number: each for number, each in found.items() if number == best.number}
    if near := [f"group {number}" for number, each in rivals.items() if each.is_noise]:
        if row == 0:
            return f"{start}; within the noise of the repetitions of it: {first_of(near, limit=6)}."
        return f"{start}, by {_amount(found[best.number].value, metric)} before group 1, but that is within the noise of the repetitions."
    if any(each.is_noise is None for each in rivals.values()):
        return (
            f"{start}; whether that is more than noise cannot be told from one run of a group: repeat them with -seed 1, "
            "-seed 2 ..."
        )
    if row == 0:
        return f"{start}; every other group is worse by more than the noise of the repetitions."
    if not rivals:  # nothing was evaluated in the first group
        return f"{start}."
    gap = rivals[best.number]
    return f"{start}, by {_amount(gap.value, metric)} ± {_amount(gap.error, metric)} before group 1: more than noise."


def _amount(value: float, metric: str) -> str:
    return f"{abs(value):.4f}" if metric == "loss" else f"{abs(value):.2f} points"


def _results(groups: Sequence[Group]) -> Table:
    metric = groups[0].metric
    digits = 4 if metric == "loss" else 2
    unit = "" if metric == "loss" else ", %"
    differences = _against_first(groups)
    header = [
        *("group", "runs", f"best {TITLES[metric]}{unit}", "against group 1", "final loss", "epochs"),
        *("images/s", "time", "memory"),
    ]
    rows = [
        [
            group.name,
            str(len(group.runs)),
            spread(list(_best_of(group).values()), digits),
            _describe(differences.get(group.number), digits, metric == "loss") if group is not groups[0] else "",
            spread(group.values(final_loss), 4),
            _range(group, num_epochs),
            spread(group.values(speed), 0),
            _formatted(format_duration, mean(group.values(lambda run: run.seconds))),
            _formatted(lambda megabytes: format_bytes(megabytes * 2**20), mean(group.values(memory))),
        ]
        for group in groups
    ]
    shown = [
        column for column, _ in enumerate(header) if column < 3 or any(row[column] not in ("", "-") for row in rows)
    ]
    rows = [[row[column] for column in shown] for row in rows]
    best = _number_of_best(groups) if len(groups) > 1 else -1
    return Table("Results", [header[column] for column in shown], rows, frozenset({best} - {-1}))


def spread(values: Sequence[float], digits: int) -> str:
    """98.50 ± 0.25, the mean and the standard deviation; '-' without values."""
    if not values:
        return "-"
    width = deviation(values)
    return f"{mean(values):,.{digits}f}" + ("" if width is None else f" ± {width:,.{digits}f}")


def _describe(found: Difference | None, digits: int, is_loss: bool) -> str:
    if found is None:
        return "-"
    value = f"{found.value:+.{digits}f}"
    if found.error is None:
        return f"{value} (noise unknown)"
    verdict = "within noise" if found.is_noise else "better" if (found.value < 0) == is_loss else "worse"
    return f"{value} ± {found.error:.{digits}f} ({verdict}{', paired' if found.is_paired else ''})"


def _range(group: Group, figure: Callable[[SavedRun], float | None]) -> str:
    values = sorted({figure(run) for run in group.runs})
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _formatted(to_text: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else to_text(value)


def _settings(groups: Sequence[Group], keys: Sequence[str]) -> Table:
    rows = [[str(group.number), *(group.settings[key] for key in keys)] for group in groups]
    return Table("Settings that differ", ["group", *keys], rows)


def _runs(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        digits = 4 if group.metric == "loss" else 2
        for run in group.runs:
            value = group.best(run)
            seed = str(run.settings["SEED"])
            fold = f", fold {fold}" if (fold := run.settings["DATA.FOLD"]) else ""
            epoch = str(run.best.epoch) if run.metric == group.metric and run.best.epoch else "-"
            row = [str(group.number), seed + fold, "-" if value is None else f"{value:.{digits}f}", epoch, run.state]
            rows.append([*row, str(run.folder)])
    header = ["group", "seed", f"best {TITLES[groups[0].metric]}", "in epoch", "state", "folder"]
    return Table("Runs", header, rows)


def _how_to_read(groups: Sequence[Group]) -> list[str]:
    notes = []
    if any(len(group.runs) > 1 for group in groups):
        notes.append("± after a mean is the standard deviation over the runs of the group (its seeds and folds)")
    found = _against_first(groups).values()
    if any(each.error is not None for each in found):
        notes.append(
            "against group 1: the difference of the means ± its standard error; within noise: 0 lies in its 95% interval (Student's "
            "t; paired by seed where the seeds are the same, else Welch's)"
        )
    if sum(each.error is not None for each in found) > MANY:
        notes.append(
            "among many groups one in twenty seems better or worse by chance alone: repeat what looks best with new seeds"
        )
    return notes


def to_markdown(comparison: Comparison, pictures: Sequence[str] = ()) -> str:
    """`pictures`: files of the curves, as links."""
    parts = [f"# {comparison.title}"]
    if comparison.warning:
        parts.append(f"**Warning: {_text(comparison.warning)}**")
    parts.append(_text(comparison.result))
    for number, table in enumerate(comparison.tables):
        parts += [f"## {table.title}", _table(table)]
        if number == 0 and comparison.notes:
            parts.append("\n".join(f"- {_text(note)}" for note in comparison.notes))
    parts += [f"![curves](<{picture}>)" for picture in pictures]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rows = [[_text(cell) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" if cell else "" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    header = [_text(cell) for cell in table.header]
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def _text(cell: str) -> str:
    """Names of files and values may have anything in them; in a table it stays text in one cell."""
    one_line = " ".join(str(cell).split())
    return re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", one_line)
