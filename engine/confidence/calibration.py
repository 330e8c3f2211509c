"""Calibrates the best weights of a run before they are saved, and stores the result in its checkpoints."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.format import progress_in
from engine.evaluation.tally import joined
from engine.tasks.class_tables import ClassResults
from engine.train.callback import Callback
from engine.train.counters import EpochResult
from engine.train.trainer import Trainer
from models.weights.record import CALIBRATION, KNOWN
from utils.distributed import Process
from utils.log import Log
from utils.runs import BEST

MOST_SCORES, MOST_IMAGES = 2**22, 2**17  # more images do not make the temperature noticeably more precise
HASH = 2654435761  # the factor of Knuth's multiplicative hash


class Calibration(Callback):
    """Fits a temperature to each new best evaluation. Every process has this callback, and the same result."""

    def __init__(
        self, folder: Path, log: Log, trainer: Trainer, saved: dict, groups: np.ndarray | None = None, facts: Any = ()
    ):
        """`folder`: the folder of the run; `saved`: the state in the checkpoint that the run continues from.

        `groups`: the number of each validation image's group, for a task whose answers depend on groups; `facts`: about
        the images, for the answers.
        """
        self._best_file, self._log, self._state = folder / BEST, log, saved
        self._groups, self._facts = groups, dict(facts)
        trainer.parts[CALIBRATION] = self

    def state(self) -> dict[str, Any]:
        """Return the calibration of the best epoch, or {} if there is none yet."""
        return self._state

    def fit(self, trainer: Trainer, images: ClassResults) -> None:
        best, process = trainer.best, trainer.process
        scores = gather_scores(images, process, self._groups)
        weights = {"epoch": best.epoch, "step": trainer.step, "weights": f"state_dict{best.suffix}"}
        self._state = process.first(lambda: weights | self._facts | trainer.task.calibrate(scores))
        if "reason" in self._state:
            self._log.note(f"the best weights are not calibrated, because {self._state['reason']}")
        if trainer.config.fits_unknown_statistics and "reason" not in self._state:
            from engine.confidence.fit import learn

            self._state[KNOWN] = learn(images, trainer, self._state.get("temperature", math.inf))
            if reason := self._state[KNOWN].get("reason"):
                self._log.note(f"-unknown will not compare photos with the validation images, because {reason}")

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        best, process = trainer.best, trainer.process
        if result.images is not None:
            self.fit(trainer, result.images)
        elif best.exists and best.epoch != self._state.get("epoch"):
            # The run was killed after it wrote best.pth, or the last best.pth could not be written.
            calibration = process.first(lambda: progress_in(self._best_file).get(CALIBRATION))
            self._state = calibration or {"epoch": best.epoch}


def gather_scores(images: ClassResults, process: Process, groups: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
    """Return the logits and targets of all processes in the order of the image set, and `groups` if given. Collective.

    If there are too many images, only a subset is used, chosen by a hash of the index. Images whose logits are not
    all finite are left out. If the evaluation kept no logits, return an empty tuple.
    """
    local = images.local
    if local.scores is None:
        return ()
    logits, targets = local.scores.on_host()
    num_images = len(images.indices)
    interval = max(1, -(-num_images * logits.shape[1] // MOST_SCORES), -(-num_images // MOST_IMAGES))
    chosen = local.indices * HASH % 2**32 < 2**32 // interval
    indices, logits, targets = joined(process, local.indices[chosen], logits[chosen], targets[chosen])
    is_finite = np.isfinite(logits).all(1)
    kept = logits[is_finite], targets[is_finite]
    return kept if groups is None else (*kept, groups[indices[is_finite]])
