"""The columns of metrics.csv and steps.csv, each with its meaning and its value.

COLUMNS defines the metrics of an epoch for tables, trackers, the terminal, log.txt and docs/tracking.md.
"""

import math
import resource
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from configs.tables import METRICS
from engine.evaluation.scores import USUAL, Scores
from engine.train.callback import PHASES
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
    times: dict[str, float | None]  # percentage of the training time in each phase

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


# The kinds of lines in log.txt about an epoch.
TRAINING, VALIDATION, MACHINE = "training", "validation", "machine"


class Column(NamedTuple):
    """A column of metrics.csv, and the format in which its value is printed."""

    name: str
    meaning: str
    value: Callable[[Epoch], float | Row | None]  # may return a row, which fills several columns
    # A column with a title is also shown in the epoch's line on a terminal.
    title: str = ""
    text: Callable[[float], str] = "{:.4f}".format
    width: int = 8
    # Returns the text for log.txt. The column is left out there if `log_text` is None or the text is empty.
    log_text: Callable[[float], str] | None = None
    line: str = TRAINING
    is_repeatable: bool = True  # false for measurements that differ between identical runs, such as times


OF_LAYERS = "; with `TRAIN.LAYER_DECAY`, that of the classifier"
# The first six columns are the columns of timm's summary.csv. Scores are in percent unless the meaning says otherwise.
COLUMNS = (
    Column(
        "epoch",
        "number of the epoch, from 0; -1: evaluation of the initial weights, before training",
        lambda epoch: epoch.trainer.epoch,
    ),
    Column(
        "train_loss",
        "mean training loss",
        lambda epoch: finite(epoch.result.report.mean_loss),
        title="loss",
        width=6,
        log_text="Train Loss: {:.4f}".format,
    ),
    Column("eval_loss", "validation loss", lambda epoch: epoch.score("loss", 6), title="val loss"),
    Column("eval_top1", "validation top-1 accuracy", lambda epoch: epoch.score("top1")),
    Column("eval_top5", "validation top-5 accuracy", lambda epoch: epoch.score("top5")),
    Column("lr", f"learning rate of the last update{OF_LAYERS}", lambda epoch: epoch.result.report.lr),
    Column(
        "train_top1",
        "top-1 accuracy on augmented training images",
        lambda epoch: finite(100 * epoch.result.report.accuracy),
        log_text=lambda percent: f"Train Acc: {percent / 100:.4f}" if math.isfinite(percent) else "",
    ),
    Column(
        ", ".join(f"eval_{name}" for name in METRICS if name not in USUAL),
        "further scores, if the task of the run has them; names of the EMA's scores end in `_ema`",
        Epoch.further_scores,
    ),
    Column("step", "total number of updates at the end of the epoch", lambda epoch: epoch.trainer.step),
    Column(
        "images_per_s",
        "training images per second",
        lambda epoch: round(epoch.images_per_s, 1),
        title="images/s",
        text=lambda speed: f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}",
        log_text="{:.1f} images/s".format,
        line=MACHINE,
        is_repeatable=False,
    ),
    Column(
        "data_wait_pct",
        "percentage of the training time spent waiting for data",
        lambda epoch: epoch.times["data"],
        is_repeatable=False,
    ),
    Column(
        "memory_mb",
        "peak memory of the device in MiB (on CPUs: of process 0)",
        lambda epoch: round(peak_memory(epoch.trainer.process.device) / 2**20),
        log_text="{:.0f} MB".format,
        line=MACHINE,
        is_repeatable=False,
    ),
    Column(
        "loss_scale",
        "loss scale in half precision",
        lambda epoch: epoch.result.report.loss_scale,
        log_text=lambda scale: f"loss scale {scale:g}" if scale != 1 else "",
        line=MACHINE,
    ),
    Column(
        "skipped",
        "updates skipped in the epoch",
        lambda epoch: epoch.result.report.skipped,
        log_text=lambda skipped: f"{counted(skipped, 'update')} skipped" if skipped else "",
        line=MACHINE,
    ),
    Column("grad_norm", "mean norm of the gradient", lambda epoch: round(epoch.result.report.mean_grad_norm, 6)),
    Column(
        "train_seconds",
        "training time in seconds",
        lambda epoch: round(epoch.result.training_seconds, 3),
        log_text="time: {:.2f}".format,
        is_repeatable=False,
    ),
    Column(
        "eval_seconds",
        "evaluation time in seconds",
        lambda epoch: round(epoch.result.evaluation_seconds, 3),
        log_text="time: {:.2f}".format,
        line=VALIDATION,
        is_repeatable=False,
    ),
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
    """Return the row of metrics.csv for an epoch."""
    row: Row = {}
    for column in COLUMNS:
        value = column.value(epoch)
        row |= value if isinstance(value, dict) else {column.name: value}
    return row


def start_row(trainer: Trainer, scores: Scores, seconds: float) -> Row:
    """Return the row of metrics.csv for the evaluation of the initial weights. Training metrics are empty."""
    nothing = Report(*[math.nan] * 11)
    row = epoch_row(Epoch(trainer, EpochResult(nothing, {"": scores}, 0, 0.0, seconds), {"data": None}))
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
