"""The data set of finished runs or weights as it is now: numbered images, and the copies among them."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.checks import WITHOUT_FILES
from configs.schema import Config
from configs.values import unflatten
from datasets import ImageSet, PriorFacts, SavedData, open_data
from datasets.copies import are_equal, find_copies
from datasets.fingerprint import data_facts
from datasets.identity import ImageContents
from datasets.sources.layout import folder_of_data
from datasets.split import DRAWN
from datasets.split.listed import describe_changed_images
from datasets.types import NO_PRIOR_FACTS
from engine.features.embedder import Embedder
from engine.predict.classifier import Classifier
from engine.record.saved_run import SavedRun
from models.weights.files import read_record
from utils.changed_facts import changed_facts
from utils.commands import command
from utils.errors import ConfigError, DataError
from utils.runs import weights_in
from utils.text import csv_cell, first_of

PARTS = ("training", "validation")


def config_of(run: SavedRun, data_path: Path | None) -> Config:
    """Return the settings of a run. `data_path`: where the data are now, if they were moved after the run."""
    config = unflatten(run.settings)
    refuse_several_classes(run.folder, config)
    path, recorded = config.DATA.DATA_PATH, run.run_facts.get("data_path")
    if data_path:
        path = str(data_path)
    elif recorded and os.path.exists(recorded) and os.path.realpath(Path(path).expanduser()) != recorded:
        path = recorded  # DATA.DATA_PATH may be relative to the folder in which the run was started
    return config.changed("DATA", DATA_PATH=path)


def refuse_several_classes(source: Path | str, config: Config) -> None:
    if config.task.has_several_classes:
        raise ConfigError(
            f"{source}: its images can have several labels; only data with one label per image are judged"
        )


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
        return command("labels", self.name, *words)

    @property
    def by_folds(self) -> str:
        """Return the command that repeats the first run with -folds, so that all images are judged."""
        return command("train", "-cfg", self.folder / "config.yaml", "-folds", 5)

    def data(self) -> "DataSet":
        """Return the images, divided as by the first run."""
        return DataSet.load(self.config, next(iter(self.runs), None))

    def features(self, data: "DataSet", say: Callable[[str], None]) -> np.ndarray:
        """Return the features of all images, float32 [N, D]; a row of NaN is an unreadable image."""
        # The data may have measured settings, such as DATA.RANGE.
        embedder = Embedder(replace(self.weights, config=data.config), self.device, say)
        features = np.full((len(data), embedder.width), np.nan, np.float32)
        for images, numbers in zip(data.parts, data.numbers, strict=True):
            table = embedder(images)
            features[numbers[table.indices]] = table.features
        return features


@dataclass(frozen=True, eq=False)
class DataSet:
    """All images of a data set, split into parts by the settings of a run.

    An image's number is its row in the whole set. If the data has its own validation part, its rows follow the rows
    of the training part.
    """

    config: Config
    train: ImageSet
    val: ImageSet

    @classmethod
    def load(cls, config: Config, run: SavedRun | None = None) -> "DataSet":
        """Read the data. `run`: a run with these settings, whose folds are kept."""
        # The outputs of the model need not be those of the data: weights of ImageNet judge any labels.
        has_folds = config.DATA.FOLD or config.DATA.FOLDS
        prior = PriorFacts(saved=_saved_folds(run.folder)) if run and has_folds else NO_PRIOR_FACTS
        opened = open_data(config.changed("MODEL", NUM_CLASSES=None), prior=prior)
        val = opened.val
        if val.makes_batches:
            raise ConfigError(
                f"DATA.DATASET: the images of {config.DATA.DATASET} are generated, so no label is wrong; "
                "give a run with real data"
            )
        if val.trains_on_all:
            val = val.take(np.empty(0, np.int64))
        return cls(opened.config.changed("MODEL", NUM_CLASSES=config.MODEL.NUM_CLASSES), opened.train, val)

    def __len__(self) -> int:
        return len(self.train) + len(self.val)

    @property
    def parts(self) -> tuple[ImageSet, ImageSet]:
        return self.train, self.val

    @property
    def is_divided(self) -> bool:
        """Return whether both parts are of one set. If not, the data has its own validation part."""
        return self.val.trains_on_all or self.val.split.get("rule") in DRAWN

    @property
    def is_listing(self) -> bool:
        """Return whether the folders of the images are their labels."""
        return all(part.is_listing for part in self.parts)

    @property
    def is_correctable(self) -> bool:
        return self.is_listing or self.config.DATA.DATASET == "csv"

    @property
    def classes(self) -> list[str]:
        return self.val.classes

    @property
    def root(self) -> Path:
        """Return the folder to which the names of images are relative."""
        return folder_of_data(self.config.DATA)

    @property
    def place(self) -> Path | str:
        """Return the place of the images for messages: their folder, or the data set if it has no files."""
        name = self.config.DATA.DATASET
        return f"the data set {name}" if name in WITHOUT_FILES else self.root

    @cached_property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the training and of the validation images."""
        if self.is_divided and len(self.val):
            return self.train.rows.astype(np.int64), self.val.rows.astype(np.int64)
        return np.arange(len(self.train)), len(self.train) + np.arange(len(self.val))

    @cached_property
    def _places(self) -> np.ndarray:
        """Return the place of each image among the training images and then the validation images."""
        return np.argsort(np.concatenate(self.numbers))

    def in_order(self, of_parts: Iterable[np.ndarray]) -> np.ndarray:
        """Return the values of the images of both parts in the order of their numbers."""
        return np.concatenate([*of_parts])[self._places]

    @cached_property
    def labels(self) -> np.ndarray:
        """Return int64 [N]: the class number of each image."""
        return self.in_order(part.targets.astype(np.int64) for part in self.parts)

    @cached_property
    def is_held_out(self) -> np.ndarray:
        """Return bool [N]: whether each image is in the validation part."""
        return self._places >= len(self.train)

    def find(self, number: int) -> tuple[ImageSet, int]:
        """Return the part that contains an image, and the index of the image in this part."""
        part = int(self.is_held_out[number])
        return self.parts[part], int(self._places[number]) - part * len(self.train)

    def name(self, number: int) -> str:
        """Return the path of an image relative to `root`, or its name in tables if it is not a file."""
        part, index = self.find(number)
        return part.table_name(index)

    @property
    def names(self) -> list[str]:
        return [self.name(number) for number in range(len(self))]

    def label(self, number: int) -> str:
        """Return the label of an image, or its numbers, as text."""
        part, index = self.find(number)
        return self._texts[int(part is self.val)][part.targets[index]]

    @cached_property
    def _texts(self) -> list[Sequence[str]]:
        """Return the meaning of each target of both parts. Different numbers have different texts."""
        return [part.target_names() for part in self.parts]


def _saved_folds(folder: Path) -> SavedData:
    """Return how a run divided its images, for open_data."""
    weights = weights_in(folder)
    record = read_record(weights) if weights else {}
    return SavedData([], record.get("split", {}), file=weights or folder / "best.pth")


def cell_of(text: str) -> str:
    """Return a name or class as tables show it: formulas are marked, invalid UTF-8 is replaced."""
    return str(csv_cell(text)).encode(errors="surrogateescape").decode(errors="replace")


def refuse_other_data(run: SavedRun, data: DataSet) -> None:
    """Raise DataError if the run read other data."""
    then, now = run.run_facts.get("data"), data_facts(*data.parts)
    if not isinstance(then, dict) or not then:
        raise ConfigError(
            f"{run.folder}: status.json does not describe the data of this run, so it cannot be compared; train "
            "the run again"
        )
    changes = changed_facts(then, now)
    if not changes:
        return
    image_changes, _ = describe_changed_images(run.folder / "split.csv", *data.parts)
    changed = first_of(image_changes or [f"{fact}: {values}" for fact, values in changes.items()], "; ", limit=4)
    raise DataError(
        f"{run.folder}: {data.place} does not contain the data of this run ({changed}); train again on this data, or "
        "give the run's data with -data_path"
    )


class Copy(NamedTuple):
    """An image that is like another image, and why that is a problem."""

    image: int
    reason: str
    other_label: str = ""  # of the image that it is like, if the labels differ


def read_copies(data: DataSet, folds: Sequence[int] | None, say: Callable[[str], None]) -> list[Copy]:
    """Read all images, and return those with a copy that is a problem. `folds`: as in find_copies.

    `say` reports unreadable images.
    """
    contents, copies, where = ImageContents(len(data), data.find), [], "in training"
    contents.read(say)
    if folds is not None:
        where = "in another fold"
    for group, contradictions, in_training, _ in find_copies(contents, data.val, folds):
        for pair in contradictions or in_training:
            how = "equal" if are_equal(group, pair) else "nearly equal"
            what = f", labelled {data.label(pair[1])}" if contradictions else f" {where}"
            other_label = data.label(pair[1]) if contradictions else ""
            copies.append(Copy(pair[0], f"{how} to {data.name(pair[1])}{what}", other_label))
    return copies
