"""The doctor's callback in a run. Most runs skip few updates, so the code that examines and saves is imported late."""

from pathlib import Path
from typing import Any

import torch

from configs.schema import Config
from datasets import Batch
from engine.train.callback import Callback
from engine.train.counters import Report
from engine.train.trainer import Trainer
from utils.log import Log


class Doctor(Callback):
    """Keeps the last update, examines it after `SKIPS` consecutive skipped updates, and saves it if the run stops.

    It keeps references to the loader's tensors, or copies on the host if an update has several micro-batches. Every
    process saves, because the images of any process may be the cause.
    """

    SKIPS = 10

    def __init__(self, config: Config, folder: Path, log: Log, facts: dict[str, Any], examines: bool = True):
        """`facts`: plain values to save with the update; `examines`: whether this process examines updates."""
        self._config, self._folder, self._log, self._facts, self._examines = config, folder, log, facts, examines
        self.step, self.batches = 0, []  # the last update: its batches, each with its weight in the update's loss
        self._advice: str | None = None  # None: not examined yet

    def get_advice(self) -> str:
        """Return the finding and the remedy, or an empty string if nothing was examined."""
        return self._advice or ""

    def on_micro_batch(self, trainer: Trainer, batch: Batch, weight: float) -> None:
        if trainer.step != self.step:
            self.step, self.batches = trainer.step, []
        if trainer.data.order.num_accumulated > 1:  # so that the device holds one micro-batch, and not a whole update
            host = torch.device("cpu")
            images, targets = (tensor.to(host, non_blocking=True) for tensor in (batch.images, batch.targets))
            batch = batch._replace(images=images, targets=targets)
        self.batches.append((batch, weight))

    def on_report(self, trainer: Trainer, report: Report) -> None:
        enough = min(self.SKIPS, self._config.PRECISION.MAX_CONSECUTIVE_SKIPS)
        if self._examines and self._advice is None and report.skips_in_a_row >= enough:
            from engine.doctor.overflow import Batches, examine

            update = Batches(self.step, trainer.process.rank, self.batches)
            self._advice = examine(self._config, self._folder, self._log, update, trainer)

    def on_rollback(self, trainer: Trainer) -> None:
        self._advice, self.batches = None, []

    def on_non_finite(self, trainer: Trainer) -> str:
        from engine.doctor.overflow import Batches, save_last_update

        update = Batches(self.step, trainer.process.rank, self.batches, self._facts)
        return save_last_update(self._config, self._folder, self._log, update, trainer)
