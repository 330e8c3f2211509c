"""A run as its folder describes it."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.evaluation.scores import Best, rank_of
from engine.record.run_files import read_cells, read_json, read_rows, read_settings, read_table, read_text, to_numbers
from utils.errors import ConfigError

ENDS = ("done", "stopped", "save_failed", "failed")
SILENT_SECONDS = 15 * 60  # a run on another host whose status.json is older than this is taken for dead
SUFFIXES = ("", "_ema")  # of the columns of raw and EMA weights


@dataclass(frozen=True)
class SavedRun:
    """The settings, state and figures of a training run that has finished an epoch, of this or an older version.

    It may have been killed or still be going: the figures are those that are in the folder now.
    """

    folder: Path
    settings: dict[str, Any]  # {full key: plain value}; all of them, see `read_settings`
    origins: dict[str, str]  # {full key: 'flag -epochs', 'configs/x.yaml', 'default' ...}
    status: dict[str, Any]  # status.json; {} in folders of early versions
    epochs: list[
        dict[str, Any]
    ]  # metrics.jsonl, a row for each epoch; `epoch` counts from 0, accuracies are in percent

    @classmethod
    def open(cls, folder: str | os.PathLike) -> "SavedRun":
        """Read a run's folder. A folder that has no finished epoch of a training run is a ConfigError."""
        folder = Path(folder)
        if not folder.is_dir():
            what = "a file; give the folder that it is in" if folder.exists() else "no such folder; give that of a run"
            raise ConfigError(f"{folder}: {what}, for example output/train-20260102-03-04-05")
        if not (folder / "config.yaml").exists():
            inside = [each.parent.name for each in sorted(folder.glob("*/config.yaml"))]
            near = f"; it contains runs, give one of them: {', '.join(inside[:5])}" if inside else ""
            raise ConfigError(f"{folder}: not the folder of a run, without config.yaml{near}")
        settings, origins = read_settings(folder / "config.yaml")
        epochs = read_rows(folder / "metrics.jsonl")
        status = read_json(folder / "status.json")
        if settings.pop("EVAL", False) or status.get("kind") == "eval":
            raise ConfigError(
                f"{folder}: an evaluation (-eval), which has no epochs; give the folder of a training run"
            )
        if not epochs:
            reason = f" ({status['reason']})" if status.get("reason") else ""
            raise ConfigError(
                f"{folder}: this run has not finished an epoch yet{reason}; wait for it, or go on with it: -resume {folder}"
            )
        return cls(folder, settings, origins, status, epochs)

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a CSV file in the folder, as text; [] if it is not there."""
        return read_table(self.folder / name)

    def numbers(self, name: str) -> list[dict[str, float | None]]:
        """The rows of a CSV file of figures; what is empty or not finite is None."""
        return [to_numbers(row) for row in self.table(name)]

    def cells(self, name: str) -> list[list[str]]:
        """The cells of a CSV file in the folder, its header first; [] if it is not there."""
        return read_cells(self.folder / name)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file in the folder; {} if it is not there."""
        return read_json(self.folder / name)

    def text(self, name: str) -> str:
        """The text of a file in the folder; empty if it is not there."""
        path = self.folder / name
        return read_text(path) if path.exists() else ""

    def file(self, name: str) -> Path | None:
        """The path of a file in the folder, if it is there."""
        path = self.folder / name
        return path if path.is_file() else None

    @cached_property
    def steps(self) -> list[dict[str, float | None]]:
        """steps.csv: figures of single updates, a row for each report."""
        return [row for row in self.numbers("steps.csv") if row.get("step") is not None]

    @cached_property
    def skipped(self) -> dict[int, int]:
        """{epoch from 0: updates that were skipped in it}, the unfinished last one too."""
        rows = [(int(row.get("epoch") or 0), row.get("skipped")) for row in self.steps]
        rows += [(row["epoch"], row.get("skipped")) for row in self.epochs]
        found: dict[int, int] = {}
        for epoch, number in rows:  # it grows within an epoch
            found[epoch] = max(found.get(epoch, 0), int(number or 0))
        return found

    @property
    def about(self) -> dict[str, Any]:
        """What the run noted of itself: device, versions, numbers of images. {} in older versions."""
        about = self.status.get("about")
        return about if isinstance(about, dict) else {}

    @property
    def state(self) -> str:
        """One of ENDS, `running`, `killed` (it ended without a word), or `unknown` without status.json."""
        state = self.status.get("state")
        if not state:
            return "unknown"
        if state in ENDS:
            return str(state)
        return "running" if self._is_alive() else "killed"

    def _is_alive(self) -> bool:
        pid, beat = self.status.get("pid"), to_time(self.status.get("heartbeat") or self.status.get("time"))
        if self.status.get("host") == socket.gethostname() and isinstance(pid, int) and pid > 0:
            try:
                os.kill(pid, 0)  # sends nothing
            except PermissionError:  # it is somebody else's
                return True
            except (OSError, OverflowError):
                return False
            return True
        return beat is not None and time.time() - beat < SILENT_SECONDS

    @property
    def metric(self) -> str:
        """The metric that decides which epoch is best."""
        return self.settings["TRAIN.BEST_METRIC"]

    @property
    def is_higher_better(self) -> bool:
        return self.metric != "loss"

    @cached_property
    def suffixes(self) -> Sequence[str]:
        """'' and, where the run keeps an EMA, '_ema': endings of the columns of evaluations."""
        return [each for each in SUFFIXES if any(row.get(f"eval_loss{each}") is not None for row in self.epochs)]

    @cached_property
    def best(self) -> Best:
        """The best epoch, which counts from 1: that of best.pth, else of the figures. Its epoch is 0 without evaluations."""
        held = self.status.get("best")
        held = held.get("epoch") if isinstance(held, dict) else None
        found = [each for row in self.epochs for each in self._evaluations(row)]
        on_disk = [each for each in found if each.epoch == held]
        candidates = on_disk or found
        return max(candidates, key=lambda each: rank_of(each.metric, each.value, each.loss), default=Best())

    def _evaluations(self, row: dict[str, Any]) -> list[Best]:
        """What the epoch's evaluation found, for each kind of weights."""
        images, metric = self.about.get("validation_images"), self.metric
        found = []
        for suffix in self.suffixes:
            value, loss = row.get(f"eval_{metric}{suffix}"), row.get(f"eval_loss{suffix}")
            if value is not None:
                loss = float("nan") if loss is None else loss
                found.append(Best(value, row["epoch"] + 1, loss, suffix, images or 0, metric))
        return found

    @cached_property
    def seconds(self) -> float | None:
        """How long its epochs took in all, in all starts together; None for a run of an older version that was resumed."""
        parts = [row.get(f"{part}_seconds") for row in self.epochs for part in ("train", "eval")]
        if None not in parts:
            return sum(parts)
        start, end = (to_time(self.status.get(key)) for key in ("started", "time"))
        is_one_start = self.origins.get("MODEL.RESUME", "default") == "default"
        return end - start if start and end and is_one_start and self.state in ENDS else None

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """First and last of each series of updates that a rollback left out."""
        spans = self.status.get("left_out")
        found = [span for span in spans if isinstance(span, list)] if isinstance(spans, list) else []
        return [(span[0], span[1]) for span in found if [type(each) for each in span] == [int, int]]

    @property
    def ended(self) -> float | None:
        """When it reached its state, in seconds since 1970."""
        return to_time(self.status.get("time"))

    @property
    def started(self) -> float | None:
        """When its last start began, in seconds since 1970."""
        return to_time(self.status.get("started"))


def to_time(text: object) -> float | None:
    """Seconds since 1970 of a date as in status.json."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def written_date(seconds: float | None) -> str:
    """2026-01-02 03:04, of seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
