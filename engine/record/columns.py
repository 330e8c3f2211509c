"""The columns of metrics.csv and steps.csv, their values, and their texts on the terminal and in log.txt.

`epoch_row` computes an epoch's metrics for tables, trackers, the terminal and log.txt. COLUMNS describes them.
"""

import math
import resource
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from configs.tables import METRICS
from engine.evaluation.scores import USUAL, Scores
from engine.train.clock import PHASES
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.text import counted

Row = dict[str, float | None]


class Epoch(NamedTuple):
    """The inputs of an epoch's metrics.

    Process 0 computes metrics more often than the other processes, so metrics may not use collectives.
    """

    trainer: Trainer
    result: EpochResult

    def score(self, name: str, digits: int = 4) -> float | None:
        """Return a score of the raw weights, or None if the epoch was not evaluated or the score is not finite."""
        scores = self.result.scores.get("")
        return finite(getattr(scores, name), digits) if scores else None

    def further_scores(self) -> Row:
        """Return the raw weights' scores other than loss, top-1 and top-5, and all scores of the EMA weights."""
        row: Row = {}
        for suffix, scores in self.result.scores.items():
            figures = scores.more() if not suffix else {"top1": scores.top1, "top5": scores.top5} | scores.more()
            row |= {f"eval_loss{suffix}": finite(scores.loss)} if suffix else {}
            row |= {f"eval_{name}{suffix}": finite(value, 4) for name, value in figures.items()}
        return row

    @property
    def images_per_s(self) -> float:
        return self.result.num_images / max(self.result.training_seconds, 1e-9)


class Column(NamedTuple):
    """A column of metrics.csv. `epoch_row` computes its value."""

    name: str
    meaning: str
    # A column with a title is also shown in the epoch's line on a terminal, in this format.
    title: str = ""
    text: str = "{:.4f}"
    width: int = 8
    is_repeatable: bool = True  # false for measurements that differ between identical runs, such as times


OF_LAYERS = "; with `TRAIN.LAYER_DECAY`, that of the classifier"
# The first six columns are the columns of timm's summary.csv. Scores are in percent unless the meaning says otherwise.
COLUMNS = (
    Column("epoch", "number of the epoch, from 0; -1: evaluation of the initial weights, before training"),
    Column("train_loss", "mean training loss", title="loss", width=6),
    Column("eval_loss", "validation loss", title="val loss"),
    Column("eval_top1", "validation top-1 accuracy"),
    Column("eval_top5", "validation top-5 accuracy"),
    Column("lr", f"learning rate of the last update{OF_LAYERS}"),
    Column("train_top1", "top-1 accuracy on augmented training images"),
    Column(
        ", ".join(f"eval_{name}" for name in METRICS if name not in USUAL),
        "further scores, if the task of the run has them; names of the EMA's scores end in `_ema`",
    ),
    Column("step", "total number of updates at the end of the epoch"),
    Column("images_per_s", "training images per second", title="images/s", text="{:,.0f}", is_repeatable=False),
    Column("data_wait_pct", "percentage of the training time spent waiting for data", is_repeatable=False),
    Column("memory_mb", "peak memory of the device in MiB (on CPUs: of process 0)", is_repeatable=False),
    Column("loss_scale", "loss scale in half precision"),
    Column("skipped", "updates skipped in the epoch"),
    Column("grad_norm", "mean norm of the gradient"),
    Column("train_seconds", "training time in seconds", is_repeatable=False),
    Column("eval_seconds", "evaluation time in seconds", is_repeatable=False),
)
# The columns of steps.csv, which has one row per report. Their values are fields of `Report`.
STEP_COLUMNS = {
    "step": "number of the update, from 0",
    "epoch": "number of the epoch, from 0",
    "lr": f"learning rate{OF_LAYERS}",
    "loss": "training loss of the update",
    "mean_loss": "mean training loss of the epoch so far",
    "grad_norm": "norm of the gradient",
    "loss_scale": "loss scale in half precision",
    "skipped": "updates skipped in the epoch so far",
    "num_updates": "with `TRAIN.BUDGET`: the planned number of updates of the whole run",
    "seconds": "time since the last report, in seconds",
    **{f"{name}_pct": "percentage of `seconds` spent in this [phase](speed.md#where-the-time-goes)" for name in PHASES},
}


def epoch_row(epoch: Epoch) -> Row:
    """Return the row of metrics.csv for an epoch. Its columns have the order of COLUMNS."""
    trainer, result, report = epoch.trainer, epoch.result, epoch.result.report
    return {
        "epoch": trainer.epoch,
        "train_loss": finite(report.mean_loss),
        "eval_loss": epoch.score("loss", 6),
        "eval_top1": epoch.score("top1"),
        "eval_top5": epoch.score("top5"),
        "lr": report.lr,
        "train_top1": finite(100 * report.accuracy),
        **epoch.further_scores(),
        "step": trainer.step,
        "images_per_s": round(epoch.images_per_s, 1),
        "data_wait_pct": epoch.result.times.get("data"),
        "memory_mb": round(peak_memory(trainer.process.device) / 2**20),
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
        "grad_norm": round(report.mean_grad_norm, 6),
        "train_seconds": round(result.training_seconds, 3),
        "eval_seconds": round(result.evaluation_seconds, 3),
    }


def terminal_text(column: Column, value: float | None) -> str:
    """Return the value of a column with a title, as it is shown on a terminal."""
    if value is None:
        return "-"
    if column.name == "images_per_s" and value < 10:
        return f"{value:.2f}"
    return column.text.format(value)


def training_texts(row: Row) -> Iterator[str]:
    """Yield the figures of an epoch's training in log.txt."""
    yield f"Train Loss: {math.nan if row['train_loss'] is None else row['train_loss']:.4f}"
    if row["train_top1"] is not None:
        yield f"Train Acc: {row['train_top1'] / 100:.4f}"
    yield f"time: {row['train_seconds']:.2f}"


def machine_texts(row: Row) -> Iterator[str]:
    """Yield an epoch's speed, memory and numerical problems for log.txt."""
    yield f"{row['images_per_s']:.1f} images/s"
    yield f"{row['memory_mb']:.0f} MB"
    if row["loss_scale"] != 1:
        yield f"loss scale {row['loss_scale']:g}"
    if row["skipped"]:
        yield f"{counted(row['skipped'], 'update')} skipped"


def start_row(trainer: Trainer, scores: Scores, seconds: float) -> Row:
    """Return the row of metrics.csv for the evaluation of the initial weights. Training metrics are empty."""
    nothing = Report(*[math.nan] * 11)
    row = epoch_row(Epoch(trainer, EpochResult(nothing, {"": scores}, 0, 0.0, seconds)))
    measured = {key: value for key, value in row.items() if value is not None and math.isfinite(value)}
    return dict.fromkeys(row) | measured | {"epoch": -1}


def finite(value: float, digits: int = 6) -> float | None:
    """Return the value rounded for a table, or None if it is not finite.

    A mean is NaN if every update was skipped, and JSON has no NaN.
    """
    return round(value, digits) if math.isfinite(value) else None


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of the device in bytes, or of this process if the device does not count memory."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    unit = {"darwin": 1}.get(sys.platform, 1024)  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
