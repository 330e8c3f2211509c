"""Writes the table of the columns of metrics.csv and steps.csv into docs/tracking.md.

python scripts/maintenance/make_columns_table.py
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from engine.record.metrics import COLUMNS, STEP_COLUMNS  # noqa: E402

PAGE = ROOT / "docs" / "tracking.md"


def page() -> str:
    """The page with tables of today's columns."""
    text = PAGE.read_text(encoding="utf-8")
    for file, columns in (
        ("metrics.csv", {column.name.replace(", ", "`, `"): column.meaning for column in COLUMNS}),
        ("steps.csv", STEP_COLUMNS),
    ):
        head = f"| column of `{file}` | |\n|---|---|\n"
        rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in columns.items())
        text = re.sub(re.escape(head) + r"(\|.*\n)*", lambda found, new=head + rows: new, text)
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
