"""Writes the table of PaddleViT's other families into docs/from-paddlevit.md.

python scripts/maintenance/make_paddlevit_table.py
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from configs.load import load  # noqa: E402
from models import build_model  # noqa: E402
from utils.errors import ConfigError  # noqa: E402

PAGE = ROOT / "docs" / "from-paddlevit.md"
HEADER = "| PaddleViT's file | timm's model | parameters |\n|---|---|---|\n"
# What each file sets of model and images, by family and name.
FILES: dict[str, dict[str, str | list]] = json.loads((ROOT / "tests/data/paddlevit_families.json").read_text())


def row(file: str, folder: Path) -> str:
    """The table's line of a file, from the model that its settings build for 1000 classes, without memory."""
    path = folder / Path(file).name
    path.write_text("".join(f"{line}\n" for line in as_yaml(FILES[file])))
    try:
        config = load(["-cfg", str(path)]).config
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ").partition(";")[0]
        return f"| {file} | refused: {reason} | |\n"
    with torch.device("meta"):
        model = build_model(config, 1000)
    return f"| {file} | {config.MODEL.NAME} | {sum(each.numel() for each in model.parameters()):,} |\n"


def as_yaml(settings: dict[str, str | list]) -> list[str]:
    """The lines of a settings file with these values by full key."""
    lines: list[str] = []
    opened: list[str] = []
    for key, value in sorted(settings.items(), key=lambda item: (item[0].rpartition(".")[0], item[0])):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != opened[: depth + 1]:
                lines.append(f"{'    ' * depth}{section}:")
        opened = sections
        lines.append(f"{'    ' * len(sections)}{name}: {json.dumps(value) if isinstance(value, list) else value}")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    above = PAGE.read_text(encoding="utf-8").partition(HEADER)[0]
    with tempfile.TemporaryDirectory() as name:
        rows = [row(file, Path(name)) for file in FILES]
    PAGE.write_text(above + HEADER + "".join(rows), encoding="utf-8")
