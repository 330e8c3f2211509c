"""What a person sees of the epochs on a terminal: a line each, in columns."""

import shutil
from collections.abc import Callable
from typing import NamedTuple

from configs.schema import Config
from engine.evaluation.scores import TITLES, Best, Scores, format_value
from engine.train.counters import EpochResult
from utils.text import counted, format_time

LINES_BELOW_A_HEAD = 40


class Column(NamedTuple):
    title: str
    width: int
    text: str
    rank: int = 0  # where the terminal is too narrow, those of the highest rank go first


class EpochTable:
    """Makes the lines; the head stands above the first one, and again where it has left the screen."""

    def __init__(
        self, config: Config, has_ema: bool, width: Callable[[], int] = lambda: shutil.get_terminal_size().columns
    ):
        self._num_epochs, self._has_ema, self._width = config.TRAIN.NUM_EPOCHS, has_ema, width
        # The one that decides which epoch is best; the loss has a column of its own.
        instead_of_loss = "map" if config.DATA.has_several_labels else "top1"
        self._metric = instead_of_loss if config.TRAIN.BEST_METRIC == "loss" else config.TRAIN.BEST_METRIC
        self._head, self._lines_left = "", 0  # before the next head

    def lines(self, epoch: int, result: EpochResult, best: Best, seconds_left: float | None) -> list[str]:
        """The line of an epoch, counted from 1, below a head where one is due. `best` includes this epoch."""
        columns = self._columns(epoch, result, best, seconds_left)
        while len(join(columns, "title")) >= self._width() and any(each.rank for each in columns):
            columns.remove(max(columns, key=lambda each: each.rank))
        head, skipped = join(columns, "title"), result.report.skipped
        is_due = head != self._head or not self._lines_left
        self._head, self._lines_left = head, (LINES_BELOW_A_HEAD if is_due else self._lines_left) - 1
        line = join(columns, "text") + (f"  {counted(skipped, 'update')} skipped" if skipped else "")
        return [head, line] if is_due else [line]

    def _columns(self, epoch: int, result: EpochResult, best: Best, seconds_left: float | None) -> list[Column]:
        scores, title, width = result.scores, TITLES[self._metric], max(7, len(TITLES[self._metric]))
        speed = result.num_images / max(result.training_seconds, 1e-9)
        mark = "*" if best.epoch == epoch else ""  # a new best
        ema = [Column(f"EMA {title}", 4 + width, self._show(scores.get("_ema")), rank=1)] if self._has_ema else []
        return [
            Column("epoch", 2 * len(str(self._num_epochs)) + 3, f"{epoch}/{self._num_epochs}"),
            Column("loss", 6, f"{result.report.mean_loss:.4f}", rank=3),
            Column("val loss", 8, f"{scores[''].loss:.4f}" if scores else "-", rank=4),
            Column(title, width, self._show(scores.get(""))),
            *ema,
            Column("best", 8, f"{mark}{format_value(best.metric, best.value)}" if best.epoch else "-"),
            Column("images/s", 8, f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}", rank=2),
            Column("left", 8, "-" if seconds_left is None else format_time(seconds_left)),
        ]

    def _show(self, scores: Scores | None) -> str:
        return format_value(self._metric, getattr(scores, self._metric)) if scores else "-"


def join(columns: list[Column], part: str) -> str:
    return "  ".join(getattr(each, part).rjust(each.width) for each in columns)
