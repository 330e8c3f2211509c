"""Read the class weights from the CSV file that TRAIN.CLASS_WEIGHTS names."""

import csv
import math
from pathlib import Path
from unicodedata import normalize

from utils.errors import ConfigError, did_you_mean
from utils.files import read_names
from utils.text import counted, first_of

LIGHTEST, HEAVIEST = 1e-6, 1e6  # limits of a weight; in float32, 1e-46 would be 0 and 1e39 infinite


def read_weights(file: Path, classes: list[str]) -> list[float]:
    """Return the class weights from a file that lists each class once, by name or number."""
    setting = f"TRAIN.CLASS_WEIGHTS: {file}"
    numbers = {str(number): number for number in range(len(classes))}
    numbers |= {normalize("NFC", name): number for number, name in enumerate(classes)}
    weights: dict[int, float] = {}
    for name, text in _read_rows(file):
        number = numbers.get(normalize("NFC", name))
        if number is None:
            raise ConfigError(f"{setting}: the data has no class {name!r}{did_you_mean(name, classes)}")
        if number in weights:
            raise ConfigError(f"{setting} has class {classes[number]!r} twice; remove one of its weights")
        try:
            weights[number] = float(text)
        except ValueError:
            weights[number] = math.nan
        if not LIGHTEST <= weights[number] <= HEAVIEST:
            raise ConfigError(
                f"{setting}: the weight of class {name!r} is {text!r}; it must be a number from {LIGHTEST:g} "
                f"to {HEAVIEST:g}"
            )
    missing = [name for number, name in enumerate(classes) if number not in weights]
    if missing:
        raise ConfigError(
            f"{setting} has no weight for {counted(len(missing), 'class')}: {first_of(missing)}; add a line for each; "
            "a weight of 1 changes nothing"
        )
    return [weights[number] for number in range(len(classes))]


def _read_rows(file: Path) -> list[list[str]]:
    """Return class and weight of each line of a CSV file, with or without a header."""
    setting = f"TRAIN.CLASS_WEIGHTS: {file}"
    expects = "name a CSV file with a class and its weight in each line, such as `cat,2.5`, or auto"
    try:
        rows = [[value.strip() for value in row] for row in csv.reader(read_names(file).splitlines()) if row]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"{setting} cannot be read ({error}); {expects}") from error
    has_header = bool(rows) and rows[0][-1].lower() in ("weight", "weights")
    rows = rows[has_header:]
    if not rows or any(len(row) != 2 for row in rows):
        raise ConfigError(f"{setting} has lines that are not a class and its weight; {expects}")
    return rows
