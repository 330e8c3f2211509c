"""Reads a run's folder: settings with their origins, state and metrics. A last row that a kill cut off is ignored."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from configs.schema import Arguments
from configs.tables import METRICS
from configs.values import OPEN_SECTIONS, SETTINGS, convert, plain, to_text, today
from configs.yaml_files import compose, read_node
from engine.evaluation.best import Best, Rival
from engine.evaluation.scores import ByGroups
from engine.record.saved_files import (
    SUFFIXES,
    best_of,
    is_figure,
    read_json,
    read_object,
    read_rows,
    read_table,
    read_text,
    to_number,
)
from utils.errors import ConfigError
from utils.runs import folder_of, is_locked, refuse_old_run
from utils.text import printable, redacted

# The keys of status.json that halfstep reads, grouped by type. Values of other types, and negative counts, are ignored.
TEXTS = "state reason kind host started time best_metric weights halfstep torch timm python device_name precision"
COUNTS = "total_epochs processes parameters training_images validation_images classes validation_classes"
COUNTS += " validation_images_in_training images_per_update"
NUMBERS = f"signal exit_code epoch {COUNTS}"
KINDS = {
    **dict.fromkeys([*TEXTS.split(), "validation_digest", "validation_images_held_out", "data_path"], str),
    **dict.fromkeys(NUMBERS.split(), int),
    **dict.fromkeys([*METRICS, "eta_seconds"], int | float),
    **{"about": dict, "best": dict, "highest": dict, "data": dict, "run": dict, "command": list, "left_out": list},
}
ENDS = ("done", "stopped", "save_failed", "failed")


def written(value: object) -> str:
    """Return a value as text, as in config.yaml but without credentials."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {to_text(each)}" for name, each in value.items()) or "{}"
    return redacted(to_text(value))


@dataclass(frozen=True)
class SavedRun:
    """The settings, state and metrics of a training run that has finished an epoch.

    The run may have been killed or may still be running. The metrics are a snapshot of its files.
    """

    folder: Path
    settings: dict[str, Any]  # {full key: plain value} of all settings, see `read_settings`
    origins: dict[str, str]  # {full key: 'flag -epochs', 'configs/x.yaml', 'default' ...}
    status: dict[str, Any]  # status.json; {} without that file
    epochs: list[dict[str, Any]]  # rows of metrics.jsonl; `epoch` counts from 0, and accuracies are in percent
    # The row of metrics.jsonl for the initial weights; {} if they were not evaluated.
    before: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | os.PathLike) -> "SavedRun":
        """Read the run in this folder. Raise ConfigError unless it is a training run with a finished epoch."""
        folder = folder_of(folder)
        if not folder.is_dir():
            what = "this is a file; give its folder" if folder.exists() else "no such folder; give the folder of a run"
            raise ConfigError(f"{folder}: {what}, for example output/train-20260102-03-04-05")
        if not (folder / "config.yaml").exists():
            inside = [each.parent.name for each in sorted(folder.glob("*/config.yaml"))]
            near = f"; give one of the runs inside it: {', '.join(inside[:5])}" if inside else ""
            raise ConfigError(f"{folder} is not the folder of a run, because it has no config.yaml{near}")
        status = read_status(folder)
        refuse_old_run(folder, status.get("about", {}).get("halfstep"))
        settings, origins = read_settings(folder / "config.yaml")
        rows = read_rows(folder / "metrics.jsonl")
        epochs = [row for row in rows if row["epoch"] >= 0]
        if status.get("kind") == "eval":
            raise ConfigError(
                f"{folder}: this is an evaluation (-eval), which has no epochs; give the folder of a training run"
            )
        if not epochs:
            reason = f" ({status['reason']})" if status.get("reason") else ""
            raise ConfigError(
                f"{folder}: this run has not finished an epoch yet{reason}; wait for it, or continue it with "
                f"-resume {folder}"
            )
        return cls(folder, settings, origins, status, epochs, next((row for row in rows if row["epoch"] < 0), {}))

    @cached_property
    def steps(self) -> list[dict[str, float | None]]:
        """Return the rows of steps.csv, one per report. Values that are empty or not finite are None."""
        rows = [{key: to_number(text) for key, text in row.items()} for row in read_table(self.folder / "steps.csv")]
        return [row for row in rows if row.get("step") is not None]

    @property
    def num_epochs(self) -> int:
        """Return the number of finished epochs."""
        return self.epochs[-1]["epoch"] + 1

    @property
    def speed(self) -> float | None:
        """Return the median of the epochs' images per second.

        The median ignores the first epoch, which is slow, and single disturbed epochs.
        """
        speeds = [row["images_per_s"] for row in self.epochs if (row.get("images_per_s") or 0) > 0]
        return statistics.median(speeds) if speeds else None

    @property
    def memory(self) -> float | None:
        """Return the peak memory in bytes."""
        return max((2**20 * row["memory_mb"] for row in self.epochs if row.get("memory_mb")), default=None)

    @property
    def planned_epochs(self) -> int:
        """Return the number of epochs from the settings, or the number that a budget has chosen."""
        chosen = self.status.get("total_epochs") if self.settings["TRAIN.BUDGET"] else None
        return chosen or self.settings["TRAIN.NUM_EPOCHS"]

    @property
    def num_skipped(self) -> int:
        """Return the number of skipped updates. Updates of an unfinished last epoch count too."""
        of_epochs: dict[int, int] = {}
        for row in [*self.steps, *self.epochs]:  # each row counts from the start of its epoch
            epoch = int(row.get("epoch") or 0)
            of_epochs[epoch] = max(of_epochs.get(epoch, 0), int(row.get("skipped") or 0))
        return sum(of_epochs.values())

    @property
    def run_facts(self) -> dict[str, Any]:
        """Return the facts in status.json (device, versions, numbers of images), or {} without that file."""
        return self.status.get("about", {})

    @property
    def state(self) -> str:
        """Return one of ENDS, `running`, `killed` (ended without a final state), or `unknown` (no status.json)."""
        state = self.status.get("state")
        if not state:
            return "unknown"
        if state in ENDS:
            return str(state)
        return "running" if is_locked(self.folder) else "killed"

    @property
    def metric(self) -> str:
        """Return the metric that decides which epoch is best."""
        name = self.settings["TRAIN.BEST_METRIC"]
        return name if name in METRICS else "top1"  # the file may have been edited by hand

    @cached_property
    def suffixes(self) -> Sequence[str]:
        """Return the suffixes of evaluation columns: '', and '_ema' if the run has an EMA."""
        return [each for each in SUFFIXES if any(row.get(f"eval_loss{each}") is not None for row in self.epochs)]

    @cached_property
    def best(self) -> Best:
        """Return the evaluation of the epoch in best.pth. If the metrics lack that epoch, return their best evaluation.

        Epochs count from 1. Epoch 0 is the start of a new classifier.
        """
        saved = self.status.get("best", {})
        number, rows = saved.get("epoch"), self.epochs
        suffixes = {"raw": ("",), "ema": ("_ema",)}.get(saved.get("weights"), SUFFIXES)
        on_disk = best_of([row for row in rows if row["epoch"] + 1 == number], self.metric, suffixes)
        if on_disk.exists and "highest" in saved:
            on_disk = replace(on_disk, rival=Rival.of(saved["highest"]))
        if number == 0 and self.before:
            on_disk = replace(best_of([self.before | {"epoch": 0}], self.metric), epoch=0)
        best = on_disk if on_disk.exists else best_of(self.epochs, self.metric)
        # Unreadable images are not scored. results.json counts the scored images, and status.json all images.
        results = read_object(self.folder / "results.json")
        scored, groups, interval = (results.get(key) for key in ("num_images", "num_groups", "interval"))
        num_images = scored if isinstance(scored, int) else self.run_facts.get("validation_images", 0)
        by_groups = None
        if isinstance(groups, int) and results.get("epoch") == best.epoch:
            by_groups = ByGroups(groups, *(interval if isinstance(interval, list) else ()))
        return replace(best, num_images=num_images if best.exists else 0, by_groups=by_groups)

    @property
    def seconds(self) -> float | None:
        """Return the total seconds of training and evaluation, or None if a row of metrics.jsonl lacks a time."""
        parts = [row.get(f"{part}_seconds") for row in self.epochs for part in ("train", "eval")]
        return None if None in parts else sum(parts)

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """Return the first and last update of each range of updates that a rollback left out."""
        pairs = [each for each in self.status.get("left_out", []) if isinstance(each, list) and len(each) == 2]
        return [(first, last) for first, last in pairs if isinstance(first, int) and isinstance(last, int)]


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return {full key: value} of all settings, and {full key: origin}, from the config.yaml of a run.

    The value of an unknown setting stays a string.
    """
    source = read_text(path)
    try:
        root = compose(source, str(path))
    except ConfigError as error:
        raise ConfigError(f"{error}; restore the file as the run wrote it") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: has no settings; restore the file as the run wrote it")
    values = {key: plain(setting.default) for key, setting in SETTINGS.items()}
    origins = dict.fromkeys(values, "default")
    lines = source.split("\n")
    for key, node in _leaves(root):
        section = next((each for each in OPEN_SECTIONS if key.startswith(f"{each}.")), key)
        try:
            text = read_node(node)
            if section != key:
                from configs.arguments import add_argument

                arguments = Arguments(values[section])
                values[section] = dict(add_argument(arguments, section, key, text, str(path)))
            else:
                values[key] = plain(convert(SETTINGS[key], text, str(path))) if key in SETTINGS else text
        except (ValueError, ConfigError) as error:  # the file may have been edited by hand
            if key in SETTINGS and SETTINGS[key].kind is not str:
                raise ConfigError(f"{error}; restore the file as the run wrote it") from None
            values[key] = node.value if isinstance(node, yaml.ScalarNode) else "?"
        line = lines[node.end_mark.line] if node.end_mark.line < len(lines) else ""
        comment = line[node.end_mark.column :].partition("# ")[2].strip()
        origins[section] = comment or "config.yaml"
    values = today(values)
    return values, dict.fromkeys(values, "config.yaml") | origins


def _leaves(node: yaml.MappingNode, prefix: str = ""):
    """Yield (full key, node) of every value that is not a section."""
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_status(folder: Path) -> dict[str, Any]:
    """Return the values in a run's status.json, except those with an unexpected type."""
    status = _of_their_kinds(read_json(folder / "status.json"))
    return status | {name: _of_their_kinds(status[name]) for name in ("about", "best") if name in status}


def _of_their_kinds(facts: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in facts.items() if isinstance(value, KINDS.get(name, ()))}
    if not all(isinstance(word, str) for word in kept.get("command", ())):
        del kept["command"]
    kept = {name: printable(value) if isinstance(value, str) else value for name, value in kept.items()}
    kept = {name: value for name, value in kept.items() if not isinstance(value, int | float) or is_figure(value)}
    return {name: value for name, value in kept.items() if name not in COUNTS.split() or value >= 0}
