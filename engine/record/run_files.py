"""Reads the files of a run's folder: its settings with their origins, JSON, and tables that a kill may have cut off."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import yaml

from configs.arguments import add_argument, read_node
from configs.schema import Arguments
from configs.values import IMPLIED, OPEN_SECTIONS, SETTINGS, START_SETTINGS, convert, plain, today
from utils.errors import ConfigError, cause_of, not_a_file

# libyaml's loader where PyYAML has it: the report at the end of a run must not take time.
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def read_bytes(path: Path) -> bytes:
    try:
        if kind := not_a_file(path):
            raise ConfigError(f"{path}: not a file of a run: it is {kind}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({cause_of(error)}); check that it is there and its permissions"
        ) from None


def read_text(path: Path) -> str:
    """The text; bytes that are not UTF-8 (a damaged disk, another program) become question marks."""
    return read_bytes(path).decode("utf-8", errors="replace")


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """{full key: value} of all settings, and {full key: origin}, from the config.yaml of a run of any version.

    A setting that the file lacks is as runs of its version behaved; one that exists no more stays a text.
    """
    source = read_text(path)
    try:
        root = yaml.compose(source, Loader=LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1} " if mark else ""
        raise ConfigError(f"{path}: {where}is not valid YAML; restore the file, which the run itself wrote") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: has no settings; restore the file, which the run itself wrote")
    values = {key: IMPLIED.get(key, plain(setting.default)) for key, setting in SETTINGS.items()}
    origins = dict.fromkeys(values, "default")
    lines = source.split("\n")
    for key, node in _leaves(root):
        if key in START_SETTINGS:  # which versions up to 0.1.0 saved; only what kind of run it was is of interest
            if key == "EVAL" and isinstance(node, yaml.ScalarNode) and node.value == "true":
                values[key] = True
            origins[key] = "default" if source.split("\n")[node.end_mark.line].endswith("# default") else "config.yaml"
            continue
        section = next((each for each in OPEN_SECTIONS if key.startswith(f"{each}.")), key)
        try:
            text = read_node(node)
            if section != key:
                arguments = Arguments(values[section])
                values[section] = dict(add_argument(arguments, section, key, text, str(path)))
            else:
                values[key] = plain(convert(SETTINGS[key], text, str(path))) if key in SETTINGS else text
        except (ValueError, ConfigError) as error:  # of another version, or edited by hand
            if key in SETTINGS and SETTINGS[key].kind is not str:
                raise ConfigError(f"{error}; restore the file, which the run itself wrote") from None
            values[key] = node.value if isinstance(node, yaml.ScalarNode) else "?"
        line = lines[node.end_mark.line] if node.end_mark.line < len(lines) else ""
        comment = line[node.end_mark.column :].partition("# ")[2].strip()
        origins[section] = comment or "config.yaml"
    values = today(values)
    return values, dict.fromkeys(values, "config.yaml") | origins


def _leaves(node: yaml.MappingNode, prefix: str = ""):
    """(full key, node) of all that is no section."""
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is damaged: not a JSON object; delete it, what is read from it is then left out")
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file, by epoch, without a last line that a kill cut off; [] if there is no file."""
    if not path.exists():
        return []
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        epoch = row.get("epoch") if isinstance(row, dict) else None
        if not isinstance(epoch, int) or epoch < 0:
            if number == len(lines):
                break
            raise ConfigError(f"{path}: line {number} is damaged: not a JSON object with an epoch; delete that line")
        rows[epoch] = {key: value for key, value in row.items() if _is_figure(value)}
    return [rows[epoch] for epoch in sorted(rows)]


def _is_figure(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names of their columns; [] if there is no file."""
    columns, *rows = read_cells(path) or [[]]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_cells(path: Path) -> list[list[str]]:
    """The rows of a CSV file, its header first, without lines that a kill cut off; [] if there is no file."""
    if not path.exists():
        return []
    csv.field_size_limit(2**27)  # a cell may hold all labels of an image
    rows = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        header = next(rows, [])
        return [header, *(row for row in rows if len(row) == len(header))]
    except csv.Error as error:
        raise ConfigError(f"{path}: is damaged ({error}); delete it, what is read from it is then left out") from None


def to_numbers(row: dict[str, str]) -> dict[str, float | None]:
    """The figures of a row; what is empty or no finite number is None."""

    def number(text: str) -> float | None:
        try:
            value = float(text)
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    return {key: number(text) for key, text in row.items()}
