"""Checkpoints of a run: their content, the best epoch, and the rollback to an earlier state."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.callback_list import Watchers
from engine.checkpoint.async_saver import BEST, AsyncSaver
from engine.checkpoint.format import BAD_BATCHES_FILE, write_bad_batches
from engine.checkpoint.resume import TRAINED_ON, comparable
from engine.evaluation.scores import Best, Scores
from engine.plan import TrainPlan
from engine.session import Session
from engine.train.stop_conditions import NonFinite
from engine.train.trainer import Trainer
from models.weights.sharded import PIECES
from models.weights.state import preprocessing_of
from utils import VERSION
from utils.errors import cause_of, naming_damage


class Saves:
    """Saves a run while it trains, and reports it in status.json. All methods are collective.

    The best epoch is decided here only: `compare_with_best` compares each evaluation with the best one so far, and
    `wait_and_sync_best` goes back to the previous best if its best.pth could not be written.
    """

    def __init__(self, session: Session, plan: TrainPlan, trainer: Trainer, saver: AsyncSaver, watchers: Watchers):
        self.session, self.plan, self.trainer, self.saver, self.watchers = session, plan, trainer, saver, watchers
        self.process, self.log, self.folder = session.process, session.log, session.path
        self.failure = ""  # why the last save failed, in every process
        self.before: Scores | None = None  # of the weights that the run starts from
        self.reload_best_from_disk()
        saver.newest = {"epoch": trainer.epoch, "step": trainer.step}
        saver.on_saved = lambda: self.show("training")
        saver.on_saved()

    def show(self, state: str, **facts) -> None:
        """Write status.json: where the training is, what is on the disk, and the updates that the run leaves out."""
        progress = describe_progress(self.plan, self.trainer, self.folder, self.saver.newest, self.saver.best)
        self.session.status(state, **progress, run=self.saver.run or self.session.identity._asdict(), **facts)

    def save(self, metric: float | None = None, also: Iterable[str] = ()) -> None:
        """Save last.pth, and under the names in `also`. Returns when the state is copied."""
        trainer, parallel = self.trainer, self.trainer.parallel
        state = trainer.state_dict() | describe_run(self.plan, trainer, metric, list(self.watchers.bad_images.indices))
        state["run"] = self.session.identity.saved_now()
        if parallel.is_sharded:
            rest, pieces = parallel.split_for_save(state)
            self.saver.save({**rest, PIECES: pieces}, list(also))
        else:
            self.process.first(lambda: self.saver.save(state, list(also)))

    def compare_with_best(self, scores: dict[str, Scores], epoch: int) -> tuple[str, bool]:
        """Compare an evaluation with the best one. Returns the suffix of the weights that score better, and whether they
        are the best so far."""
        self.wait_and_sync_best()
        trainer = self.trainer
        suffix, chosen = max(scores.items(), key=lambda item: item[1].rank)
        is_best = trainer.best.is_worse_than(chosen)
        if is_best:
            trainer.best = Best.of(chosen, epoch, suffix)
        trainer.preferred = f"state_dict{suffix}"
        # By the epoch: best.pth may have been there before a resume from an earlier state.
        trainer.not_better = 0 if trainer.best.epoch == epoch else trainer.not_better + 1
        return suffix, is_best

    def wait_and_sync_best(self) -> None:
        """Wait for the saver. If best.pth could not be written, the previous best counts again, in every process."""
        self._wait()
        self.trainer.best, self.failure = self.process.first(lambda: (self.saver.best, self.saver.failure))

    def reload_best_from_disk(self) -> None:
        """Forget the best epoch of a loaded state if its best.pth is not there."""
        known = self.trainer.best
        self.saver.reload_from_disk()
        if not known.epoch:
            self.saver.best = Best()  # it is of what followed that state, or of other validation images
        self.wait_and_sync_best()
        if self.trainer.best != known:
            self.log.say(f"the best epoch was {known.epoch}, but {self.folder / BEST}: {self.describe_best()}")

    def roll_back(self, error: NonFinite) -> bool:
        """Go back to the newest checkpoint before a streak of skipped updates. False if none is left."""
        from engine.checkpoint.find import find_before, read_checkpoint

        trainer, streak = self.trainer, error.streak
        if trainer.left_out:  # a second time it would not help
            return False
        self._wait()
        path = self.process.first(lambda: find_before(self.folder, streak.start, self.log.warn))
        if path is None:
            return False
        with naming_damage(path):
            trainer.roll_back(read_checkpoint(path, lazily=True), streak)
        self.reload_best_from_disk()
        left_out = trainer.left_out[-1]
        self.log.say(
            f"{error}; going back to {path}, after step {trainer.step}; updates {left_out.start} to {left_out.stop - 1} "
            f"are left out this time, and their images named in {BAD_BATCHES_FILE}"
        )
        if self.process.is_first:
            try:
                write_bad_batches(self.folder, trainer.data, trainer.left_out)
            except OSError as failure:
                file = self.folder / BAD_BATCHES_FILE
                self.log.warn(f"cannot write {file} ({cause_of(failure)}); training continues")
        self.save()
        return True

    def describe_best(self) -> str:
        return self.trainer.best.describe(has_ema=self.trainer.ema is not None)

    def _wait(self) -> None:
        self.process.first(self.saver.wait)
        self.saver.wait()  # in the other processes: sharded checkpoints


def describe_run(plan: TrainPlan, trainer: Trainer, metric: float | None, bad_images: list[int]) -> dict[str, Any]:
    """Architecture, classes and preprocessing under timm's names, for other programs."""
    config = plan.config
    return {
        "arch": config.MODEL.NAME,
        "metric": metric,
        "version": 2,
        "halfstep_version": VERSION,
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
    """Facts for status.json: where the training is, and what is on the disk: `saved`, the last.pth, and `best`."""
    held = {best.metric: best.value, "epoch": best.epoch, "file": BEST} if best.epoch else None
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
        "left_out": [[each.start, each.stop - 1] for each in trainer.left_out] or None,
    }
