"""Checkpoints of a run: their content, and the best epoch."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.schema import Config
from engine.callback_list import Watchers
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.resume import TRAINED_ON, comparable
from engine.evaluation.best import Best
from engine.evaluation.evaluate import Evaluation
from engine.parallel import is_sharded
from engine.plan import TrainPlan
from engine.session import Session
from engine.tasks.class_tables import ClassResults
from engine.train.stop_conditions import why_finished
from engine.train.trainer import Trainer
from models.weights.record import BEST_SCORES, VERSION_KEY, preprocessing_of
from models.weights.sharded import PIECES
from utils import VERSION
from utils.runs import BEST, utc_now
from utils.text import counted

if TYPE_CHECKING:
    from engine.best_scores import BestScores


class Comparison(NamedTuple):
    """The result of comparing the evaluations of an epoch with the best one so far."""

    suffix: str  # of the better or chosen weights: "" for raw, "_ema" for EMA
    is_best: bool  # whether these weights are the new best
    images: ClassResults | None  # the results of each image, if they are the new best and the task has answers


class Saves:
    """Saves a run while it trains, and reports it in status.json. All methods are collective.

    last.pth is written after each epoch, every SAVE_STEPS updates, after a rollback, when TRAIN.BUDGET chooses the
    number of updates, and when a signal, or a time limit after at least one update, stops the run. The old last.pth
    becomes previous.pth. During a streak of skipped updates, previous.pth stays the last checkpoint from before the
    streak. The save after an epoch is also written as best.pth if its evaluation is the best so far, and as
    checkpoint-N.pth every SAVE_FREQ epochs and after the last one. The newest KEEP_CHECKPOINTS files checkpoint-N.pth
    are kept (0: none). A failed save only causes a warning.

    Only this class decides which epoch is the best: the epoch whose raw or EMA weights have the best
    TRAIN.BEST_METRIC, and at equal values the smaller loss. `compare_with_best` compares each evaluation with the best
    so far, and `wait_and_sync_best` returns to the previous best if best.pth could not be written. After the last
    epoch, its weights become the best, unless TRAIN.BEST_EPOCH or BestScores (engine/best_scores.py) keep the highest.
    """

    def __init__(self, session: Session, plan: TrainPlan, trainer: Trainer, saver: AsyncSaver, watchers: Watchers):
        self.session, self.plan, self.trainer, self.saver, self.watchers = session, plan, trainer, saver, watchers
        self.process, self.log, self.folder = session.process, session.log, session.path
        self.failure = ""  # why the last save failed, or empty if it succeeded; the same in every process
        if plan.config.TRAIN.BEST_EPOCH == "last":
            from engine.best_scores import BestScores

            trainer.parts[BEST_SCORES] = BestScores(plan, self.folder / BEST, self.log)
        self.reload_best_from_disk()
        saver.newest = {"epoch": trainer.epoch, "step": trainer.step}
        saver.on_saved = lambda: self.show("training")
        saver.on_saved()

    def show(self, state: str, **facts) -> None:
        """Write status.json with the progress of the training, the checkpoints on disk and the left-out updates."""
        progress = describe_progress(self.plan, self.trainer, self.folder, self.saver.newest, self.saver.best)
        self.session.status(state, **progress, run=self.saver.run or self.session.identity._asdict(), **facts)

    def save(self, metric: float | None = None, extra_names: Iterable[str] = ()) -> None:
        """Save last.pth, also under the names in `extra_names`. Return when the state is copied; a thread writes it."""
        trainer, parallel = self.trainer, self.trainer.parallel
        state = trainer.state_dict() | describe_run(self.plan, trainer, metric, list(self.watchers.bad_images.indices))
        state["run"] = {**self.session.identity._asdict(), "saved": utc_now()}
        if parallel.is_sharded:
            rest, pieces = parallel.split_for_save(state)
            self.saver.save({**rest, PIECES: pieces}, list(extra_names))
        else:
            self.process.first(lambda: self.saver.save(state, list(extra_names)))

    def save_and_wait(self) -> None:
        """Save last.pth. Return when it is on the disk, or when the save has failed."""
        self.save()
        self.wait_and_sync_best()

    def compare_with_best(self, evaluations: dict[str, Evaluation], epoch: int) -> Comparison:
        """Compare the evaluations of an epoch with the best one so far. After the last epoch, choose what is kept."""
        self.wait_and_sync_best()
        trainer, before = self.trainer, self.trainer.best
        suffix = max(evaluations, key=lambda name: evaluations[name].scores.rank)
        # A run that was killed after it had chosen this epoch repeats it, with the same scores, without a second
        # choice.
        is_chosen = before.rival is not None and before.epoch == epoch
        if is_chosen:
            suffix = before.suffix
        elif before.is_worse_than(evaluations[suffix].scores):
            trainer.best = Best.of(evaluations[suffix].scores, epoch, suffix)
        # Compare epochs: a resumed run may repeat the epoch of best.pth and only equal its scores.
        highest = before.rival.epoch if is_chosen else trainer.best.epoch
        trainer.not_better = 0 if highest == epoch else trainer.not_better + 1
        is_best = trainer.best is not before
        images = evaluations[suffix].images.gather(self.process) if is_best else None
        result = Comparison(suffix, is_best, images)
        if best_scores := trainer.parts.get(BEST_SCORES):
            if is_best:
                best_scores.note(trainer.best, images)
            else:
                best_scores.follow(trainer.best)
            ends = why_finished(self.plan.config.TRAIN, trainer.schedule.num_epochs, epoch, trainer.not_better)
            if ends and not is_chosen:
                result = self._choose(best_scores, evaluations, epoch) or result
        trainer.preferred = f"state_dict{result.suffix}"
        return result

    def _choose(self, best_scores: "BestScores", evaluations: dict[str, Evaluation], epoch: int) -> Comparison | None:
        """Make the last epoch the best one, unless the highest is clearly better: then return None. Collective."""
        suffix = max(evaluations)  # the average, or "" without one
        last = Best.of(evaluations[suffix].scores, epoch, suffix)
        if self.trainer.best == last:
            return None
        images = evaluations[suffix].images.gather(self.process)
        chosen = best_scores.choose(self.trainer.best, last, images)
        if chosen != last:
            return None
        self.trainer.best = chosen
        best_scores.note(chosen, images)
        return Comparison(suffix, True, images)

    def take_as_best(self, epoch: int) -> bool:
        """Let the newest weights be best.pth, because no validation image can choose. Return True."""
        self.wait_and_sync_best()
        trainer = self.trainer
        suffix = "_ema" if trainer.ema and trainer.step else ""
        trainer.best = Best(math.nan, epoch, math.nan, suffix, metric=self.plan.config.TRAIN.BEST_METRIC)
        trainer.preferred = f"state_dict{suffix}"
        return True

    def wait_and_sync_best(self) -> None:
        """Wait for the saver. If best.pth could not be written, the previous best counts again, in every process."""
        self.wait()
        best, self.failure = self.process.first(lambda: (self.saver.best.state(), self.saver.failure))
        self.trainer.best = Best.from_state(best)

    def reload_best_from_disk(self) -> None:
        """Take the best epoch from the best.pth on disk. A loaded state may have another best epoch."""
        known = self.trainer.best
        self.saver.reload_from_disk()
        # If the state has no best epoch (older than best.pth, or reset by `restore`), best.pth on disk does not count.
        if not known.exists:
            self.saver.best = Best()
        self.wait_and_sync_best()
        if self.trainer.best != known:
            self.log.say(f"the best epoch was {known.epoch}; now {self.folder / BEST} decides: {self.describe_best()}")

    def describe_best(self) -> str:
        best, config = self.trainer.best, self.plan.config
        if best.exists and not best.num_images:
            reason = "DATA.FOLDS was not reached" if config.DATA.FOLDS else "DATA.VAL_FRACTION is 0"
            return f"nothing was measured, because {reason}"
        described = best.describe(self.trainer.ema is not None, self.trainer.before)
        if config.DATA.FOLDS and best.exists:
            described += f", by {counted(config.DATA.FOLDS, 'further run')} that had not learned these images"
        return described

    def wait(self) -> None:
        self.process.first(self.saver.wait)
        self.saver.wait()  # the other processes write too if checkpoints are sharded


def make_saver(session: Session, config: Config) -> AsyncSaver:
    """Return the saver for DIST.STRATEGY. Collective."""
    process, log, keep = session.process, session.log, config.KEEP_CHECKPOINTS
    if is_sharded(config, process):
        from engine.checkpoint.sharded_saver import ShardedSaver

        return ShardedSaver(
            session.path, keep, process, log.warn if process.is_first else log.note, session.check_folder
        )
    return AsyncSaver(session.path, keep, process.device, log.warn, session.check_folder)


def describe_run(plan: TrainPlan, trainer: Trainer, metric: float | None, bad_images: list[int]) -> dict[str, Any]:
    """Return the metadata of a checkpoint: settings, classes and data, and timm's keys for other programs."""
    config = plan.config
    return {
        "arch": config.MODEL.NAME,
        "metric": metric,
        "version": 2,
        VERSION_KEY: VERSION,
        "config": comparable(config, trainer.data.order),
        "seed": config.SEED,
        "class_names": list(plan.classes),
        "class_weights": plan.class_weights,
        "validation": plan.validation,
        "split": plan.eval_set.split,
        TRAINED_ON: plan.facts,
        "bad_images": bad_images,
        "data": preprocessing_of(config.DATA),
    }


def describe_progress(
    plan: TrainPlan, trainer: Trainer, folder: Path, saved: dict[str, int], best: Best
) -> dict[str, Any]:
    """Return the progress of the training, of last.pth (`saved`) and of best.pth on disk, for status.json."""
    # JSON has no NaN.
    value = best.value if math.isfinite(best.value) else None
    held = None
    if best.exists:
        held = {best.metric: value, "epoch": best.epoch, "file": BEST, "weights": best.weights}
    if best.rival:
        held["highest"] = best.rival._asdict()
    before = {name: figure for name, figure in (trainer.before or {}).items() if math.isfinite(figure)}
    return {
        **saved,
        "position": {"epoch": trainer.epoch, "step": trainer.step},
        "total_epochs": trainer.schedule.num_epochs,
        "total_steps": trainer.schedule.num_updates,
        "saved": saved if (folder / "last.pth").exists() else None,
        "best": held,
        "best_top1": held and held.get("top1"),
        "best_metric": held and best.metric,
        "best_epoch": held and best.epoch,
        "before": before or None,
        "left_out": [[each.start, each.stop - 1] for each in trainer.left_out] or None,
    }
