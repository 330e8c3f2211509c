"""The further runs of DATA.FOLDS, one after another, in the folder `folds` of the run on all images.

They have the settings of that run and train for as many epochs. None chooses among its epochs: its last weights count.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from configs.load import LoadedConfig
from configs.schema import AUTO
from datasets import SavedData
from datasets.split import FOLDS
from engine.checkpoint.format import progress_in
from engine.plan import TrainPlan
from engine.record.saved_run import read_status
from engine.session import Session
from engine.train.stop_conditions import Stopped
from utils.errors import AFTER_SIGNAL, AlreadyReportedError
from utils.program import StopSignal
from utils.runs import BEST

Train = Callable[[Session, LoadedConfig, StopSignal], int]
FOLDER = "folds"  # in the folder of the run


def train_without(fold: int, session: Session, plan: TrainPlan, stop: StopSignal, train: Train) -> Path:
    """Train the run that holds out this fold, unless it is finished. Return its last checkpoint. Collective.

    `train` trains a run and returns its exit code. Raise Stopped if a signal or a time limit ends it earlier.
    """
    loaded = settings_of_fold(fold, session.path, plan)
    last = session.path / FOLDER / loaded.config.NAME / "last.pth"

    def is_finished() -> bool:
        return progress_in(last).get("epoch", 0) >= plan.config.TRAIN.NUM_EPOCHS

    if session.process.first(is_finished):
        return last
    title = f"fold {fold + 1} of {plan.config.DATA.FOLDS}"
    session.log.say(f"{title}: a further run, without the images of this fold, in {last.parent}")
    # The further runs take the folds and the copies from the list of this run, so they need not search for copies.
    divided = SavedData([], {**plan.eval_set.split, "rule": FOLDS}, file=session.path / BEST)
    further = Session(loaded, session.process, part=title, outer=session, divided=divided)
    try:
        code = train(further, loaded, stop)
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
    """Return the settings of the run that holds out this fold. `folder`: of the run on all images."""
    loaded, config, num_folds = plan.inputs.loaded, plan.config, plan.config.DATA.FOLDS
    cache = config.DATA.CACHE_PATH or str(Path(config.SAVE) / "cache")
    config = config.changed("DATA", FOLDS=None, FOLD=f"{fold}/{num_folds}", CACHE_PATH=cache)
    config = replace(config.changed("MODEL", RESUME=AUTO), NAME=f"fold-{fold + 1}", PROFILE=None)
    files = {"SAVE": str(folder / FOLDER), "KEEP_CHECKPOINTS": 0, "REPORT": False, "CALIBRATE": False, "TRACK": ()}
    config = replace(config, VALIDATE_FREQ=config.TRAIN.NUM_EPOCHS, **files)
    changed = ["DATA.FOLDS", "DATA.FOLD", "DATA.CACHE_PATH", "VALIDATE_FREQ", *files]
    origins = loaded.origins | dict.fromkeys(changed, f"DATA.FOLDS {num_folds}")
    return replace(loaded, config=config, origins=origins, notes=[], choice=None)
