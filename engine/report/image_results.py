"""Writes tables, pictures and a record of an evaluation, and keeps the results of the best epoch."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL.Image import DecompressionBombError

from configs.schema import Config, Data
from datasets import ImageSet
from engine.checkpoint.format import progress_in
from engine.evaluation.best import Best
from engine.record.saved_files import read_object, write_table
from engine.tasks.class_tables import RATES, ClassResults
from engine.train.callback import Callback
from engine.train.counters import EpochResult
from engine.train.trainer import Trainer
from models.weights.record import CALIBRATION
from utils.errors import ConfigError, cause_of
from utils.files import write_text
from utils.log import Log
from utils.runs import BEST

RECORD, CONFUSION_PICTURE, MISTAKES_PICTURE = "results.json", "confusion.png", "mistakes.png"
CORRECT_PICTURE = "correct.png"
Calibration = dict[str, Any] | None  # the figures of a calibration, or None if there is none


class ResultFiles:
    """Writes tables and pictures of an evaluation. If the disk is full, it warns once, and the run continues."""

    def __init__(self, folder: Path, image_set: ImageSet, log: Log, data: Data):
        self._folder, self._image_set, self._log, self._data = folder, image_set, log, data
        self._has_failed = False

    def write(
        self,
        results: ClassResults,
        best: Best,
        with_pictures: bool,
        calibration: Calibration = None,
        calibrated: ClassResults | None = None,
    ) -> bool:
        """Write the results of the evaluation that `best` describes, and the figures of its calibration, if any.

        `calibrated`: results with calibrated probabilities, for pictures.
        Return whether all is written.
        """
        record = self._folder / RECORD
        try:
            record.unlink(missing_ok=True)  # while the tables may mix two evaluations, there is no record
            for name, header, rows in results.tables(self._image_set):
                write_table(self._folder / name, header, rows)
            facts = record_of(best) | ({"left_out": left_out} if (left_out := self._image_set.left_out) else {})
            facts |= {"num_in_training": self._image_set.watch.num_in_training}
            facts |= {CALIBRATION: calibration} if calibration else {}
            facts |= results.figures(self._image_set)
            write_text(record, to_json(facts))
            if with_pictures:
                self._draw(calibrated or results)
                write_text(record, to_json(facts | {"pictures": True}))
        except (OSError, DecompressionBombError) as error:  # PIL also applies DATA.MAX_PIXELS to captions
            if not self._has_failed:
                self._log.warn(f"cannot write the image results in {self._folder} ({cause_of(error)})")
            self._has_failed = True
        return not self._has_failed

    def _draw(self, results: ClassResults) -> None:
        from engine.predict.pictures import write_picture  # local: only pictures need it
        from engine.report.image_sheets import draw_confusion, draw_correct, draw_mistakes

        if results.has_matrix:
            write_picture(draw_confusion(results, self._image_set.classes), self._folder / CONFUSION_PICTURE)
        if not self._image_set.makes_batches:
            content = results, self._image_set, self._data
            write_picture(draw_mistakes(*content), self._folder / MISTAKES_PICTURE)
            write_picture(draw_correct(*content), self._folder / CORRECT_PICTURE)

    def belong_to(
        self, best: Best, with_pictures: bool, with_rates: bool = False, calibration: Calibration = None
    ) -> bool:
        """Return whether the folder has this evaluation's results, including pictures and class rates if requested."""
        expected = record_of(best) | ({"pictures": True} if with_pictures else {})
        expected |= {CALIBRATION: calibration} if calibration else {}
        expected |= {"num_in_training": self._image_set.watch.num_in_training}
        record = read_object(self._folder / RECORD)
        has_rates = not with_rates or any(key in record for key in RATES)
        return has_rates and all(record.get(key) == value for key, value in expected.items())


def record_of(best: Best) -> dict[str, Any]:
    """Return the content of results.json for this evaluation."""
    by_groups = {}
    if best.by_groups:
        number, *interval = best.by_groups
        by_groups = {"num_groups": number, "interval": None if None in interval else interval}
    return {
        "epoch": best.epoch,
        "weights": best.weights,
        "metric": best.metric,
        "value": best.value if math.isfinite(best.value) else None,
        "loss": best.loss if math.isfinite(best.loss) else None,
        "num_images": best.num_images,
        **by_groups,
    }


def to_json(record: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in record.items() if value is not None}, indent=2) + "\n"


SECONDS_BETWEEN = 60.0
PAUSE_FACTOR = 100  # pause after a write, in multiples of its duration, so that writing takes less than 1% of a run


class BestResults(Callback):
    """Keeps the results of the best epoch in every process, and writes them in process 0."""

    def __init__(self, config: Config, folder: Path, image_set: ImageSet, log: Log, trainer: Trainer):
        self._best_file, self._log, self._trainer = folder / BEST, log, trainer
        self._files, self._draws = ResultFiles(folder, image_set, log, config.DATA), config.REPORT
        self._calibrated: ClassResults | None = None  # the best results with calibrated probabilities
        # The results of the best epoch, and of the previous best, which counts again if best.pth cannot be written.
        self._held: dict[Best, ClassResults] = {}
        self._saved_calibration: tuple[Best, dict[str, Any]] | None = None  # the one in best.pth, and its epoch
        self._next_write = time.monotonic() + SECONDS_BETWEEN

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        if result.images is not None:
            self._held = dict([*self._held.items(), (trainer.best, result.images)][-2:])
        if time.monotonic() > self._next_write:
            start = time.monotonic()
            self._write(with_pictures=False)
            took = time.monotonic() - start
            self._next_write = time.monotonic() + max(SECONDS_BETWEEN, PAUSE_FACTOR * took)

    def complete(self, evaluate_best: Callable[[], ClassResults], should_stop: Callable[[], bool]) -> None:
        """At the end of a run, evaluate best.pth again if the folder has no results for it. Collective.

        An earlier start may have been killed before it wrote them. Images are ranked by the scores of each class only
        here, because ranking takes seconds if there are many classes. If `should_stop` ends the ranking, the results
        lack the rates of classes and pictures, so a resumed run completes them.
        """
        trainer = self._trainer
        if trainer.process.first(self._are_missing):
            self._held = {trainer.best: evaluate_best()}
        if results := self._held.get(trainer.best):
            results = results.complete(trainer.process, self._log, should_stop)
            self._held = {trainer.best: results}
            self._draws = self._draws and results.is_complete
            if self._draws:
                from engine.report.image_sheets import calibrated

                figures = trainer.process.first(self._calibration) or {}
                self._calibrated = calibrated(results, figures.get("temperature"), trainer.process)

    def _are_missing(self) -> bool:
        best = self._trainer.best
        if not best.exists or best in self._held or self._has_written(self._draws, with_rates=True):
            return False
        from engine.checkpoint.find import read_checkpoint

        try:
            return Best.from_state(read_checkpoint(self._best_file, lazily=True)["progress"]["best"]) == best
        except (ConfigError, KeyError):
            self._log.warn(f"cannot read {self._best_file}, so there are no image results for it")
            return False

    def close(self) -> None:
        self._write(with_pictures=self._draws)

    def _write(self, with_pictures: bool) -> None:
        best = self._trainer.best
        if not self._trainer.process.is_first or best not in self._held:
            return
        results = self._held[best]
        if not self._has_written(with_pictures, with_rates=results.is_complete):
            self._files.write(results, best, with_pictures, self._calibration(), self._calibrated)

    def _has_written(self, with_pictures: bool, with_rates: bool) -> bool:
        return self._files.belong_to(self._trainer.best, with_pictures, with_rates, self._calibration())

    def _calibration(self) -> Calibration:
        """Return the figures of the best epoch's calibration, from this run or from best.pth."""
        part, best = self._trainer.parts.get(CALIBRATION), self._trainer.best
        calibration = part.state() if part else {}
        if calibration.get("epoch") != best.epoch:
            if self._saved_calibration is None or self._saved_calibration[0] != best:
                self._saved_calibration = best, progress_in(self._best_file).get(CALIBRATION, {})
            calibration = self._saved_calibration[1]
        if calibration.get("epoch") != best.epoch or "figures" not in calibration:
            return None
        temperature = {"temperature": calibration["temperature"]} if "temperature" in calibration else {}
        return temperature | calibration["figures"]
