"""Keeps the results of a run's best weights, and writes them: at the end, and before that rarely enough to cost nothing."""

import time
from collections.abc import Callable
from pathlib import Path

from configs.schema import Config
from datasets import ImageSet
from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import read_checkpoint
from engine.evaluation.scores import Best
from engine.record.image_tables import Results
from engine.record.result_files import ResultFiles
from engine.train.counters import EpochResult
from engine.train.trainer import Callback, Trainer
from utils.errors import ConfigError
from utils.log import Log

SECONDS_BETWEEN = 60.0
TIMES_ITS_SECONDS = 100  # from one write to the next, so that those of large sets take less than 1% of a run


class BestResults(Callback):
    """In every process; process 0 writes."""

    def __init__(self, config: Config, folder: Path, image_set: ImageSet, log: Log, trainer: Trainer):
        self._best_file, self._log, self._trainer = folder / BEST, log, trainer
        self._files, self._draws = ResultFiles(folder, image_set, log), config.REPORT
        # Of the newest best epoch and the one before, which is the best again if best.pth finds no room.
        self._held: dict[Best, Results] = {}
        self._next_write = time.monotonic() + SECONDS_BETWEEN

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if result.images is not None and trainer.process.is_first:
            self._held = dict([*self._held.items(), (trainer.best, result.images)][-2:])
        if time.monotonic() > self._next_write:
            start = time.monotonic()
            self._write(with_pictures=False)
            took = time.monotonic() - start
            self._next_write = time.monotonic() + max(SECONDS_BETWEEN, TIMES_ITS_SECONDS * took)

    def complete(self, evaluate_best: Callable[[], Results]) -> None:
        """At the end: if the folder has no results of best.pth, because the run was killed before it wrote them, have it
        evaluated again. A collective."""
        if self._trainer.process.first(self._are_missing):
            self._held = {self._trainer.best: evaluate_best()}

    def _are_missing(self) -> bool:
        best = self._trainer.best
        if not best.epoch or best in self._held or self._files.are_of(best, self._draws):
            return False
        try:
            return Best(*read_checkpoint(self._best_file, lazily=True)["progress"]["best"]) == best
        except (ConfigError, KeyError):
            self._log.warn(f"{self._best_file} cannot be read, so there are no results of its images")
            return False

    def close(self) -> None:
        self._write(with_pictures=self._draws)

    def _write(self, with_pictures: bool) -> None:
        best = self._trainer.best
        if self._trainer.process.is_first and best in self._held and not self._files.are_of(best, with_pictures):
            self._files.write(self._held[best], best, with_pictures)
