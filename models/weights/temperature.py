"""Reads the calibration that a run stores with its best weights (extras/calibration), and checks its temperature."""

import math
from pathlib import Path
from typing import Any

from utils.errors import naming_damage

KEY = "calibration"  # in a checkpoint, and in the metadata of an export


def calibration_of(state: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """Return the calibration in a checkpoint or export, or {} if it has none for exactly the weights under `key`.

    last.pth also holds the calibration of the best epoch, and best.pth may hold raw weights besides a calibrated EMA.
    """
    with naming_damage(path):
        found = state.get(KEY) or {}
        if found.get("weights") != key:
            return {}
        if "epoch" in state and (state["epoch"] + 1, state["step"]) != (found["epoch"], found["step"]):
            return {}
        if "temperature" in found:
            check_temperature(found["temperature"], state["config"]["MODEL.NUM_CLASSES"] or len(state["class_names"]))
        return found


def check_temperature(temperature: float | list[float], num_classes: int) -> None:
    """Raise ValueError unless the temperature is a finite positive number, or a list with one such number per class."""
    values = temperature if isinstance(temperature, list) else [temperature]
    is_whole = len(values) == (num_classes if isinstance(temperature, list) else 1)
    if not (is_whole and all(isinstance(each, float) and 0 < each < math.inf for each in values)):
        raise ValueError(f"the temperature is {temperature}"[:200])
