"""DATA.FOLDS: a run on all images is measured by further runs, each of which holds out one fold and predicts it.

The further runs are in the folder `folds` of the run, train for as many epochs, and keep no best epoch: as of the run
itself, their last weights count, or the average of them (MODEL_EMA). All predictions together are the evaluation of the
last epoch, so a run that was stopped while it made them continues with them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from configs.load import LoadedConfig
from configs.schema import AUTO
from datasets import BadImages, build_eval_data
from engine.checkpoint.format import progress_in
from engine.evaluation.evaluate import Evaluation, evaluate
from engine.evaluation.scores import Scores
from engine.evaluation.tally import Scoring, Tally, sum_dtype
from engine.plan import TrainPlan
from engine.record.saved_run import read_status
from engine.session import Session
from engine.train.stop_conditions import Stopped
from engine.train.trainer import Trainer
from utils.distributed import Process
from utils.errors import AFTER_SIGNAL, AlreadyReportedError
from utils.program import StopSignal

FOLDER = "folds"  # in the folder of the run


def evaluate_by_folds(session: Session, plan: TrainPlan, trainer: Trainer, stop: StopSignal) -> dict[str, Evaluation]:
    """Train what is missing of the further runs, and return the evaluation of their predictions. Collective.

    The key is the suffix of the weights that count: "_ema", or "" without MODEL_EMA.
    """
    paths = [train_without(fold, session, plan, stop) for fold in range(plan.config.DATA.FOLDS)]
    process, suffix = trainer.process, "_ema" if trainer.ema else ""
    model = trainer.ema.model if trainer.ema else trainer.model
    with restored(model, trainer), scoring_of_all(model, trainer) as scoring:
        of_all = scoring.tally(process.device, sum_dtype(process.device), len(plan.eval_set))
        indices = []
        for fold, path in enumerate(paths):
            load_weights(model, path, f"state_dict{suffix}", trainer)
            rows = np.flatnonzero(plan.eval_set.folds == fold)
            of_fold = scoring._replace(tally=lambda *given: FoldTally(of_all))
            indices.append(evaluate_fold(rows, model, of_fold, plan, trainer, session.log.warn))
        of_all.per_image.indices = np.concatenate(indices)
        scores = replace(of_all.result(process), metric=plan.config.TRAIN.BEST_METRIC)
    return {suffix: Evaluation(scores, of_all.per_image)}


# --- the further runs ---


def train_without(fold: int, session: Session, plan: TrainPlan, stop: StopSignal) -> Path:
    """Train the run that holds out this fold, unless it is finished. Return its last checkpoint. Collective.

    Raise Stopped if a signal or a time limit ends it earlier.
    """
    from engine.run import run_training  # imported here, because a run imports this file

    loaded = settings_of_fold(fold, session.path, plan)
    last = session.path / FOLDER / loaded.config.START.NAME / "last.pth"
    num_folds, num_epochs = plan.config.DATA.FOLDS, plan.config.TRAIN.NUM_EPOCHS

    def is_finished() -> bool:
        return progress_in(last).get("epoch", 0) >= num_epochs

    if session.process.first(is_finished):
        return last
    title = f"fold {fold + 1} of {num_folds}"
    session.log.say(f"{title}: a further run, without the images of this fold, in {last.parent}")
    further = Session(loaded, session.process, part=title)
    try:
        code = run_training(further, loaded, stop)
    except BaseException as error:
        further.end(error)
        raise
    further.log.close()
    if 0 < code < AFTER_SIGNAL:
        reason = read_status(last.parent).get("reason", f"exit code {code}")
        session.log.warn(f"{title}: {reason}")
        raise AlreadyReportedError(f"{last.parent}: {reason}", code)
    if not session.process.first(is_finished):
        raise Stopped(stop.number)
    return last


def settings_of_fold(fold: int, folder: Path, plan: TrainPlan) -> LoadedConfig:
    """Return the settings of the run that holds out this fold: those of the run on all images, but for its files."""
    loaded, config = plan.inputs.loaded, plan.config
    num_folds = config.DATA.FOLDS
    config = config.changed("DATA", FOLDS=None, FOLD=f"{fold}/{num_folds}")
    config = config.changed("START", NAME=f"fold-{fold + 1}", RESUME=AUTO, PROFILE=None)
    config = replace(
        config,
        SAVE=str(folder / FOLDER),
        VALIDATE_FREQ=config.TRAIN.NUM_EPOCHS,
        KEEP_CHECKPOINTS=0,
        REPORT=False,
        CALIBRATE=False,
        TRACK=(),
    )
    origin = f"DATA.FOLDS {num_folds}"
    changed = "DATA.FOLDS DATA.FOLD SAVE VALIDATE_FREQ KEEP_CHECKPOINTS REPORT CALIBRATE TRACK".split()
    return replace(
        loaded, config=config, origins=loaded.origins | dict.fromkeys(changed, origin), notes=[], choice=None
    )


# --- their predictions ---


class FoldTally:
    """Adds the images of one fold to the tally of all images."""

    def __init__(self, of_all: Tally):
        self._of_all, self._num_images, self._num_excluded = of_all, 0, 0
        self.per_image = self
        self.indices = np.zeros(0, np.int64)  # of the images of this process in the fold

    def add(self, outputs: Any, targets: Tensor, num_excluded: int) -> None:
        self._of_all.add(outputs, targets, num_excluded)
        self._num_images += len(targets)
        self._num_excluded += num_excluded

    def result(self, process: Process) -> Scores:
        """Return scores with the numbers of images of the fold, which an evaluation checks. Collective."""
        counts = process.join([(self._num_images, self._num_excluded)])
        num_images, num_excluded = (sum(column) for column in zip(*counts, strict=True))
        return Scores(0.0, 0.0, 0.0, num_images, num_excluded)


def evaluate_fold(
    rows: np.ndarray, model: nn.Module, scoring: Scoring, plan: TrainPlan, trainer: Trainer, warn: Callable[[str], None]
) -> np.ndarray:
    """Predict the images of a fold. `rows`: their indices among all images. Return those of this process. Collective."""
    images = plan.eval_set.take(rows)
    data = build_eval_data(plan.config, images, trainer.process)
    bad_images = BadImages(images, plan.config.DATA.MAX_BAD_FRACTION, warn)
    (evaluation,) = evaluate([model], data, trainer.inference, bad_images, scoring)
    return rows[evaluation.images.indices]


@contextlib.contextmanager
def scoring_of_all(model: nn.Module, trainer: Trainer) -> Iterator[Scoring]:
    """Yield the scoring of the task, which keeps the features of images if predictions compare photos with them."""
    with contextlib.ExitStack() as stack:
        scoring = trainer.task.scoring(trainer)
        if trainer.config.learns_strangers:
            from engine.confidence.fit import keeping_features

            scoring = stack.enter_context(keeping_features(scoring, [model], trainer))
        yield scoring


@contextlib.contextmanager
def restored(model: nn.Module, trainer: Trainer) -> Iterator[None]:
    """Let the weights of the model be replaced in the block."""
    own = {name: tensor.clone() for name, tensor in trainer.parallel.local_state(model).items()}
    try:
        yield
    finally:
        trainer.parallel.load(model, own)
        trainer.computing.refresh()


def load_weights(model: nn.Module, path: Path, key: str, trainer: Trainer) -> None:
    """Load the weights of a further run."""
    from engine.checkpoint.find import read_checkpoint

    state = read_checkpoint(path, lazily=True)
    trainer.parallel.load(model, trainer.parallel.local_part({key: state[key]})[key])
    trainer.computing.refresh()
