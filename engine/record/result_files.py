"""The tables and pictures of one evaluation in a folder, with a record of which weights they are of."""

import json
import math
from pathlib import Path
from typing import Any

from PIL.Image import DecompressionBombError

from datasets import ImageSet
from datasets.sources.synthetic import SyntheticImages
from engine.evaluation.scores import Best
from engine.evaluation.tally import ImageResults
from engine.record.confusion import draw_confusion
from engine.record.image_tables import Names, Results, write_tables
from engine.record.mistakes import draw_mistakes
from utils.contact_sheet import write_picture
from utils.errors import cause_of
from utils.files import write_text
from utils.log import Log

RECORD, CONFUSION_PICTURE, MISTAKES_PICTURE = "results.json", "confusion.png", "mistakes.png"


class ResultFiles:
    """What a full disk keeps from being written is said once, and missing."""

    def __init__(self, folder: Path, image_set: ImageSet, log: Log):
        self._folder, self._image_set, self._log = folder, image_set, log
        self._has_failed = False

    def write(self, results: Results, best: Best, with_pictures: bool) -> None:
        """`best`: the evaluation that these are the results of."""
        record = self._folder / RECORD
        try:
            record.unlink(missing_ok=True)  # until the tables belong together again
            write_tables(self._folder, results, self._image_set)
            write_text(record, to_json(record_of(best)))
            if with_pictures:
                self._draw(results)
                write_text(record, to_json(record_of(best) | {"pictures": True}))
        except (OSError, DecompressionBombError) as error:  # the latter if DATA.MAX_PIXELS is below that of a caption
            if not self._has_failed:
                self._log.warn(f"cannot write the results of images in {self._folder} ({cause_of(error)})")
            self._has_failed = True

    def _draw(self, results: Results) -> None:
        if isinstance(results, ImageResults):
            names = Names(self._image_set.classes)
            write_picture(draw_confusion(results, names), self._folder / CONFUSION_PICTURE)
        if not isinstance(self._image_set, SyntheticImages):
            write_picture(draw_mistakes(results, self._image_set), self._folder / MISTAKES_PICTURE)

    def are_of(self, best: Best, with_pictures: bool) -> bool:
        """Whether the folder has the results of this evaluation."""
        try:
            found = json.loads((self._folder / RECORD).read_text())
        except (OSError, ValueError):
            return False
        wanted = record_of(best) | ({"pictures": True} if with_pictures else {})
        return isinstance(found, dict) and wanted.items() <= found.items()


def record_of(best: Best) -> dict[str, Any]:
    """What results.json says."""
    return {
        "epoch": best.epoch,
        "weights": "ema" if best.suffix else "raw",
        "metric": best.metric,
        "value": best.value if math.isfinite(best.value) else None,
        "loss": best.loss if math.isfinite(best.loss) else None,
        "num_images": best.num_images,
    }


def to_json(record: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in record.items() if value is not None}, indent=2) + "\n"
