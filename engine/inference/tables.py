"""Tables of predictions: CSV with a row for each class of an image, and one JSON document."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.inference.predictor import Prediction
from utils.errors import DataError, cause_of
from utils.files import write_text

COLUMNS = ("image_path", "rank", "class", "probability")


def as_csv(predictions: Sequence[Prediction]) -> str:
    lines = io.StringIO()
    rows = [
        (each.path, rank, guess.name, f"{guess.probability:.6f}")
        for each in predictions
        for rank, guess in enumerate(each.guesses, start=1)
    ]
    csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *rows])
    return lines.getvalue()


def as_json(predictions: Sequence[Prediction], facts: dict[str, Any], unreadable: Sequence[str]) -> str:
    """`facts`: the model and its preprocessing; `unreadable`: paths of images that have no prediction."""
    images = [
        {
            "image_path": each.path,
            "predictions": [
                {"class": guess.name, "number": guess.number, "probability": round(guess.probability, 6)}
                for guess in each.guesses
            ],
        }
        for each in predictions
    ]
    return json.dumps(facts | {"images": images, "unreadable": list(unreadable)}, indent=1) + "\n"


def write_table(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {cause_of(error)}") from None
