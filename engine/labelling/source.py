"""What targets are judged with: finished runs, or the features of any weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.schema import Config
from engine.features.embedder import Embedder
from engine.labelling.data import DataSet, config_of
from engine.predict.classifier import Classifier
from engine.record.saved_run import SavedRun
from utils.commands import command


@dataclass(frozen=True)
class Source:
    """Finished runs of a data set, or weights with the settings of their data."""

    folder: Path  # the folder of the run or the sweep; for weights, the current folder
    runs: list[SavedRun]
    num_missing: int = 0  # trials of the sweep that are not done
    folds: int | None = None
    data_path: Path | None = None  # the data to judge with weights; for runs, the new place of moved data
    weights: Classifier | None = None
    flags: tuple[str, ...] = ()  # settings given with the weights
    device: str = "auto"

    @property
    def config(self) -> Config:
        return self.weights.config if self.weights else config_of(self.runs[0], self.data_path)

    @property
    def name(self) -> str:
        return self.weights.source if self.weights else str(self.folder)

    def command(self, *words: str) -> str:
        words = (*words, *(["-data_path", str(self.data_path)] if self.data_path else []), *self.flags)
        if self.weights:
            words = (*words, "-dataset", self.config.DATA.DATASET)
        return command("scripts/labels.py", self.name, *words)

    def features(self, data: DataSet, say: Callable[[str], None]) -> np.ndarray:
        """Return the features of all images, float32 [N, D]; a row of NaN is an unreadable image."""
        embedder = Embedder(self.weights, self.device, say)
        features = np.full((len(data), embedder.width), np.nan, np.float32)
        for images, numbers in zip(data.parts, data.numbers, strict=True):
            table = embedder(images)
            features[numbers[table.indices]] = table.features
        return features
