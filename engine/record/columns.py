"""The columns of metrics.csv and steps.csv, each with its meaning and its figure.

A figure of an epoch is one row of COLUMNS: the tables, the trackers, the terminal, log.txt and docs/tracking.md follow it.
"""

import math
import resource
from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.evaluation.scores import Scores
from engine.train.callback import PHASES
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.text import counted

Row = dict[str, float | None]


class Epoch(NamedTuple):
    """The source of the figures of an epoch. Process 0 takes more of them than the others, so no figure may call a collective."""

    trainer: Trainer
    result: EpochResult
    times: dict[str, float | None]  # percent of its training time in each phase

    def score(self, name: str, digits: int = 4) -> float | None:
        """A score of the raw weights, None in an epoch without evaluation."""
        scores = self.result.scores.get("")
        return finite(getattr(scores, name), digits) if scores else None

    def further_scores(self) -> Row:
        """The scores beside loss, top-1 and top-5, and all of them of the EMA weights."""
        row: Row = {}
        for suffix, scores in self.result.scores.items():
            figures = scores.more() if not suffix else {"top1": scores.top1, "top5": scores.top5} | scores.more()
            row |= {f"eval_loss{suffix}": finite(scores.loss)} if suffix else {}
            row |= {f"eval_{name}{suffix}": round(value, 4) for name, value in figures.items()}
        return row

    @property
    def images_per_s(self) -> float:
        return self.result.num_images / max(self.result.training_seconds, 1e-9)


# The lines of log.txt about an epoch.
TRAINING, VALIDATION, MACHINE = "training", "validation", "machine"


class Column(NamedTuple):
    """A column of metrics.csv, and how its figure is printed."""

    name: str
    meaning: str
    value: Callable[[Epoch], float | Row | None]  # a row: several columns at once
    # On the line of an epoch on a terminal, if it has a title.
    title: str = ""
    text: Callable[[float], str] = "{:.4f}".format
    width: int = 8
    # In log.txt, if it has words for it: nothing is printed where they are empty.
    words: Callable[[float], str] | None = None
    line: str = TRAINING
    is_repeatable: bool = True  # False: two equal runs measure different values, for instance times


OF_LAYERS = "; with `TRAIN.LAYER_DECAY` that of the classifier, of which layers below have a part"
# The first six are those of timm's summary.csv; percent where nothing else is said.
COLUMNS = (
    Column(
        "epoch",
        "number of the epoch, from 0; -1: the weights that the run started from, before training",
        lambda epoch: epoch.trainer.epoch,
    ),
    Column(
        "train_loss",
        "mean training loss",
        lambda epoch: finite(epoch.result.report.mean_loss),
        title="loss",
        width=6,
        words="Train Loss: {:.4f}".format,
    ),
    Column("eval_loss", "validation loss", lambda epoch: epoch.score("loss", 6), title="val loss"),
    Column("eval_top1", "validation top-1 accuracy", lambda epoch: epoch.score("top1")),
    Column("eval_top5", "validation top-5 accuracy", lambda epoch: epoch.score("top5")),
    Column("lr", f"learning rate of the last update{OF_LAYERS}", lambda epoch: epoch.result.report.lr),
    Column(
        "train_top1",
        "top-1 accuracy on augmented training images",
        lambda epoch: finite(100 * epoch.result.report.accuracy),
        words=lambda percent: f"Train Acc: {percent / 100:.4f}",
    ),
    Column(
        "eval_macro_recall, eval_macro_f1, eval_micro_f1, eval_map",
        "further scores, the last two with several labels an image; with EMA all scores again, as `eval_top1_ema`",
        Epoch.further_scores,
    ),
    Column("step", "updates until the end of the epoch", lambda epoch: epoch.trainer.step),
    Column(
        "images_per_s",
        "training images per second",
        lambda epoch: round(epoch.images_per_s, 1),
        title="images/s",
        text=lambda speed: f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}",
        words="{:.1f} images/s".format,
        line=MACHINE,
        is_repeatable=False,
    ),
    Column(
        "data_wait_pct",
        "share of the training time spent waiting for data",
        lambda epoch: epoch.times["data"],
        is_repeatable=False,
    ),
    Column(
        "memory_mb",
        "peak memory in MiB, of the device or, on CPUs, of process 0",
        lambda epoch: round(peak_memory(epoch.trainer.process.device) / 2**20),
        words="{:.0f} MB".format,
        line=MACHINE,
        is_repeatable=False,
    ),
    Column(
        "loss_scale",
        "factor of the loss in half precision",
        lambda epoch: epoch.result.report.loss_scale,
        words=lambda scale: f"loss scale {scale:g}" if scale != 1 else "",
        line=MACHINE,
    ),
    Column(
        "skipped",
        "updates skipped in the epoch",
        lambda epoch: epoch.result.report.skipped,
        words=lambda skipped: f"{counted(skipped, 'update')} skipped" if skipped else "",
        line=MACHINE,
    ),
    Column("grad_norm", "mean norm of the gradient", lambda epoch: round(epoch.result.report.mean_grad_norm, 6)),
    Column(
        "train_seconds",
        "seconds of its training",
        lambda epoch: round(epoch.result.training_seconds, 3),
        words="time: {:.2f}".format,
        is_repeatable=False,
    ),
    Column(
        "eval_seconds",
        "seconds of its evaluation",
        lambda epoch: round(epoch.result.evaluation_seconds, 3),
        words="time: {:.2f}".format,
        line=VALIDATION,
        is_repeatable=False,
    ),
)
# The columns of steps.csv, a row for each report: fields of `Report`.
STEP_COLUMNS = {
    "step": "number of the update, from 0",
    "epoch": "number of its epoch, from 0",
    "lr": f"learning rate{OF_LAYERS}",
    "loss": "training loss of the update",
    "mean_loss": "mean training loss of the epoch so far",
    "grad_norm": "norm of the gradient",
    "loss_scale": "factor of the loss in half precision",
    "skipped": "updates skipped in the epoch so far",
    "num_updates": "with `TRAIN.BUDGET`: of the whole run, as chosen by then",
    "seconds": "time since the last report",
    **{f"{name}_pct": f"share of these seconds, phase {name}" for name in PHASES},
}


def epoch_row(epoch: Epoch) -> Row:
    """One row of metrics.csv."""
    row: Row = {}
    for column in COLUMNS:
        value = column.value(epoch)
        row |= value if isinstance(value, dict) else {column.name: value}
    return row


def start_row(trainer: Trainer, scores: Scores, seconds: float) -> Row:
    """The row of metrics.csv before the first epoch: what was not measured is empty."""
    nothing = Report(*[math.nan] * 11)
    row = epoch_row(Epoch(trainer, EpochResult(nothing, {"": scores}, 0, 0.0, seconds), {"data": None}))
    measured = {key: value for key, value in row.items() if value is not None and math.isfinite(value)}
    return dict.fromkeys(row) | measured | {"epoch": -1}


def finite(value: float, digits: int = 6) -> float | None:
    """The value, rounded for a table; None for NaN (every update was skipped), which JSON does not have."""
    return round(value, digits) if math.isfinite(value) else None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the device if it counts them, otherwise of this process."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
