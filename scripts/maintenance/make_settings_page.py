"""Writes docs/settings.md and the columns in docs/tracking.md:  python scripts/maintenance/make_settings_page.py"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from configs.flags import FLAGS  # noqa: E402
from configs.paddlevit.translation import IGNORED  # noqa: E402
from configs.schema import START, Arguments  # noqa: E402
from configs.values import SETTINGS, START_SETTINGS, Setting, describe_bounds, to_text  # noqa: E402
from engine.record.metrics import COLUMNS, STEP_COLUMNS  # noqa: E402

INTRODUCTION = """\
# Settings

Made from `configs/schema.py` by `python scripts/maintenance/make_settings_page.py`; edit the sentences there.

A setting can come from several places; the last one in this list wins: the default below, the files that a file names
under `BASE`, the file given with `-cfg`, a flag, `-opts KEY=VALUE ...`. The settings of a run are saved in its folder as
`config.yaml`, each with its origin. With `-cfg`, that file repeats the run.

```yaml
BASE: common.yaml        # or a list; relative to this file's folder; the settings below override it
TRAIN:
    BASE_LR: 3e-3
    OPTIMIZER:
        BETAS: [0.9, 0.95]   # or (0.9, 0.95)
```

```
python main_single_gpu.py -cfg ./configs/vit_digits.yaml -epochs 5 -opts TRAIN.BASE_LR=1e-3 TRAIN.OPTIMIZER.BETAS=0.9,0.95
```

A value is read as its type below says, so `3e-3` is a number and `010` is 10. `None`, `null`, `~` or an empty value means
"not set". Words such as `adamw` may be written in any case. A key that is unknown, written twice, of another type or out of
bounds is an error. The message names the file and the nearest valid key.

A setting of type "arguments" is a section of keyword arguments for a constructor of another library. Files, and
`-opts MODEL.KWARGS.init_values=1e-5 MODEL.KWARGS.global_pool=avg`, add to it name by name; `MODEL.KWARGS=null` (in a file
`KWARGS: null`) first removes the arguments from earlier files. A value is a number, `true`, `false`, `null`, a text or a
list of these; `"3"` in quotes is a text.

Each setting has a role: **data**, the images and labels; **model**, its architecture and the preparation of its images;
**recipe**, the training of its weights; **machine**, the place and speed of the computation; **record**, the files and
messages. With `*` a resumed run (`-resume`) may use another value; any other change is refused, unless
`RESUME.ALLOW_CHANGED` names the setting.
"""

START_INTRODUCTION = """
## One start of the program

These control one start of the program. They are written like settings, with the section in front, but are not saved with
the run.

"""

IGNORED_INTRODUCTION = """
## Accepted without effect

Other keys of PaddleViT's files, which are accepted so that these work unmodified. A run whose file sets one logs a line.

"""

COLUMNS_PAGE = ROOT / "docs" / "tracking.md"
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", Arguments: "arguments"}
_FLAG_OF = {key: flag for group in FLAGS.values() for flag, (key, _) in group.items()}


def page() -> str:
    """Return the whole page."""
    sections: dict[str, list[Setting]] = {}
    for key, setting in SETTINGS.items():
        sections.setdefault(key.rpartition(".")[0], []).append(setting)
    tables = [f"\n## {section or 'The run'}\n\n{_table(settings)}" for section, settings in sections.items()]
    reasons = dict.fromkeys(IGNORED.values())
    ignored = [f"- {', '.join(f'`{key}`' for key in IGNORED if IGNORED[key] == why)}: {why}.\n" for why in reasons]
    start = START_INTRODUCTION + _table(START_SETTINGS.values())
    return "".join([INTRODUCTION, *tables, start, IGNORED_INTRODUCTION, *ignored])


def columns_page() -> str:
    """Return docs/tracking.md with the columns of metrics.csv and steps.csv."""
    text = COLUMNS_PAGE.read_text(encoding="utf-8")
    for file, columns in (
        ("metrics.csv", {column.name.replace(", ", "`, `"): column.meaning for column in COLUMNS}),
        ("steps.csv", STEP_COLUMNS),
    ):
        head = f"| column of `{file}` | |\n|---|---|\n"
        rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in columns.items())
        text = re.sub(re.escape(head) + r"(\|.*\n)*", lambda found, new=head + rows: new, text)
    return text


def _table(settings: Iterable[Setting]) -> str:
    head = "| Setting | Flag | For | Type | Default | Allowed | Meaning |\n|---|---|---|---|---|---|---|\n"
    return head + "".join(map(_row, settings))


def _row(setting: Setting) -> str:
    is_command = setting.role == START
    name = setting.key if is_command else setting.key.rpartition(".")[2]
    role = "start" if is_command else setting.role + "\\*" * setting.may_change
    flag = f"`{_FLAG_OF[setting.key]}`" if setting.key in _FLAG_OF else ""
    kind = ("list of " if setting.is_list else "") + _TYPES[setting.kind] + ("s" if setting.is_list else "")
    kind += "".join(f", or `{word}`" for word in setting.special)
    default = "not set" if setting.default in (None, "", (), Arguments()) else f"`{to_text(setting.default)}`"
    allowed = ", ".join(f"`{choice}`" for choice in setting.choices) or describe_bounds(setting).strip()
    return f"| `{name}` | {flag} | {role} | {kind} | {default} | {allowed} | {setting.help} |\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (ROOT / "docs" / "settings.md").write_text(page(), encoding="utf-8")
    COLUMNS_PAGE.write_text(columns_page(), encoding="utf-8")
