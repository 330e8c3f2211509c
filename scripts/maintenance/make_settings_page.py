"""Writes the generated tables of the documentation:  python scripts/maintenance/make_settings_page.py"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from configs.flags import FLAGS  # noqa: E402
from configs.schema import START, Arguments  # noqa: E402
from configs.tables import SOURCES, TORCH_OPTIMIZERS  # noqa: E402
from configs.values import ALL_SETTINGS, SETTINGS, Setting, describe_bounds, to_text  # noqa: E402
from engine.record.columns import COLUMNS, STEP_COLUMNS  # noqa: E402

INTRODUCTION = """\
# Settings

Generated from `configs/schema.py` by `python scripts/maintenance/make_settings_page.py`; edit the descriptions there.

The last of these places wins: the default below, the files that a file names under `BASE`, the file given with `-cfg`,
a flag, `-opts KEY=VALUE ...`. A run saves its settings as `config.yaml`; with `-cfg`, that file repeats the run.

```
halfstep train -cfg configs/vit_digits.yaml -epochs 5 -opts TRAIN.BASE_LR=1e-3 TRAIN.OPTIMIZER.BETAS=0.9,0.95
```

The type decides how a value is read: `3e-3` is a number, and `010` is 10. `None`, `null`, `~` or an empty value means
"not set", and so does an empty default below. "Arguments" are keyword arguments for a constructor of another library,
set one by one: `-opts MODEL.KWARGS.init_values=1e-5`; `MODEL.KWARGS=null` removes those of earlier files.

A resumed run may change settings that are marked with `*`, and others if `RESUME.ALLOW_CHANGED` names them.
"""

_TYPES = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Arguments: "arguments"}
_FLAG_OF = {key: flag for group in FLAGS.values() for flag, (key, _) in group.items()}


def page() -> str:
    """Return the text of docs/settings.md."""
    sections: dict[str, list[Setting]] = {}
    for key, setting in SETTINGS.items():
        sections.setdefault(key.rpartition(".")[0], []).append(setting)
    tables = [f"\n## {section or 'The run'}\n\n{_table(settings)}" for section, settings in sections.items()]
    of_start = (setting for setting in ALL_SETTINGS.values() if setting.role == START)
    start = f"\n## One start of the program\n\n{_table(of_start)}"
    return "".join([INTRODUCTION, *tables, start])


def with_tables(path: str, *tables: tuple[Sequence[str], Iterable[str]]) -> str:
    """Return the page at `path` after replacing the rows of some tables. `tables`: (header, new rows) of each."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for titles, rows in tables:
        columns = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
        assert columns in text, f"{path}: add a table with the header {columns}"
        lines = "".join(f"{row}\n" for row in rows)
        text = re.sub(re.escape(columns) + r"(\|.*\n)*", lambda _, new=columns + lines: new, text)
    return text


def column_rows() -> list[str]:
    return [f"| `{column.name.replace(', ', '`, `')}` | {column.meaning} |" for column in COLUMNS]


def step_rows() -> list[str]:
    names: dict[str, list[str]] = {}  # {meaning: the columns that have it}
    for name, meaning in STEP_COLUMNS.items():
        names.setdefault(meaning, []).append(f"`{name}`")
    return [f"| {', '.join(each)} | {meaning} |" for meaning, each in names.items()]


def source_rows() -> Iterator[str]:
    """Yield a table row for each data set, with the settings that have an effect only for this data set."""
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/data.md").read_text(encoding="utf-8"), re.M)
    sections = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    for name, row in SOURCES.items():
        section = row.section or name
        title = f"[`{name}`](#{section})" if section in sections else f"`{name}`"
        only = {setting.key: setting.only for setting in SETTINGS.values() if setting.only}
        own = ", ".join(f"`{key}`" for key, each in only.items() if "DATA.DATASET" in each.keys and name in each.values)
        yield f"| {title} | {row.sentence} | {row.split} | {own} |"


def optimizer_rows() -> Iterator[str]:
    for name, row in TORCH_OPTIMIZERS.items():
        settings = ", ".join(f"`{each}`" for each in row.settings)
        low, high = row.usual_rates
        yield f"| `{name}` | {row.sentence} | {settings} | {low:g} to {high:g} |"


def _table(settings: Iterable[Setting]) -> str:
    head = "| Setting, flag | Value | Default | Meaning |\n|---|---|---|---|\n"
    return head + "".join(map(_row, settings))


def _row(setting: Setting) -> str:
    is_command = setting.role == START
    name = f"`{setting.key if is_command else setting.key.rpartition('.')[2]}`"
    if setting.may_change and not is_command:
        name += "\\*"
    flag = f" `{_FLAG_OF[setting.key]}`" if setting.key in _FLAG_OF else ""
    kind = ("list of " if setting.is_list else "") + _TYPES[setting.kind] + ("s" if setting.is_list else "")
    bounds = describe_bounds(setting).replace(" from ", "", 1)
    if setting.kind is float and bounds and not setting.is_list:
        kind = bounds
    elif bounds:
        kind += f", {bounds}"
    value = ", ".join(f"`{choice}`" for choice in setting.choices) or kind
    value += "".join(f", or `{word}`" for word in setting.special)
    default = "" if setting.default in (None, "", (), Arguments()) else f"`{to_text(setting.default)}`"
    return f"| {name}{flag} | {value} | {default} | {setting.help} |\n"


def data_page() -> str:
    return with_tables("docs/data.md", (("name", "data", "split", "own settings"), source_rows()))


def training_page() -> str:
    titles = ("torch's", "what it is", "settings", "usual learning rates per 256 images")
    return with_tables("docs/training.md", (titles, optimizer_rows()))


def tracking_page() -> str:
    of_epochs = (("column of `metrics.csv`", "meaning"), column_rows())
    of_steps = (("column of `steps.csv`", "meaning"), step_rows())
    return with_tables("docs/tracking.md", of_epochs, of_steps)


# {page: the function that returns its text}
PAGES = {
    "docs/settings.md": page,
    "docs/data.md": data_page,
    "docs/training.md": training_page,
    "docs/tracking.md": tracking_page,
}

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, write in PAGES.items():
        (ROOT / path).write_text(write(), encoding="utf-8")
