"""Reads the files in a run's folder, and finds the best epoch in their rows."""

import csv
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.tables import OF_USERS
from engine.evaluation.best import Best
from engine.evaluation.scores import rank_of
from utils.errors import ConfigError, cause_of
from utils.files import content_of, replacing
from utils.text import csv_cell, csv_text

LARGEST = 1e39  # numbers this large are ignored as invalid; the largest float32 is 3.4e38
SUFFIXES = ("", "_ema")  # suffixes of the score columns: for the raw weights, and for the EMA weights
PICTURES = ("confusion.png", "mistakes.png", "correct.png", "train_batch.png")  # the files that engine/report draws


def read_text(path: Path) -> str:
    """Return the text of a file, or "" if there is no file. Bytes that are not UTF-8 (a damaged disk) become U+FFFD."""
    if not path.exists():
        return ""
    try:
        return content_of(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({cause_of(error)})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no file."""
    try:
        content = json.loads(read_text(path)) if path.exists() else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: damaged (not a JSON object); delete it to continue without its contents")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no file or it cannot be read."""
    try:
        return read_json(path)
    except ConfigError:
        return {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file, one for each epoch, or [] if there is no file."""
    rows = []
    for number, line in enumerate(filter(None, read_text(path).split("\n")), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        epoch = row.get("epoch") if isinstance(row, dict) else None
        if not isinstance(epoch, int) or not -1 <= epoch < 2**31:
            raise ConfigError(f"{path}: line {number} is damaged (not a JSON object with an epoch); delete that line")
        rows.append({key: value for key, value in row.items() if value is None or is_figure(value)})
    return rows


def is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST  # also false for NaN


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as {column: text}, or [] if there is none.

    Lines that a kill cut off are ignored.
    """
    text = read_text(path)
    text = text[: text.rfind("\n") + 1]  # the last number of a cut line may lack digits
    limit = csv.field_size_limit(2**27)  # restored below; a cell may contain all labels of an image
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        header = next(rows, [])
        return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]
    except csv.Error as error:
        raise ConfigError(f"{path}: damaged ({error}); delete it to continue without its contents") from None
    finally:
        csv.field_size_limit(limit)


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable], encoding: str = "utf-8") -> None:
    """Write a CSV file for spreadsheets, in which no cell is a formula. Names of files may be invalid UTF-8."""
    text = csv_text(map(csv_cell, row) for row in (columns, *rows))
    with replacing(path) as file:
        file.write(text.encode(encoding, errors="surrogateescape"))


def to_number(text: str) -> float | None:
    """Return the number in a string, or None if the string is empty or not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if is_figure(value) else None


def title_of(settings: dict[str, Any]) -> str:
    """Return the title of a run: its model and its data."""
    return f"{settings['MODEL.NAME']} on {name_of_data(settings)}"


def name_of_data(settings: dict[str, Any]) -> str:
    """Return the name of the folder of the images, for a user's own data set, or else of the data set."""
    path = Path(settings.get("DATA.DATA_PATH") or "")
    folder = path.parent if path.suffix.lower() in (".csv", ".parquet") else path
    name = folder.name or path.name
    return name if name and settings["DATA.DATASET"] in OF_USERS else settings["DATA.DATASET"]


def best_of(epochs: Sequence[Mapping[str, Any]], metric: str, suffixes: Sequence[str] = SUFFIXES) -> Best:
    """Return the best evaluation in these rows of metrics.jsonl (the first in a tie), or Best() if there is none."""
    evaluations = []
    for row, suffix in itertools.product(epochs, suffixes):
        value, loss = row.get(f"eval_{metric}{suffix}"), row.get(f"eval_loss{suffix}")
        if value is not None and row["epoch"] >= 0:
            evaluations.append(Best(value, row["epoch"] + 1, math.nan if loss is None else loss, suffix, metric=metric))
    return max(evaluations, key=lambda best: rank_of(best.metric, best.value, best.loss), default=Best())
